"""A request's value → texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.errors import BadRequest
from flambeau.handlers.embedding.embed_request import read_embed_request


@pytest.mark.parametrize(
    ("value", "texts", "is_one"),
    [
        ("a b", ["a b"], True),
        (["a", "b"], ["a", "b"], False),
        (["a"], ["a"], False),
        ({"text": "a"}, ["a"], True),
        ({"input": "a", "model": "m", "user": "u", "encoding_format": "float"}, ["a"], True),
        ({"input": ["a", "b"]}, ["a", "b"], False),
        ({"inputs": ["a"]}, ["a"], False),
        ({"text": bytearray("grüße".encode())}, ["grüße"], True),
        (bytearray(b"plain text"), ["plain text"], True),
        (b'{"text": "a"}', ["a"], True),
        (b'["a"]', ["a"], False),
    ],
)
def test_every_spelling_is_understood(value, texts, is_one):
    request = read_embed_request(value, 10)
    assert (request.texts, request.is_one) == (texts, is_one)


def test_options_travel_with_the_texts():
    request = read_embed_request({"text": "a", "normalize": False, "prompt_name": "query"}, 10)
    assert (request.normalize, request.prompt_name) == (False, "query")
    request = read_embed_request({"text": "a", "normalize": None}, 10)
    assert (request.normalize, request.prompt_name) == (None, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "text 0 is empty"),
        ("  \n", "text 0 is empty"),
        (["a", ""], "text 1 is empty"),
        ([], "no text to embed"),
        (5, "text 0 is int"),
        (float("nan"), "text 0 is float"),
        (["a", None], "text 1 is NoneType"),
        ([["a"]], "text 0 is list"),
        ({}, "has no text"),
        ({"text": "a", "input": "b"}, "has text and input"),
        ({"text": {"a": 1}}, "text 0 is dict"),
        ({"text": "a", "normalized": True}, "unknown options: normalized; known: normalize, prompt_name"),
        ({"text": "a", "normalize": "yes"}, "normalize must be true or false"),
        ({"text": "a", "prompt_name": 3}, "prompt_name must be text"),
        ({"input": "a", "encoding_format": "int8"}, "must be float or base64"),
        ({"input": "a", "dimensions": 0}, "dimensions must be a whole number from 1, not 0"),
        ({"input": "a", "dimensions": True}, "dimensions must be a whole number"),
        ({"input": "a", "usage": 1}, "usage must be true or false"),
        (bytearray(b"\xff\xfe"), "not UTF-8"),
        (bytearray(b'{"text": '), "not valid JSON: .* text/plain"),
        (["a"] * 11, r"11 texts; the limit is 10 \(max_texts\)"),
        ("\ud800", "half a surrogate pair"),
    ],
)
def test_invalid_requests_are_rejected(value, reason):
    with pytest.raises(BadRequest, match=reason):
        read_embed_request(value, 10)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.sampled_from(["text", "input", "inputs", "normalize", "prompt_name", "model", "dimensions", "usage", "x"])


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner)))
def test_whatever_is_sent_is_texts_or_a_bad_request(value):
    try:
        request = read_embed_request(value, 3)
    except BadRequest:
        return
    assert 1 <= len(request.texts) <= 3
    assert all(isinstance(text, str) and text.strip() for text in request.texts)
