"""Sentence embeddings served without code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flambeau.archive.pack import Recipe, pack

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from support.load_archives import outcome_of  # noqa: E402
from support.running import RunningServer  # noqa: E402
from support.sentence_models import minilm_folder, save_bert_folder, save_onnx_folder  # noqa: E402

STEADY = {"OMP_NUM_THREADS": "1"}  # threads that wait for a busy machine's cores make small models slow


BATCHES = "batchSize: 12\nmaxBatchDelay: 300"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("minilm")
    running = RunningServer(folder / "log", str(minilm(folder)), env=STEADY)
    yield running.wait_ready()
    running.stop(timeout=40)


def minilm(folder: Path) -> Path:
    """A model that points at the installed files instead of packing 90 MB."""
    settings = folder / "model-config.yaml"
    settings.write_text(f"{BATCHES}\nhandler:\n  model_path: {minilm_folder()}\n  max_texts: 50\n")
    recipe = Recipe(model_name="minilm", handler="sentence_embedder", config_file=settings)
    return pack(recipe, folder, format="no-archive", force=True)


def test_real_model_understands_every_spelling(server):
    text = "This is an example sentence"
    reply = server.predict("minilm", text)
    assert reply.headers["content-type"] == "application/json"
    vector = reply.json
    assert len(vector) == 384
    assert vector[:3] == pytest.approx([0.0676, 0.0635, 0.0487], abs=1e-3)
    for body in ({"text": text}, {"input": text, "model": "minilm"}, {"inputs": text}):
        assert server.predict("minilm", body).json == pytest.approx(vector, abs=1e-6)
    assert server.predict("minilm", text.encode(), kind="text/plain").json == pytest.approx(vector, abs=1e-6)
    many = server.predict("minilm", {"input": [text, "Something else"]}).json
    assert many[0] == pytest.approx(vector, abs=1e-5)
    assert np.dot(many[0], many[1]) < 0.6
    raw = server.predict("minilm", {"text": text, "normalize": False}).json
    assert np.linalg.norm(raw) > 1.5
    assert (np.array(raw) / np.linalg.norm(raw)).tolist() == pytest.approx(vector, abs=1e-6)
    told = server.manage("GET", "/models/minilm?customized=true").json[0]["customizedMetadata"]
    assert (told["dimensions"], told["maxSequenceLength"], told["pooling"]) == (384, 256, ["mean"])
    check_pages_are_shared(server.worker_pids("minilm")[0])


def check_pages_are_shared(pid: int) -> None:
    """The worker has the weights as the file's own pages, so that the next worker needs no more memory for them."""
    smaps = Path(f"/proc/{pid}/smaps")
    if smaps.exists():
        [block] = [block for block in smaps.read_text().split("VmFlags") if "model.safetensors" in block]
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in block.splitlines() if line.endswith("kB")}
        assert sizes["Rss"] > 10_000
        assert sizes["Private_Dirty"] == 0


def test_bad_requests_of_a_batch_fail_alone(server):
    texts = ["the first text", "the second text, which is a little longer", "third"]
    alone = [server.predict("minilm", text).json for text in texts]
    json, plain = "application/json", "text/plain"
    requests = [
        (b'"the first text"', json, None),
        (b'""', json, "text 0 is empty"),
        (b"NaN", json, "text 0 is float"),
        (b'["a", 5]', json, "text 1 is int"),
        (b"null", json, "null"),
        (b'{"txt": "a"}', json, "has no text"),
        (b"\xff\xfe", plain, "not UTF-8"),
        (b'{"text": "a"', json, "not valid JSON"),
        (b'"\\ud800"', json, "half a surrogate pair"),
        (b"[" + b'"a",' * 50 + b'"a"]', json, "51 texts; the limit is 50"),
        (b'{"text": "a", "prompt_name": "query"}', json, "no prompt 'query'"),
        (b'["the second text, which is a little longer", "third"]', json, None),
    ]
    futures = server.at_once(lambda request: server.predict("minilm", request[0], kind=request[1]), requests)
    for future, (body, _, reason) in zip(futures, requests, strict=True):
        reply = future.result()
        assert (body, reply.status) == (body, 400 if reason else 200)
        assert reason is None or reason in reply.message
    assert np.abs(np.array(futures[0].result().json) - np.array(alone[0])).max() < 1e-5
    assert np.abs(np.array(futures[-1].result().json) - np.array(alone[1:])).max() < 1e-5


def test_folder_is_packed_with_one_command(start, tmp_path):
    files = save_bert_folder(tmp_path / "files", **{"1_Pooling/config": {"pooling_mode_cls_token": True}})
    command = [sys.executable, "-m", "flambeau.cli.main", "archive", "pack", "--model-name", "tiny"]
    options = ["--handler", "sentence_embedder", "--extra-files", str(files), "--export-path", str(tmp_path / "store")]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    other = Recipe(model_name="words", handler="sentence_embedder", extra_files=[save_onnx_folder(tmp_path / "onnx")])
    server = start(tmp_path / "store" / "tiny.mar", pack(other, tmp_path, format="no-archive")).wait_ready()
    assert len(server.predict("tiny", "the cat").json) == 16
    assert server.predict("words", ["the"]).json == [pytest.approx([3, 6])]
    [pid] = server.worker_pids("words")
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()  # what runs in onnxruntime needs no torch


def test_models_that_cannot_be_loaded_say_why(tmp_path):
    corrupt = save_bert_folder(tmp_path / "corrupt")
    (corrupt / "model.safetensors").write_bytes(b"\x00" * 64)
    missing = save_bert_folder(tmp_path / "missing")
    (missing / "tokenizer.json").unlink()
    other = save_bert_folder(tmp_path / "other", config={"model_type": "mpnet"})
    reasons = {
        corrupt: "model.safetensors could not be loaded as safetensors",
        missing: "there is no tokenizer.json",
        other: "would answer at random",
    }
    store = tmp_path / "packed"
    for folder, reason in reasons.items():
        recipe = Recipe(model_name=folder.name, handler="sentence_embedder", extra_files=[folder])
        outcome = outcome_of(pack(recipe, store, format="no-archive"), [])
        assert outcome["is_final"]
        assert reason in outcome["failure"]
