"""POST /v1/embeddings: texts → vectors, by a handler that embeds."""

from __future__ import annotations

from typing import Any

import msgspec

from flambeau.errors import InvalidField
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.pooling import submit_pooled, usage_of
from flambeau.frontend.openai.priorities import apply_priority
from flambeau.frontend.openai.requests import EmbeddingRequest, read_request
from flambeau.serving.server import Server


class Embedded(msgspec.Struct):
    """A handler's reply to a request with `"usage": true`; the vectors stay encoded."""

    embeddings: list[msgspec.Raw]
    num_tokens: int


_decode = msgspec.json.Decoder(Embedded).decode
EXPECTED = 'embeds: it must return {"embeddings": [...], "num_tokens": ...} for a request with "usage": true'


def create_embeddings(server: Server, exchange: Exchange) -> None:
    request = read_request(take_bytes(exchange), EmbeddingRequest)
    apply_priority(exchange, request.priority)
    submit_pooled(server, exchange, request.model, "embed", to_handler_request(request), to_document, expected=EXPECTED)


def to_handler_request(request: EmbeddingRequest) -> dict[str, Any]:
    texts = texts_of(request.input)
    document: dict[str, Any] = {"input": texts, "usage": True, "encoding_format": request.encoding_format or "float"}
    chosen = {name: getattr(request, name) for name in ("dimensions", "prompt_name", "input_type")}
    return {**document, **{name: value for name, value in chosen.items() if value is not None}}


def texts_of(given: str | list[Any], field: str = "input") -> list[str]:
    """A text or a list of texts as a list."""
    texts = [given] if isinstance(given, str) else given
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidField(field, f"{field}[{i}] must be text; token ids are not supported, send the text itself")
    if not texts:
        raise InvalidField(field, f"{field} must not be empty; send a text or a list of texts")
    return texts


def to_document(body: bytes, model: str) -> tuple[dict[str, Any], int]:
    embedded = _decode(body)
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(embedded.embeddings)
    ]
    document = {"object": "list", "data": data, "model": model, "usage": usage_of(embedded.num_tokens)}
    return document, embedded.num_tokens
