"""Generation requests and pieces on the wire."""

from __future__ import annotations

import pytest
from msgspec import msgpack

from flambeau.llm.sampling_params import SAMPLING_FIELDS, SamplingParams
from flambeau.wire.generation import (
    Generate,
    Piece,
    SamplingOptions,
    Token,
    decode_pieces,
    decode_request,
    encode_pieces,
    encode_request,
    given_options,
)


def test_every_sampling_parameter_crosses_the_wire():
    values = {"integer": 1, "number": 0.5, "flag": True, "texts": ["a"], "token_ids": [3], "biases": {7: 1.5}}
    values |= {"structure": {"regex": "a"}}
    given = {name: values[field.kind] for name, field in SAMPLING_FIELDS.items()} | {"dry_base": 1.5}
    request = decode_request(encode_request(Generate(prompts=["a"], sampling=SamplingOptions(**given))))
    assert given_options(request.sampling) == given
    assert SamplingParams(**given).logit_bias == {7: 1.5}


def test_only_the_parameters_that_a_request_gives_are_sent():
    body = encode_request(Generate(prompts=["a"], sampling=SamplingOptions(n=2)))
    assert msgpack.decode(body)["sampling"] == {"n": 2}
    assert given_options(decode_request(body).sampling) == {"n": 2}


@pytest.mark.parametrize("sampling", [{"unknown": 1}, {"n": "2"}, {"stop": "text"}, {"logit_bias": {"x": 1.0}}])
def test_parameters_of_the_wrong_type_are_rejected(sampling):
    with pytest.raises(ValueError, match="not a generation request"):
        decode_request(msgpack.encode({"prompts": ["a"], "sampling": sampling}))


def test_pieces_come_back_as_they_were():
    pieces = [Piece(0, "a", "stop", [Token(1, "a", -0.5, b"a", [(2, "b", -1.0, b"b")])], 3, 1), Piece(1, "")]
    assert decode_pieces(encode_pieces(pieces)) == pieces


def test_a_piece_of_text_is_sent_without_the_fields_that_few_requests_have():
    assert msgpack.decode(encode_pieces([Piece(0, " token")])) == [{"index": 0, "text": " token"}]
