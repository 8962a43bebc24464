"""Elements of tensors ↔ bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.frontend.grpc.messages import MalformedMessage, open_inference
from flambeau.frontend.grpc.tensors import (
    CHUNK,
    FIELDS,
    contents_of,
    flatten,
    pack,
    put_contents,
    to_bytes,
    to_json,
    unpack,
)


@given(st.lists(st.binary()))
def test_bytes_survive(elements):
    assert unpack("BYTES", pack("BYTES", elements)) == elements


@given(st.binary())
def test_any_bytes_are_elements_or_refused(raw):
    for datatype in (*FIELDS, "FP16", "BF16", "BYTES", "nonsense"):
        try:
            assert len(pack(datatype, unpack(datatype, raw))) == len(raw)
        except MalformedMessage:
            pass


@pytest.mark.parametrize(
    ("datatype", "values"), [("INT8", [-1, 2]), ("UINT64", [2**64 - 1]), ("FP16", [1.5]), ("FP64", [])]
)
def test_numbers_survive(datatype, values):
    assert [*unpack(datatype, pack(datatype, values))] == values


def test_what_is_converted_in_chunks_is_whole():
    values = [*range(2 * CHUNK + 3)]
    raw = pack("INT32", values)
    assert len(raw) == 4 * len(values)
    assert unpack("INT32", raw) == values
    entries = [{"name": "a", "data": values, "parameters": {}}, {"name": "é", "data": []}]
    document = {"id": "x", "inputs": entries, "shape": [1, 2], "none": None, "outputs": []}
    assert "".join(to_json(document)) == json.dumps(document)


def test_numbers_that_do_not_fit_are_refused():
    for datatype, values in (("INT8", [128]), ("UINT8", [-1]), ("FP32", ["x"]), ("BF16", [1.0])):
        with pytest.raises(MalformedMessage):
            pack(datatype, values)


def test_each_type_has_its_field():
    contents = open_inference("InferTensorContents")()
    for datatype in FIELDS:
        put_contents(contents, datatype, [1])
        assert 1 in contents_of("x", datatype, contents)
    put_contents(contents, "BYTES", ["text", b"raw", {"a": 1}])
    assert [*contents_of("x", "BYTES", contents)] == [b"text", b"raw", b'{"a": 1}']


def test_small_things():
    assert [*flatten([[1, [2]], 3])] == [1, 2, 3]
    assert to_bytes(None) == b"null"
