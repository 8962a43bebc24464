from __future__ import annotations

import pytest

from flambeau.errors import BadRequest
from flambeau.handlers.request_rows import decode_base64, target_of, value_of


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ({"data": 1, "body": 2}, 1),
        ({"data": b"", "body": 2}, 2),
        ({"body": [0]}, [0]),
        ({"body": 0}, 0),
        (b"taken out by an envelope", b"taken out by an envelope"),
    ],
)
def test_data_goes_before_body(row, value):
    assert value_of(row) == value


@pytest.mark.parametrize("row", [{"body": b""}, {"data": None}, {"body": [], "data": ""}])
def test_empty_request_is_rejected(row):
    with pytest.raises(BadRequest, match="empty"):
        value_of(row)


def test_other_fields_are_named():
    with pytest.raises(BadRequest, match="it has 'image', 'x'"):
        value_of({"image": 1, "x": 2})


def test_base64_may_be_broken_into_lines():
    assert decode_base64("aGVs\nbG8=\n") == b"hello"


@pytest.mark.parametrize("text", ["aGVsbG8", "a-b_", "grüße", 3, None])
def test_invalid_base64_is_rejected(text):
    with pytest.raises(BadRequest, match="base64"):
        decode_base64(text)


def test_target_may_be_a_form_field():
    assert [target_of(value) for value in (3, "4", bytearray(b"5"))] == [3, 4, 5]
    with pytest.raises(BadRequest, match="'cat'"):
        target_of(b"cat")
