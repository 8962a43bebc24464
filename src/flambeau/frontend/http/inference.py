"""The inference API: /predictions, /explanations and the health of the server."""

from __future__ import annotations

import logging
from functools import partial

from flambeau.errors import FlambeauError, JobFailed
from flambeau.frontend.http import describe
from flambeau.frontend.http.app import Endpoint, not_found
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.health import health_routes
from flambeau.frontend.http.problems import respond_json, respond_problem
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Kind, Part

logger = logging.getLogger(__name__)


def inference_routes(server: Server) -> dict[str, Endpoint]:
    """The paths of the inference listener."""
    details = server.config.tells_details
    return {
        "": describe.root(describe.INFERENCE),
        "api-description": describe.always(describe.INFERENCE),
        "predictions": partial(predict, server, "predict", details),
        "explanations": partial(predict, server, "explain", details),
        **health_routes(server),
    }


def predict(server: Server, kind: Kind, details: bool, exchange: Exchange, segments: list[str]) -> None:
    """/predictions/{model}[/{version}[/{more}]]: any method but OPTIONS runs the model."""
    if len(segments) < 2:
        not_found(exchange)
        return
    name = segments[1]
    version = segments[2] if len(segments) > 2 else None
    model = server.registry.find(name, version)
    if exchange.method == "OPTIONS":
        respond_json(exchange, 200, describe.model_document(model.name))
        return
    reply = Prediction(exchange, model, details)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=exchange.headers,
        body=exchange.take_body(),
        arrived=exchange.arrived,
        kind=kind,
        url_path="/".join(segments[3:]) if len(segments) > 3 else "",
    )
    exchange.on_gone = job.cancel
    try:
        model.add(job, requested_version=version)
    except FlambeauError as error:
        job.body.release()
        reply.on_error(error)


class Prediction:
    """Writes a job's reply to its HTTP exchange: whole when one part is all, else chunk by chunk."""

    __slots__ = ("_details", "_exchange", "_model")

    def __init__(self, exchange: Exchange, model: Model, details: bool) -> None:
        self._exchange = exchange
        self._model = model
        self._details = details

    def on_parts(self, parts: list[Part]) -> None:
        """Send parts, now."""
        exchange, first = self._exchange, parts[0]
        if not exchange.is_started:
            self._model.answers[first.status] += 1
            if first.last:
                exchange.respond(first.status, first.body, first.headers or (), first.phrase)
                return
            exchange.start(first.status, [*(first.headers or ()), ("ts_stream_next", "true")], first.phrase)
        exchange.send([part.body for part in parts], ends=parts[-1].last)

    def on_error(self, error: FlambeauError) -> None:
        """Answer with the error; a reply that has begun is broken off, so that nobody takes it for whole."""
        exchange = self._exchange
        if isinstance(error, JobFailed) and error.cause:
            logger.warning("request %s to %s: %s\n%s", exchange.request_id, self._model, error, error.cause.rstrip())
        if exchange.is_started:
            exchange.abort()
        else:
            self._model.answers[respond_problem(exchange, error, details=self._details)] += 1
