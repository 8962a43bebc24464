"""The Open Inference Protocol over gRPC: with our own stubs, and with the client that its users have."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc import StatusCode
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from support.archives import pack_handler
from support.grpc_calls import Client, grpc_flags, refusal, stubs
from support.running import HANDLERS, RunningServer


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with a handler without envelope, and one with its own; gives the address and a client."""
    folder = tmp_path_factory.mktemp("open")
    store = folder / "store"
    store.mkdir()
    pack_handler(store, "shares", config="envelope: kservev2\n")
    flags = grpc_flags()
    words = [str(HANDLERS / "tensors.py"), str(HANDLERS / "echo.py"), str(store / "shares.mar"), *flags]
    server = RunningServer(folder / "log", *words).wait_ready()
    client = Client(int(flags[1]), int(flags[3]))
    yield f"127.0.0.1:{flags[1]}", client
    client.close()
    server.stop()


@pytest.fixture
def client(served):
    return served[1]


@pytest.fixture
def public(served):
    """The client that users of the protocol have."""
    with triton.InferenceServerClient(served[0]) as made:
        yield made


def messages():
    return stubs().open_inference_grpc_pb2


def infer(client, model="tensors", *, raw=(), **inputs):
    """Call ModelInfer; an input is (datatype, shape, {field: elements})."""
    made = messages()
    tensors = [
        made.ModelInferRequest.InferInputTensor(
            name=name, datatype=kind, shape=shape, contents=made.InferTensorContents(**contents)
        )
        for name, (kind, shape, contents) in inputs.items()
    ]
    asked = made.ModelInferRequest(model_name=model, id="seven", inputs=tensors, raw_input_contents=raw)
    return client.open_inference.ModelInfer(asked, timeout=60)


# ---- the server and its models ----


def test_server_and_models_tell_about_themselves(client):
    made, service = messages(), client.open_inference
    assert service.ServerLive(made.ServerLiveRequest(), timeout=60).live
    assert service.ServerReady(made.ServerReadyRequest(), timeout=60).ready
    assert service.ServerMetadata(made.ServerMetadataRequest(), timeout=60).name == "flambeau"
    assert service.ModelReady(made.ModelReadyRequest(name="tensors"), timeout=60).ready
    found = service.ModelMetadata(made.ModelMetadataRequest(name="tensors", version="1.0"), timeout=60)
    assert (found.name, [*found.versions], found.platform) == ("tensors", ["1.0"], "flambeau_pytorch")
    for call, kind in (
        (service.ModelReady, made.ModelReadyRequest),
        (service.ModelMetadata, made.ModelMetadataRequest),
    ):
        assert refusal(call, kind(name="nobody"), timeout=60)[0] is StatusCode.NOT_FOUND
        assert refusal(call, kind(name="tensors", version="9"), timeout=60)[0] is StatusCode.NOT_FOUND
        assert refusal(call, kind(), timeout=60)[0] is StatusCode.INTERNAL
    assert refusal(infer, client, "nobody")[0] is StatusCode.NOT_FOUND


def test_the_public_client_finds_the_same(public):
    assert public.is_server_live()
    assert public.is_server_ready()
    assert public.is_model_ready("tensors")
    assert public.is_model_ready("tensors", "1.0")
    assert public.get_server_metadata().name == "flambeau"
    assert [*public.get_model_metadata("tensors").versions] == ["1.0"]


# ---- typed contents ----


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False, True]),
        ("INT8", "int_contents", [-128, 0, 127]),
        ("INT16", "int_contents", [-32768, 0, 32767]),
        ("INT32", "int_contents", [-(2**31), 0, 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 0, 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 1, 255]),
        ("UINT16", "uint_contents", [0, 1, 65535]),
        ("UINT32", "uint_contents", [0, 1, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 1, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.0, 1.5, float("inf")]),
        ("FP64", "fp64_contents", [0.1, -1e300, float("-inf")]),
    ],
)
def test_typed_tensors_come_back_typed(client, kind, field, values):
    reply = infer(client, x=(kind, [3, 1], {field: values}))
    (output,) = reply.outputs
    assert (reply.model_name, reply.id) == ("tensors", "seven")
    assert (output.name, output.datatype, [*output.shape]) == ("x", kind, [3, 1])
    assert [*getattr(output.contents, field)] == values
    assert not reply.raw_output_contents


def test_nan_survives(client):
    reply = infer(client, x=("FP32", [2], {"fp32_contents": [float("nan"), 1]}))
    assert np.isnan(reply.outputs[0].contents.fp32_contents[0])


def test_typed_bytes_reach_the_handler_as_base64_and_come_back_without_quotes(client):
    reply = infer(client, x=("BYTES", [1], {"bytes_contents": [b"picture"]}))
    assert [*reply.outputs[0].contents.bytes_contents] == [b"cGljdHVyZQ=="]


def test_several_inputs_have_their_names(client):
    reply = infer(client, a=("FP32", [1], {"fp32_contents": [1]}), b=("FP32", [2], {"fp32_contents": [2, 3]}))
    outputs = {output.name: [*output.contents.fp32_contents] for output in reply.outputs}
    assert outputs == {"a again": [1], "b again": [2, 3]}


def test_parameters_and_wanted_outputs_reach_the_model(client):
    made = messages()
    tensor = made.ModelInferRequest.InferInputTensor(
        name="tell", datatype="FP32", shape=[1], contents=made.InferTensorContents(fp32_contents=[1])
    )
    asked = made.ModelInferRequest(model_name="tensors", inputs=[tensor])
    asked.parameters["flag"].bool_param = True
    asked.parameters["count"].int64_param = 7
    asked.parameters["text"].string_param = "yes"
    asked.outputs.add(name="type")
    asked.outputs.add(name="parameters")
    reply = client.open_inference.ModelInfer(asked, timeout=60)
    assert sorted(output.name for output in reply.outputs) == ["parameters", "type"]
    told = {output.name: output.contents.bytes_contents[0] for output in reply.outputs}
    parameters = json.loads(told["parameters"])
    assert {"flag": True, "count": 7, "text": "yes"}.items() <= parameters.items()


# ---- raw contents, with the public client ----


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "int64", "uint8", "uint64", "bool"])
def test_raw_tensors_come_back_raw(public, kind):
    sent = (np.arange(24).reshape(2, 3, 4) % 2).astype(kind)
    tensor = triton.InferInput("x", [2, 3, 4], triton_type(sent))
    tensor.set_data_from_numpy(sent)
    reply = public.infer("tensors", [tensor], request_id="9")
    got = reply.as_numpy("x")
    assert got.dtype == sent.dtype
    assert np.array_equal(got, sent)
    assert reply.get_response().id == "9"
    assert len(reply.get_response().raw_output_contents) == 1


def triton_type(array):
    return np_to_triton_dtype(array.dtype)


def test_raw_bytes_reach_the_handler_as_bytes(public):
    sent = np.array([b"\x00\xff raw"], dtype=object)
    tensor = triton.InferInput("x", [1], "BYTES")
    tensor.set_data_from_numpy(sent)
    assert public.infer("tensors", [tensor]).as_numpy("x").tolist() == [b"\x00\xff raw"]


def test_large_raw_tensors(public):
    sent = np.arange(500_000, dtype="float32")
    tensor = triton.InferInput("x", [500_000], "FP32")
    tensor.set_data_from_numpy(sent)
    assert np.array_equal(public.infer("tensors", [tensor]).as_numpy("x"), sent)


def test_a_model_with_an_envelope_of_its_own_answers_typed_and_raw(client, public):
    reply = infer(client, "shares", x=("FP32", [2], {"fp32_contents": [1, 2]}))
    assert reply.outputs[0].name == "x"
    assert reply.id == "seven"
    tensor = triton.InferInput("x", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], dtype="float32"))
    assert public.infer("shares", [tensor]).as_numpy("x").tolist() == [1.0, 2.0, 1.0]


# ---- what makes no sense ----


@pytest.mark.parametrize(
    ("inputs", "raw", "words"),
    [
        ({}, (), "nothing to predict"),
        ({"x": ("FP32", [3], {"fp32_contents": [1, 2]})}, (), "shape"),
        ({"x": ("FP32", [1], {})}, (), "shape"),
        ({"x": ("FP16", [1], {"fp32_contents": [1]})}, (), "raw_input_contents"),
        ({"x": ("FP8", [1], {"fp32_contents": [1]})}, (), "not known"),
        ({"x": ("INT8", [1], {"int_contents": [1000]})}, (), "INT8"),
        ({"x": ("FP32", [1], {})}, (b"123",), "FP32"),
        ({"x": ("FP32", [1], {})}, (b"1234", b"1234"), "raw_input_contents"),
        ({"x": ("BYTES", [1], {})}, (b"\xff\xff\xff\xffab",), "BYTES"),
    ],
)
def test_bad_tensors_are_invalid_arguments(client, inputs, raw, words):
    code, text = refusal(infer, client, raw=raw, **inputs)
    assert code is StatusCode.INVALID_ARGUMENT
    assert words in text


def test_requested_outputs_that_do_not_exist_are_named(public):
    tensor = triton.InferInput("a", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, dtype="float32"))
    other = triton.InferInput("b", [1], "FP32")
    other.set_data_from_numpy(np.ones(1, dtype="float32"))
    with pytest.raises(InferenceServerException, match="the model has no output 'nothing'"):
        public.infer("tensors", [tensor, other], outputs=[triton.InferRequestedOutput("nothing")])


def test_more_than_anybody_needs_is_refused(client):
    made = messages()
    parameter = made.InferParameter(int64_param=1)

    def refused(**fields):
        asked = made.ModelInferRequest(model_name="tensors", **fields)
        code, text = refusal(client.open_inference.ModelInfer, asked, timeout=60)
        assert code is StatusCode.INVALID_ARGUMENT
        return text

    tensor, output = made.ModelInferRequest.InferInputTensor, made.ModelInferRequest.InferRequestedOutputTensor
    assert "1001 inputs; 1000 are allowed" in refused(inputs=[tensor()] * 1001)
    assert "1001 outputs; 1000 are allowed" in refused(outputs=[output()] * 1001)
    some = {str(i): parameter for i in range(600)}
    assert "1200 parameters; 1000 are allowed" in refused(parameters=some, outputs=[output(parameters=some)])
    assert "'a' has 9 dimensions; 8 are allowed" in refused(inputs=[tensor(name="a", shape=[1] * 9)])


def test_a_large_message_does_not_hold_up_the_others(served, client):
    count = 1_500_000
    with ThreadPoolExecutor(1) as pool:
        fields = {"a": ("BYTES", [count], {"bytes_contents": [b""] * count})}
        large = pool.submit(infer, client, "echo", **fields)
        waits, sent = [], time.monotonic()
        while not large.done():
            began = time.monotonic()
            client.open_inference.ServerLive(messages().ServerLiveRequest(), timeout=30)
            waits.append(time.monotonic() - began)
            time.sleep(0.01)
        assert max(waits) < 0.7 + (time.monotonic() - sent) / 3  # on a slow machine everything takes its time
