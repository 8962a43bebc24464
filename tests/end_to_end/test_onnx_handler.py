"""ONNX files served without code."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from flambeau.archive.pack import Recipe, pack

np = pytest.importorskip("numpy")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto  # noqa: E402

from flambeau.handlers.onnx.npy import write_npy, write_npz  # noqa: E402
from support.onnx_models import save_affine, save_identity, save_sum_and_difference  # noqa: E402


def packed(folder: Path, name: str, file: Path, config: str = "") -> Path:
    """An archive of the file; small, so quick."""
    settings = folder / f"{name}.yaml"
    settings.write_text(config or "batchSize: 1\n")
    return pack(Recipe(model_name=name, handler="onnx", serialized_file=file, config_file=settings), folder)


def affine(row):
    return [row[0] + 2 * row[2], 3 * row[1] + 2 * row[2] + 1]


def test_json_and_numpy_in_and_out(start, tmp_path):
    one = packed(tmp_path, "affine", save_affine(tmp_path / "affine.onnx"))
    two = packed(tmp_path, "two", save_sum_and_difference(tmp_path / "two.onnx"))
    server = start(one, two).wait_ready()
    assert server.predict("affine", [1, 2, 3]).json == [7, 13]
    assert server.predict("affine", {"inputs": {"x": [[1, 2, 3], [0, 0, 0]]}}).json == [[7, 13], [0, 1]]
    assert server.predict("two", {"a": [5, 6], "b": [1, 2]}).json == {"sum": [6, 8], "difference": [4, 4]}

    body = write_npy(np.array([[1, 2, 3]], np.float32))
    for kind in ("application/x-npy", "application/octet-stream", None):
        reply = server.predict("affine", body, kind=kind, headers={"Accept": "application/x-npy"})
        assert reply.headers["content-type"] == "application/x-npy"
        assert np.load(io.BytesIO(reply.body)).tolist() == [[7, 13]]
    body = write_npz({"a": np.array([5.0, 6.0]), "b": np.array([1.0, 2.0])})
    reply = server.predict("two", body, kind="application/x-npz", headers={"Accept": "application/x-npz"})
    assert reply.headers["content-type"] == "application/x-npz"
    assert np.load(io.BytesIO(reply.body))["difference"].tolist() == [4, 4]
    assert server.predict("two", body, kind="application/x-npz").json["sum"] == [6, 8]

    reply = server.predict("two", body, kind="application/x-npz", headers={"Accept": "application/x-npy"})
    assert (reply.status, "application/x-npz" in reply.message) == (400, True)
    reply = server.predict("two", {"a": [1, 2], "b": [1, 2, 3]})
    assert (reply.status, "width is 2 in input a and 3 in input b" in reply.message) == (400, True)
    reply = server.request("POST", "/explanations/affine", b"[1, 2, 3]", {"Content-Type": "application/json"})
    assert (reply.status, "no explanations" in reply.message) == (400, True)

    told = server.manage("GET", "/models/affine?customized=true").json[0]["customizedMetadata"]
    assert told["inputs"] == [{"name": "x", "type": "tensor(float)", "shape": ["batch", 3]}]
    assert told["joinsRequests"] is True


def test_bad_requests_of_a_batch_fail_alone(start, tmp_path):
    file = save_affine(tmp_path / "affine.onnx")
    server = start(packed(tmp_path, "affine", file, "batchSize: 8\nmaxBatchDelay: 300\n")).wait_ready()
    objects = io.BytesIO()
    np.save(objects, np.array([{}]), allow_pickle=True)
    json, binary = "application/json", "application/octet-stream"
    requests = [
        (b"[1, 2, 3]", json, None),
        (b"[1, 2]", json, "takes shape [batch, 3]"),
        (b"[1, 2, NaN]", json, "allow_nan"),
        (b'["a", "b", "c"]', json, "takes tensor(float)"),
        (objects.getvalue(), binary, "never unpickled"),
        (write_npy(np.ones((4, 3)))[:-8], binary, "cannot be read"),
        (b"\x00\x01\x02", binary, "send JSON"),
        (b"[[4, 5, 6], [7, 8, 9]]", json, None),
    ]
    futures = server.at_once(lambda request: server.predict("affine", request[0], kind=request[1]), requests)
    for future, (_, _, reason) in zip(futures, requests, strict=True):
        reply = future.result()
        assert reply.status == (400 if reason else 200)
        assert reason is None or reason in reply.message
    assert futures[0].result().json == affine([1, 2, 3])
    assert futures[-1].result().json == [affine([4, 5, 6]), affine([7, 8, 9])]


def test_requests_of_a_batch_are_answered_each_with_its_own(start, tmp_path):
    joined = packed(tmp_path, "joined", save_affine(tmp_path / "any.onnx"), "batchSize: 6\nmaxBatchDelay: 300\n")
    alone = packed(tmp_path, "alone", save_affine(tmp_path / "one.onnx", 1), "batchSize: 6\nmaxBatchDelay: 300\n")
    server = start(joined, alone).wait_ready()
    rows = [[float(i), 1.0, 2.0] for i in range(6)]
    for model in ("joined", "alone"):
        futures = server.at_once(lambda row, model=model: server.predict(model, row), rows)
        assert [future.result().json for future in futures] == [affine(row) for row in rows]
    bodies = [rows[0], rows[1:3], rows[3], rows[4:]]
    futures = server.at_once(lambda body: server.predict("joined", body), bodies)
    answers = [future.result().json for future in futures]
    assert answers == [affine(rows[0]), [affine(r) for r in rows[1:3]], affine(rows[3]), [affine(r) for r in rows[4:]]]


def test_other_types_and_allow_nan(start, tmp_path):
    words = packed(tmp_path, "words", save_identity(tmp_path / "words.onnx", TensorProto.STRING, ["n"]))
    options = "handler:\n  allow_nan: true\n"
    floats = packed(tmp_path, "floats", save_identity(tmp_path / "f.onnx", TensorProto.DOUBLE, ["n", 2]), options)
    server = start(words, floats).wait_ready()
    assert server.predict("words", ["grüße", "b"]).json == ["grüße", "b"]
    reply = server.predict("words", ["a"], headers={"Accept": "application/x-npy"})
    assert (reply.status, "accept application/json" in reply.message) == (400, True)
    reply = server.predict("floats", b"[NaN, 2.5]", kind="application/json")
    assert (reply.status, reply.body.split()[1:3]) == (200, [b"NaN,", b"2.5"])


def test_no_torch_is_loaded(start, tmp_path):
    server = start(packed(tmp_path, "affine", save_affine(tmp_path / "affine.onnx"))).wait_ready()
    assert server.predict("affine", [1, 2, 3]).status == 200
    [pid] = server.worker_pids("affine")
    maps = Path(f"/proc/{pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what a process has loaded")
    assert "onnxruntime" in maps.read_text()
    assert f"{os.sep}libtorch" not in maps.read_text()


def test_models_that_cannot_be_loaded_say_why(start, tmp_path):
    file = tmp_path / "corrupt.onnx"
    file.write_bytes(b"\x08\x07 no model")
    reasons = {
        "corrupt": ("", "corrupt.onnx could not be loaded as ONNX"),
        "missing": ("handler: {model_path: elsewhere.onnx}", "there is no elsewhere.onnx"),
        "misspelt": ("handler: {allow_nans: true}", "allow_nans; known: model_path, allow_nan"),
    }
    server = start(*(packed(tmp_path, name, file, config) for name, (config, _) in reasons.items()))
    for name, (_, reason) in reasons.items():
        server.until(lambda line=f"of model {name} version: 1.0 is not tried again: ": line in server.log)
        assert reason in server.log
