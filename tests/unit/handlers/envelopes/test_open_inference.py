"""KServe's version 2 around any handler: tensors in and out, as JSON and as binary data."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch

from flambeau.errors import BadRequest
from flambeau.handlers.envelopes.open_inference import OpenInferenceEnvelope, to_tensor
from flambeau.testing.context import new_handler_context

X = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}


def infer(handler, *documents, headers=None):
    """Run documents, or bodies, as one batch."""
    context = new_handler_context(requests=[*documents], headers=headers or {})
    return OpenInferenceEnvelope(handler).handle(context.rows, context), context


def echo(data, context):
    return [row["data"] for row in data]


def test_only_input_is_under_data_and_its_answer_has_its_name_and_shape():
    seen = []
    [reply], context = infer(lambda data, context: seen.extend(data) or echo(data, context), {"id": "7", "inputs": [X]})
    assert seen == [{"parameters": {}, **X, "data": [[1, 2], [3, 4]]}]
    assert reply["id"] == "7"
    assert reply["outputs"] == [{"name": "x", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3, 4]}]
    assert context.get_response_content_type(0) == "application/json"


def test_several_inputs_are_under_their_names():
    [reply], _ = infer(
        lambda data, context: [{"sum": row["x"][0][0] + row["y"][0], "text": "ok"} for row in data],
        {"inputs": [X, {"name": "y", "shape": [1], "datatype": "INT64", "data": [5]}]},
    )
    assert reply["outputs"] == [
        {"name": "sum", "datatype": "INT64", "shape": [1], "data": [6]},
        {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["ok"]},
    ]


def test_only_requested_outputs_are_returned():
    handler = lambda data, context: [{"a": 1, "b": 2}]  # noqa: E731
    [reply], _ = infer(handler, {"inputs": [X], "outputs": [{"name": "b"}]})
    assert [output["name"] for output in reply["outputs"]] == ["b"]
    with pytest.raises(BadRequest, match="the model has no output 'c'; it has a, b"):
        infer(handler, {"inputs": [X], "outputs": [{"name": "c"}]})


def test_every_request_of_a_batch_is_answered():
    documents = [{"inputs": [{**X, "shape": [1], "data": [i]}]} for i in range(3)]
    replies, _ = infer(echo, *documents)
    assert [reply["outputs"][0]["data"] for reply in replies] == [[0], [1], [2]]


def test_binary_data_comes_in_and_goes_out():
    raw = struct.pack("<4f", 1, 2, 3, 4)
    entry = {"name": "x", "shape": [2, 2], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    handler = lambda data, context: [np.asarray(data[0]["data"], dtype=np.float16)]  # noqa: E731
    [reply], context = infer(handler, bytearray(head + raw), headers=headers)
    length = int(context.get_response_headers(0)["Inference-Header-Content-Length"])
    [output] = json.loads(reply[:length])["outputs"]
    assert output == {"name": "x", "datatype": "FP16", "shape": [2, 2], "parameters": {"binary_data_size": 8}}
    assert np.frombuffer(reply[length:], np.float16).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("size", "length", "rest", "message"),
    [
        (16, "x", b"", "Inference-Header-Content-Length is 'x'"),
        (16, "99999", b"", "the body has"),
        (16, None, b"\0" * 8, "16 bytes of binary data; 8 are left"),
        (8, None, b"\0" * 16, "8 bytes of binary data belong to no input"),
        (7, None, b"\0" * 7, "7 bytes are not a whole number of FP32 elements"),
        (-1, None, b"", "binary_data_size must be a number of bytes"),
    ],
)
def test_binary_data_that_does_not_fit_is_a_client_error(size, length, rest, message):
    entry = {"name": "x", "shape": [2, 2], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [entry]}).encode()
    with pytest.raises(BadRequest, match=message):
        infer(echo, bytearray(head + rest), headers={"inference-header-content-length": length or str(len(head))})


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"inputs": []},
        {"inputs": [7]},
        {"inputs": [{**X, "name": {}}]},
        {"inputs": [X], "outputs": 7},
        {"inputs": [X], "outputs": [{}]},
        {"inputs": [{**X, "datatype": "BYTES", "data": []}]},
    ],
)
def test_malformed_documents_are_client_errors(document):
    with pytest.raises(BadRequest):
        infer(echo, document)


@pytest.mark.parametrize(
    ("value", "datatype", "shape", "data"),
    [
        (True, "BOOL", [1], [True]),
        (1.5, "FP64", [1], [1.5]),
        ([[1], [2]], "INT64", [2, 1], [1, 2]),
        ([1, 2.5], "FP64", [2], [1.0, 2.5]),
        ("text", "BYTES", [1], ["text"]),
        ([[1], [2, 3]], "BYTES", [1], ["[[1], [2, 3]]"]),
        ([{"a": 1}], "BYTES", [1], ['[{"a": 1}]']),
        (None, "BYTES", [1], ["null"]),
        (np.zeros((2, 0), np.int8), "INT8", [2, 0], []),
        (torch.ones(2, 1, dtype=torch.bfloat16), "BF16", [2, 1], [1, 1]),
        (torch.tensor(3), "INT64", [1], [3]),
    ],
)
def test_results_are_tensors_in_their_shape(value, datatype, shape, data):
    assert to_tensor("y", value) == {"name": "y", "datatype": datatype, "shape": shape, "data": data}
