"""Requests that a handler answers at once with numbers: embeddings, scores and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flambeau.config.server import ErrorStyle
from flambeau.errors import JobFailed
from flambeau.frontend.http.errors import JSON_TYPE
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.openai.models import Ability, check_envelope, choose_model
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Part

# A handler's reply and the client's name of the model → the response, and the number of tokens.
Write = Callable[[bytes, str], tuple[dict[str, Any], int]]


def submit_pooled(
    server: Server,
    exchange: Exchange,
    asked: str | None,
    ability: Ability,
    handler_request: dict[str, Any],
    write: Write,
    *,
    expected: str,
) -> None:
    """Send a request to a handler with the ability; `expected` says what it must return, for an error message."""
    model, version = choose_model(server.registry, asked, ability)
    check_envelope(model)
    if exchange.trace is not None:
        exchange.trace.work |= {
            "gen_ai.operation.name": "embeddings" if ability == "embed" else ability,
            "gen_ai.provider.name": "flambeau",
            "gen_ai.request.model": asked or model.name,
        }
    reply = PoolingReply(exchange, model, server.config.error_style, asked or model.name, write, expected)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=[*(header for header in exchange.headers if header[0].lower() != "content-type"), JSON_TYPE],
        body=RequestBody(msgspec.json.encode(handler_request)),
        arrived=exchange.arrived,
    )
    submit(reply, job, version)


class PoolingReply(Prediction):
    """Collects a handler's reply and writes the response."""

    __slots__ = ("_chunks", "_expected", "_name", "_write")

    def __init__(
        self, exchange: Exchange, model: Model, style: ErrorStyle, name: str, write: Write, expected: str
    ) -> None:
        super().__init__(exchange, model, style)
        self._name, self._write, self._expected = name, write, expected
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
            document, num_tokens = self._write(body, self._name)
        except msgspec.DecodeError as error:
            text = f"The handler of {self.model.name!r} did not answer as one that {self._expected} ({error})."
            self.on_error(JobFailed(text, status=500))
            return
        if self.exchange.trace is not None:
            self.exchange.trace.work["gen_ai.usage.input_tokens"] = num_tokens
        self.model.answers[200] += 1
        headers: list[Header] = [JSON_TYPE]
        self.exchange.respond(200, msgspec.json.encode(document) + b"\n", headers)


def usage_of(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
