"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any

import msgspec

from flambeau.errors import FlambeauError, InvalidField, JobFailed
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.http.openai.choosing import check_envelope, choose
from flambeau.frontend.http.openai.generating import take_bytes
from flambeau.frontend.http.openai.reading import read_json
from flambeau.frontend.http.openai.requests import EmbeddingRequest, embedding_decoder
from flambeau.frontend.http.problems import JSON_TYPE
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Part


class Embedded(msgspec.Struct):
    """What a handler that embeds answers to `"usage": true`: vectors as they are to be sent, and the tokens read."""

    embeddings: list[msgspec.Raw]
    num_tokens: int


_decode = msgspec.json.Decoder(Embedded).decode


def embeddings(server: Server, exchange: Exchange) -> None:
    """Answer texts with their vectors."""
    request = read_json(take_bytes(exchange), embedding_decoder)
    asked = ask_of(request)
    model, version = choose(server.registry, request.model, "embed")
    check_envelope(model)
    reply = EmbeddingReply(exchange, model, server.config.tells_details, request.model or model.name)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=[*(header for header in exchange.headers if header[0].lower() != "content-type"), JSON_TYPE],
        body=RequestBody(msgspec.json.encode(asked)),
        arrived=exchange.arrived,
    )
    submit(reply, job, version)


def ask_of(request: EmbeddingRequest) -> dict[str, Any]:
    """The request as a handler that embeds takes it."""
    texts = [request.input] if isinstance(request.input, str) else request.input
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidField("input", f"input[{i}] must be text; token ids are not supported, send the text itself")
    if not texts:
        raise InvalidField("input", "input must not be empty; send a text or a list of texts")
    asked: dict[str, Any] = {"input": texts, "usage": True, "encoding_format": request.encoding_format or "float"}
    return asked if request.dimensions is None else {**asked, "dimensions": request.dimensions}


class EmbeddingReply(Prediction):
    """Writes vectors to their exchange in OpenAI's form."""

    __slots__ = ("_chunks", "_name")

    def __init__(self, exchange: Exchange, model: Model, details: bool, name: str) -> None:
        super().__init__(exchange, model, details)
        self._name = name
        self._chunks: list[bytes] = []

    def on_parts(self, parts: list[Part]) -> None:
        """Answer when the last part has come."""
        self._chunks += [part.body for part in parts]
        if not parts[-1].last:
            return
        body = b"".join(self._chunks)
        if parts[0].status >= 400:
            self.on_error(JobFailed(body.decode("utf-8", "replace"), status=parts[0].status))
            return
        try:
            embedded = _decode(body)
        except msgspec.DecodeError as error:
            self.on_error(not_embeddings(self.model, error))
            return
        self.model.answers[200] += 1
        headers: list[Header] = [JSON_TYPE]
        self.exchange.respond(200, document(embedded, self._name), headers)


def not_embeddings(model: Model, error: Exception) -> FlambeauError:
    """The answer of a handler that does not know what it was asked."""
    text = (
        f"The handler of {model.name!r} did not answer as one that embeds: it is to return "
        f'{{"embeddings": [...], "num_tokens": ...}} where a request has "usage": true ({error}).'
    )
    return JobFailed(text, status=500)


def document(embedded: Embedded, model: str) -> bytes:
    """The answer, from vectors that are not looked at."""
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(embedded.embeddings)
    ]
    usage = {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})
