"""KServe's two protocols against models that know nothing of them, with plain HTTP and with the public client."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flambeau.archive.pack import Recipe, pack
from support.running import HANDLERS, RunningServer

TWICE = """
import numpy as np


def handle(data, context):
    if data is None:
        return None
    return [twice(row.get("data", row)) for row in data]


def twice(value):
    if isinstance(value, dict) and "body" in value:
        return {"plain": str(value["body"])}
    if isinstance(value, dict):
        return {name: twice(each) for name, each in value.items()}
    if isinstance(value, bytes):
        return value * 2
    if isinstance(value, str):
        return value * 2
    if value and value[0] and isinstance(value[0][0], (str, bytes)):
        return [[each * 2 for each in row] for row in value]
    return np.asarray(value, dtype=np.float32) * 2
"""
X = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kserve")
    handler = folder / "twice.py"
    handler.write_text(TWICE)
    recipes = {"v2": "names", "shares": "shares", "bare": "bare"}
    paths = [str(handler)]
    for name, source in recipes.items():
        config = folder / f"{name}.yaml"
        config.write_text("envelope: kservev2\n" if name == "v2" else "batchSize: 4\n")
        recipe = Recipe(model_name=name, handler=str(HANDLERS / f"{source}.py"), config_file=config)
        paths.append(str(pack(recipe, folder)))
    running = RunningServer(folder / "log", *paths).wait_ready()
    yield running
    running.stop()


@pytest.fixture
def client(server):
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    yield client
    client.close()
    del client
    gc.collect()  # its event loop complains otherwise


def infer(server, model, document, verb="infer", **options):
    headers = {"Content-Type": "application/json"}
    return server.request("POST", f"/v2/models/{model}/{verb}", json.dumps(document).encode(), headers, **options)


def test_any_model_takes_tensors_and_gives_tensors(server):
    reply = infer(server, "twice", {"id": "mine", "inputs": [X]})
    assert reply.headers["content-type"] == "application/json"
    assert reply.json == {
        "model_name": "twice",
        "model_version": "1.0",
        "id": "mine",
        "outputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [2.0, 4.0, 6.0]}],
    }
    assert infer(server, "twice/versions/1.0", {"inputs": [X]}).status == 200
    assert infer(server, "twice", {"inputs": [X]}, verb="explain").status == 200
    assert server.predict("twice", {"inputs": [X]}).json["plain"].startswith("{'inputs'")  # plain calls stay plain


@pytest.mark.parametrize(
    "document", [{}, [], {"inputs": []}, {"inputs": [{"name": "x"}]}, {"inputs": [{**X, "shape": [7]}]}]
)
def test_bad_request_says_what_is_wrong_in_both_vocabularies(server, document):
    reply = infer(server, "twice", document)
    assert reply.status == 400
    assert reply.json["error"] == reply.message != ""


def test_public_client_asks_about_server_and_models(server, client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("twice")
    assert client.is_model_ready("twice", "1.0")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("twice")["versions"] == ["1.0"]
    index = {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}
    assert index == dict.fromkeys(["twice", "v2", "shares", "bare"], "READY")


def tensor(name, array, datatype, binary):
    given = triton.InferInput(name, [*array.shape], datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT64", "INT8", "UINT16", "FP16", "BF16"])
def test_public_client_sends_and_gets_numbers(client, binary, datatype):
    dtype = {"FP32": "float32", "FP64": "float64", "INT64": "int64", "INT8": "int8", "UINT16": "uint16"}.get(datatype)
    if dtype is None and not binary:
        pytest.skip("the client sends these as binary data only")
    array = np.array([[1, 2, 3]]).astype(dtype or ("float16" if datatype == "FP16" else "float32"))
    wanted = triton.InferRequestedOutput("y", binary_data=binary)
    result = client.infer("twice", [tensor("x", array, datatype, binary)], outputs=[wanted], request_id="r-1")
    assert result.get_response()["id"] == "r-1"
    assert result.as_numpy("y").tolist() == [[2, 4, 6]]
    assert client.infer("twice", [tensor("x", array, datatype, binary)]).as_numpy("x").shape == (1, 3)


@pytest.mark.parametrize("binary", [True, False])
def test_public_client_sends_and_gets_texts(client, binary):
    texts = np.array([["ab", "cd"]], dtype=np.object_)
    wanted = triton.InferRequestedOutput("y", binary_data=binary)
    result = client.infer("twice", [tensor("x", texts, "BYTES", binary)], outputs=[wanted])
    got = [each if isinstance(each, str) else each.decode() for each in result.as_numpy("y").flatten()]
    assert got == ["abab", "cdcd"]


def test_public_client_sends_several_inputs(client):
    inputs = [tensor(name, np.ones((1, 2), np.float32) * i, "FP32", True) for i, name in enumerate("ab")]
    result = client.infer("twice", inputs)
    assert result.as_numpy("a").tolist() == [[0, 0]]
    assert result.as_numpy("b").tolist() == [[2, 2]]


def test_public_client_reads_our_errors(client):
    with pytest.raises(InferenceServerException, match="Model not found: nobody"):
        client.infer("nobody", [tensor("x", np.ones((1, 2), np.float32), "FP32", True)])


def test_envelope_of_a_model_stays_and_takes_binary_data_too(server, client):
    assert "outputs" in infer(server, "v2", {"inputs": [{**X, "datatype": "INT64"}]}).json
    result = client.infer(
        "v2",
        [tensor("x", np.array([3], np.int64), "INT64", True)],
        outputs=[triton.InferRequestedOutput("x", binary_data=False)],
    )
    assert result.as_numpy("x") is not None


def test_any_model_takes_instances_and_gives_predictions(server):
    headers = {"Content-Type": "application/json"}
    document = {"instances": [{"data": 1}, {"data": 2}]}
    reply = server.request("POST", "/v1/models/shares:predict", json.dumps(document).encode(), headers)
    assert reply.json == {"predictions": [[1, 2], [2, 2]]}
    assert reply.headers["content-type"] == "application/json"
    reply = server.request("POST", "/v1/models/shares:explain", json.dumps(document).encode(), headers)
    assert "explanations" in reply.json


def test_protocols_and_plain_requests_mix(server):
    def call(i):
        if i % 3 == 0:
            return server.predict("bare", {"data": i})
        headers = {"Content-Type": "application/json"}
        if i % 3 == 1:
            document = {"instances": [{"data": i}]}
            return server.request("POST", "/v1/models/bare:predict", json.dumps(document).encode(), headers)
        return infer(server, "bare", {"inputs": [X]})

    replies = [future.result() for future in server.at_once(call, [*range(24)])]
    assert {reply.status for reply in replies} == {200}
    assert all(replies[i].json == ["dict", {"body": {"data": i}}] for i in range(0, 24, 3))
    assert all(replies[i].json == {"predictions": [["dict", {"data": i}]]} for i in range(1, 24, 3))
    assert all(replies[i].json["outputs"][0]["name"] == "x" for i in range(2, 24, 3))


def test_models_say_whether_they_are_ready_on_both_listeners(server):
    for port in (server.port, server.management_port):
        assert server.request("GET", "/v1/models/twice", port=port).json == {"name": "twice", "ready": True}
        names = server.request("GET", "/v1/models", port=port).json["models"]
        assert names == ["bare", "shares", "twice", "v2"]
        assert server.request("GET", "/v1/models/nobody", port=port).status == 404
        assert server.request("DELETE", "/v1/models/twice", port=port).status == 405


def test_async_handlers_speak_the_protocols_too(start, tmp_path):
    handler = tmp_path / "later.py"
    handler.write_text(
        "import asyncio\n\n\nasync def handle(data, context):\n    if data is None:\n        return None\n"
        "    await asyncio.sleep(0)\n    return [row['data'] for row in data]\n"
    )
    server = start(handler).wait_ready()
    assert infer(server, "later", {"inputs": [X]}).json["outputs"][0]["data"] == [1, 2, 3]
    body = json.dumps({"instances": [{"data": 5}]}).encode()
    reply = server.request("POST", "/v1/models/later:predict", body, {"Content-Type": "application/json"})
    assert reply.json == {"predictions": [5]}
