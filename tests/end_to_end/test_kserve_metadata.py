"""KServe's metadata of models that declare their tensors, and replies that keep to it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

import tritonclient.grpc as triton_grpc  # noqa: E402
import tritonclient.http as triton  # noqa: E402

from support.grpc_calls import grpc_flags  # noqa: E402
from support.onnx_models import save_affine, save_sum_and_difference  # noqa: E402
from support.running import RunningServer  # noqa: E402

OWN = """
class Handler:
    def initialize(self, context):
        pass

    def tensor_metadata(self):
        x = {"name": "x", "datatype": "FP32", "shape": [-1]}
        return {"inputs": [x], "outputs": [{"name": "total", "datatype": "FP32", "shape": [1]}]}

    def handle(self, data, context):
        return [[sum(row["data"])] for row in data]
"""
X = np.array([[1, 2, 3]], np.float32)
AFFINE = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensors")
    program = torch.export.export(
        torch.nn.Linear(3, 2).eval(), (torch.zeros(2, 3),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},)
    )
    torch.export.save(program, folder / "exported.pt2")
    (folder / "own.py").write_text(OWN)
    files = [save_affine(folder / "affine.onnx"), save_sum_and_difference(folder / "pair.onnx")]
    flags = grpc_flags()
    words = [*map(str, files), str(folder / "exported.pt2"), str(folder / "own.py"), *flags]
    server = RunningServer(folder / "log", *words).wait_ready()
    yield server, program.module(), f"127.0.0.1:{flags[1]}"
    server.stop(timeout=40)


@pytest.fixture
def client(served):
    client = triton.InferenceServerClient(f"127.0.0.1:{served[0].port}")
    yield client
    client.close()
    del client
    gc.collect()  # its event loop complains otherwise


def infer(client, model, **arrays):
    """The reply of Triton's client; the outputs are not named, so that the model's own names come back."""
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, array.shape, "FP32"))
        inputs[-1].set_data_from_numpy(array)
    return client.infer(model, inputs)


def test_server_and_platform_are_named(served, client):
    assert client.get_server_metadata()["name"] == "flambeau"
    assert client.get_model_metadata("affine")["platform"] == "flambeau_onnx"
    assert client.get_model_metadata("exported")["platform"] == "flambeau_pytorch"


def test_onnx_files_declare_their_tensors_and_keep_to_them(client):
    found = client.get_model_metadata("affine")
    assert {side: found[side] for side in AFFINE} == AFFINE
    reply = infer(client, "affine", x=X)
    assert reply.get_response()["outputs"][0]["datatype"] == "FP32"
    assert reply.as_numpy("y").tolist() == [[7, 13]]
    assert [spec["name"] for spec in client.get_model_metadata("pair")["inputs"]] == ["a", "b"]
    assert infer(client, "pair", a=X, b=X).as_numpy("difference").tolist() == [[0, 0, 0]]


def test_exported_programs_declare_the_tensors_of_one_request(served, client):
    found = client.get_model_metadata("exported")
    [given], [output] = found["inputs"], found["outputs"]
    assert (given["datatype"], given["shape"], output["datatype"], output["shape"]) == ("FP32", [3], "FP32", [2])
    reply = infer(client, "exported", **{given["name"]: X[0]})
    wanted = served[1](torch.from_numpy(X))[0]
    assert reply.as_numpy(output["name"]) == pytest.approx(wanted.detach().numpy(), abs=1e-6)


def test_handlers_declare_tensors_of_their_own(client):
    assert client.get_model_metadata("own")["outputs"] == [{"name": "total", "datatype": "FP32", "shape": [1]}]
    assert infer(client, "own", x=X[0]).as_numpy("total").tolist() == [6]


def test_grpc_declares_the_same(served):
    with triton_grpc.InferenceServerClient(served[2]) as client:
        found = client.get_model_metadata("affine", as_json=True)
    assert found["platform"] == "flambeau_onnx"
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "3"]}]
