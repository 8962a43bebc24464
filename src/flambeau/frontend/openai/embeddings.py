"""POST /v1/embeddings: texts → vectors, by a handler that embeds."""

from __future__ import annotations

from typing import Any

import msgspec

from flambeau.config.server import ErrorStyle
from flambeau.errors import FlambeauError, InvalidField, JobFailed
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.errors import JSON_TYPE
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.openai.models import check_envelope, choose_model
from flambeau.frontend.openai.requests import EmbeddingRequest, read_request
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Part


class Embedded(msgspec.Struct):
    """A handler's reply to a request with `"usage": true`; the vectors stay encoded."""

    embeddings: list[msgspec.Raw]
    num_tokens: int


_decode = msgspec.json.Decoder(Embedded).decode


def create_embeddings(server: Server, exchange: Exchange) -> None:
    request = read_request(take_bytes(exchange), EmbeddingRequest)
    handler_request = to_handler_request(request)
    model, version = choose_model(server.registry, request.model, "embed")
    check_envelope(model)
    if exchange.trace is not None:
        exchange.trace.work |= {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.provider.name": "flambeau",
            "gen_ai.request.model": request.model or model.name,
        }
    reply = EmbeddingReply(exchange, model, server.config.error_style, request.model or model.name)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=[*(header for header in exchange.headers if header[0].lower() != "content-type"), JSON_TYPE],
        body=RequestBody(msgspec.json.encode(handler_request)),
        arrived=exchange.arrived,
    )
    submit(reply, job, version)


def to_handler_request(request: EmbeddingRequest) -> dict[str, Any]:
    texts = [request.input] if isinstance(request.input, str) else request.input
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidField("input", f"input[{i}] must be text; token ids are not supported, send the text itself")
    if not texts:
        raise InvalidField("input", "input must not be empty; send a text or a list of texts")
    document: dict[str, Any] = {"input": texts, "usage": True, "encoding_format": request.encoding_format or "float"}
    return document if request.dimensions is None else {**document, "dimensions": request.dimensions}


class EmbeddingReply(Prediction):
    """Writes vectors to their exchange in OpenAI's format."""

    __slots__ = ("_chunks", "_name")

    def __init__(self, exchange: Exchange, model: Model, style: ErrorStyle, name: str) -> None:
        super().__init__(exchange, model, style)
        self._name = name
        self._chunks: list[bytes] = []

    def on_parts(self, parts: list[Part]) -> None:
        """Collect parts, and respond with the last."""
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
        if self.exchange.trace is not None:
            self.exchange.trace.work["gen_ai.usage.input_tokens"] = embedded.num_tokens
        self.model.answers[200] += 1
        headers: list[Header] = [JSON_TYPE]
        self.exchange.respond(200, document(embedded, self._name), headers)


def not_embeddings(model: Model, error: Exception) -> FlambeauError:
    text = (
        f"The handler of {model.name!r} did not answer as one that embeds: it must return "
        f'{{"embeddings": [...], "num_tokens": ...}} for a request with "usage": true ({error}).'
    )
    return JobFailed(text, status=500)


def document(embedded: Embedded, model: str) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(embedded.embeddings)
    ]
    usage = {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage}) + b"\n"
