"""Embedding requests → requests of a handler that embeds."""

from __future__ import annotations

import json

from flambeau.frontend.openai.embeddings import to_handler_request
from flambeau.frontend.openai.requests import EmbeddingRequest, read_request
from support.openai_requests import refusal


def asked(**fields):
    return to_handler_request(read_request(json.dumps({"model": "m", **fields}).encode(), EmbeddingRequest))


def test_embeddings_are_made_of_texts():
    assert asked(input="a") == {"input": ["a"], "usage": True, "encoding_format": "float"}
    assert asked(input=["a", "b"], dimensions=4, encoding_format="base64")["dimensions"] == 4
    assert refusal(asked, input=[1, 2]) == (
        "input",
        "input[0] must be text; token ids are not supported, send the text itself",
    )
    assert refusal(asked, input=[[1]])[0] == refusal(asked, input=[])[0] == "input"
    assert refusal(asked, input="a", encoding_format="int8")[0] == "encoding_format"
    assert refusal(asked, input="a", dimensions=0)[0] == "dimensions"
