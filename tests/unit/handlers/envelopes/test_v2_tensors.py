"""Tensors of KServe's version 2 become nested lists and bytes, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bf16_tensor, serialize_bf16_tensor, serialize_byte_tensor

from flambeau.errors import BadRequest
from flambeau.handlers.envelopes.v2_tensors import pack_elements, read_input, to_output, unpack_elements

TYPES = {
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP64": np.float64,
    "BOOL": np.bool_,
}


def tensor(**changes):
    return {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4], **changes}


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({}, [[1, 2], [3, 4]]),
        ({"data": [[1, 2], [3, 4]]}, [[1, 2], [3, 4]]),
        ({"shape": [-1, 1]}, [[1], [2], [3], [4]]),
        ({"shape": [1, 2, 2]}, [[[1, 2], [3, 4]]]),
        ({"shape": [], "data": [5]}, 5),
        ({"datatype": "BYTES", "data": ["a", "b"]}, "a"),
    ],
)
def test_data_is_nested_to_its_shape(changes, data):
    assert read_input(tensor(**changes))["data"] == data


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [3]},
        {"shape": [-1, -1]},
        {"shape": [-2, -2]},
        {"shape": [10**12, 0], "data": []},
        {"shape": None},
        {"shape": ["2"]},
        {"shape": [1] * 1000},
        {"data": "text"},
        {"datatype": "BYTES", "data": []},
    ],
)
def test_data_that_does_not_fit_its_shape_is_rejected(changes):
    with pytest.raises(BadRequest):
        read_input(tensor(**changes))


@pytest.mark.parametrize("missing", ["name", "datatype", "data"])
def test_missing_keys_are_named(missing):
    entry = tensor()
    del entry[missing]
    with pytest.raises(BadRequest, match=f"no '{missing}'"):
        read_input(entry)
    with pytest.raises(BadRequest, match="object"):
        read_input([1])


def test_deep_nesting_is_no_recursion():
    data: list = [1]
    for _ in range(5000):
        data = [data]
    assert read_input(tensor(shape=[1], data=data))["data"] == [1]


@pytest.mark.parametrize(
    ("result", "datatype", "data"),
    [
        ([1, 2], "INT64", [1, 2]),
        ([1, 2.5], "FP64", [1.0, 2.5]),
        ([[True], [False]], "BOOL", [True, False]),
        ([True, 2], "INT64", [True, 2]),
        ("text", "BYTES", ["text"]),
        ({"a": 1}, "BYTES", [{"a": 1}]),
        ([], "FP64", []),
        (3, "INT64", [3]),
        (torch.tensor([[1.5]]), "FP32", [1.5]),
        (torch.tensor([1], dtype=torch.uint8), "UINT8", [1]),
        (torch.tensor([1.5], dtype=torch.bfloat16), "FP64", [1.5]),
    ],
)
def test_results_become_flat_tensors(result, datatype, data):
    assert to_output("x", result) == {"name": "x", "datatype": datatype, "data": data, "shape": [len(data)]}


@pytest.mark.parametrize("datatype", TYPES)
def test_bytes_are_those_of_numpy(datatype):
    values = np.array([0, 1, 2, 5]).astype(TYPES[datatype])
    assert pack_elements(values.tolist(), datatype) == values.tobytes()
    assert unpack_elements(values.tobytes(), datatype) == values.tolist()


def test_bfloat16_and_byte_elements_are_those_of_the_public_client():
    numbers = np.array([1.0, -2.5, 3.140625], dtype=np.float32)
    assert unpack_elements(serialize_bf16_tensor(numbers).item(), "BF16") == numbers.tolist()
    assert deserialize_bf16_tensor(pack_elements(numbers.tolist(), "BF16")).flatten().tolist() == numbers.tolist()
    texts = np.array([b"one", b"", b"drei"], dtype=np.object_)
    assert unpack_elements(serialize_byte_tensor(texts).item(), "BYTES") == [b"one", b"", b"drei"]


@given(st.binary(max_size=40), st.sampled_from(["BYTES", "BF16", "FP16", "INT32", "NOSUCH", "BOOL"]))
def test_no_bytes_break_the_reader(raw, datatype):
    try:
        unpack_elements(raw, datatype)
    except BadRequest:
        pass
