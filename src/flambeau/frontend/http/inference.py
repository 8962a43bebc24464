"""The inference API: /predictions and /explanations, and the older and foreign paths that mean the same."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

from flambeau.errors import BadRequest, FlambeauError, JobFailed
from flambeau.frontend.http import catalog, describe
from flambeau.frontend.http.app import ANYTHING, Endpoint, not_found, query_of
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.forms import field_of, is_form
from flambeau.frontend.http.health import health_routes
from flambeau.frontend.http.problems import problem_event, respond_json, respond_problem
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.serving.priorities import priority_named
from flambeau.serving.server import Server
from flambeau.wire.messages import Kind, Part

logger = logging.getLogger(__name__)


def inference_routes(server: Server) -> dict[str, Endpoint]:
    """The paths of the inference listener, but for KServe's."""
    details = server.config.tells_details
    return {
        "": describe.root(catalog.INFERENCE),
        "api-description": describe.always(catalog.INFERENCE),
        "predictions": partial(predict, server, "predict", details),
        "explanations": partial(predict, server, "explain", details),
        "invocations": partial(invocations, server, details),
        "models": partial(invoke, server, details),
        ANYTHING: partial(legacy_predict, server, details),
        **health_routes(server),
    }


def predict(server: Server, kind: Kind, details: bool, exchange: Exchange, segments: list[str]) -> None:
    """/predictions/{model}[/{version}[/{more}]]: any method but OPTIONS runs the model."""
    if len(segments) < 2:
        not_found(exchange)
        return
    version = segments[2] if len(segments) > 2 else None
    url_path = "/".join(segments[3:]) if len(segments) > 3 else ""
    ask(server, details, exchange, segments[1], version, kind=kind, url_path=url_path)


def invocations(
    server: Server, details: bool, exchange: Exchange, segments: list[str]
) -> Coroutine[Any, Any, None] | None:
    """/invocations: SageMaker's path; the model is named by the query or the body, or is the only one."""
    if len(segments) > 1:
        not_found(exchange)
        return None
    at_start = {model.name for model in server.registry if model.loaded_at_startup}
    name = query_of(exchange).get("model_name") or (at_start.pop() if len(at_start) == 1 else "")
    if not name and is_form(exchange):
        return invoke_by_form(server, details, exchange)
    if not name:
        raise BadRequest("Parameter model_name is required.")
    predict_with_query(server, details, exchange, name, None)
    return None


async def invoke_by_form(server: Server, details: bool, exchange: Exchange) -> None:
    """/invocations where a field of the form names the model."""
    name = await field_of(exchange)
    if not name:
        raise BadRequest("Parameter model_name is required.")
    predict_with_query(server, details, exchange, name, None)


def invoke(server: Server, details: bool, exchange: Exchange, segments: list[str]) -> None:
    """/models/{model}/invoke: SageMaker's path where there are several models."""
    if is_invoke(segments):
        predict_with_query(server, details, exchange, segments[1], None)
    else:
        not_found(exchange)


def is_invoke(segments: list[str]) -> bool:
    """Whether a path below /models belongs to the inference API."""
    return len(segments) == 3 and segments[2] == "invoke"


def legacy_predict(server: Server, details: bool, exchange: Exchange, segments: list[str]) -> None:
    """/{model}/predict and /{model}/{version}/predict."""
    if len(segments) in (2, 3) and segments[-1] == "predict":
        version = segments[1] if len(segments) == 3 else None
        predict_with_query(server, details, exchange, segments[0], version)
    else:
        not_found(exchange)


def predict_with_query(server: Server, details: bool, exchange: Exchange, name: str, version: str | None) -> None:
    """Predict where the parameters of the URL are inputs too."""
    ask(server, details, exchange, name, version, query=exchange.query)


def ask(
    server: Server,
    details: bool,
    exchange: Exchange,
    name: str,
    version: str | None,
    *,
    kind: Kind = "predict",
    url_path: str = "",
    query: str = "",
) -> None:
    """Give an exchange to a model as a job; OPTIONS describes the model instead."""
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
        url_path=url_path,
        query=query,
    )
    submit(reply, job, version)


class Prediction:
    """Writes a job's reply to its HTTP exchange: whole when one part is all, else chunk by chunk."""

    __slots__ = ("_details", "_has_events", "exchange", "model")

    def __init__(self, exchange: Exchange, model: Model, details: bool) -> None:
        self.exchange = exchange
        self.model = model
        self._details = details
        self._has_events = False  # the reply is a stream of server-sent events

    def on_parts(self, parts: list[Part]) -> None:
        """Send parts, now."""
        exchange, first = self.exchange, parts[0]
        if not exchange.is_started:
            self.model.answers[first.status] += 1
            if first.last:
                exchange.respond(first.status, first.body, first.headers or (), first.phrase)
                return
            headers = first.headers or ()
            self._has_events = any(key.lower() == "content-type" and is_event_stream(kind) for key, kind in headers)
            exchange.start(first.status, [*headers, ("ts_stream_next", "true")], first.phrase)
        exchange.send([part.body for part in parts], ends=parts[-1].last)

    def on_error(self, error: FlambeauError) -> None:
        """Answer with the error; a reply that has begun ends with an event that says so where it is one of events,
        and any other is broken off, so that nobody takes it for whole.
        """
        self.log(error)
        exchange = self.exchange
        if exchange.is_started and self._has_events:
            exchange.send([problem_event(error, details=self._details)], ends=True)
        elif exchange.is_started:
            exchange.abort()
        else:
            self.model.answers[respond_problem(exchange, error, details=self._details)] += 1

    def log(self, error: FlambeauError) -> None:
        """Tell the operator what lies behind a handler's error."""
        if isinstance(error, JobFailed) and error.cause:
            request_id = self.exchange.request_id
            logger.warning("request %s to %s: %s\n%s", request_id, self.model, error, error.cause.rstrip())


def is_event_stream(content_type: str) -> bool:
    """Whether a reply of this type is made of server-sent events."""
    return content_type.lower().startswith("text/event-stream")


def submit(reply: Prediction, job: Job, version: str | None) -> None:
    """Hand a job to its model; if the model cannot take it, say so at once."""
    reply.exchange.on_gone = job.cancel
    try:
        if reply.exchange.priority is not None:
            job.priority = priority_named(reply.exchange.priority)
        reply.model.add(job, requested_version=version)
    except FlambeauError as error:
        job.body.release()
        reply.on_error(error)
