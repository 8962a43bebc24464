"""InferenceApi: /predictions and /explanations, and the older paths and SageMaker's, which do the same."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from flambeau.config.server import ErrorStyle
from flambeau.errors import BadRequest, FlambeauError, JobFailed, ReplyNotRead
from flambeau.frontend.http.api_descriptions import model_document
from flambeau.frontend.http.bodies import field_of, is_form
from flambeau.frontend.http.errors import JSON_TYPE, error_event, respond_error, respond_json, status_and_type
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.router import ANYTHING, Endpoint, not_found, query_of
from flambeau.serving.job import Job, priority_named, timeout_named
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Kind, Part, header

MAX_SCALAR = 32  # bytes of a number
SCALAR = re.compile(rb"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
ONLY_JSON_TYPE = (JSON_TYPE,)
# Server-sent events in a streamed reply: none, the handler's own, or one made of each part as the client accepts them.
NO_EVENTS, OWN_EVENTS, MADE_EVENTS = range(3)
JSON_STARTS = frozenset((b"{\n", b"[\n", b"{}", b"[]"))
JSON_FIRST = frozenset(b"%c" % byte for byte in b"{[-0123456789tfn")  # the first byte of a document or a scalar

logger = logging.getLogger(__name__)


class InferenceApi:
    """The paths that run models, except those of KServe and OpenAI."""

    def __init__(self, server: Server) -> None:
        self._registry = server.registry
        self._style = server.config.error_style
        self._reply = TypedPrediction if server.config.names_json else Prediction

    def routes(self) -> dict[str, Endpoint]:
        return {
            "predictions": self.predict,
            "explanations": self.explain,
            "invocations": self.invocations,
            "models": self.invoke,
            ANYTHING: self.legacy_predict,
        }

    def predict(self, exchange: Exchange, segments: list[str], kind: Kind = "predict") -> None:
        """/predictions/{model}[/{version}[/{more}]], with any method; OPTIONS describes the model."""
        if len(segments) < 2:
            not_found(exchange)
            return
        version = segments[2] if len(segments) > 2 else None
        url_path = "/".join(segments[3:]) if len(segments) > 3 else ""
        self.run(exchange, segments[1], version, kind=kind, url_path=url_path)

    def explain(self, exchange: Exchange, segments: list[str]) -> None:
        """/explanations/{model}[/{version}[/{more}]]."""
        self.predict(exchange, segments, "explain")

    def invocations(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        """/invocations of SageMaker: the query or the body names the model, or it is the only one."""
        if len(segments) > 1:
            not_found(exchange)
            return None
        at_start = {model.name for model in self._registry if model.loaded_at_startup}
        name = query_of(exchange).get("model_name") or (at_start.pop() if len(at_start) == 1 else "")
        if not name and is_form(exchange):
            return self._invoke_by_form(exchange)
        if not name:
            raise BadRequest("Parameter model_name is required.")
        self.run(exchange, name, None, query=exchange.query)
        return None

    async def _invoke_by_form(self, exchange: Exchange) -> None:
        name = await field_of(exchange)
        if not name:
            raise BadRequest("Parameter model_name is required.")
        self.run(exchange, name, None, query=exchange.query)

    def invoke(self, exchange: Exchange, segments: list[str]) -> None:
        """/models/{model}/invoke of SageMaker, for servers with several models."""
        if is_invoke(segments):
            self.run(exchange, segments[1], None, query=exchange.query)
        else:
            not_found(exchange)

    def legacy_predict(self, exchange: Exchange, segments: list[str]) -> None:
        """/{model}/predict and /{model}/{version}/predict."""
        if len(segments) in (2, 3) and segments[-1] == "predict":
            version = segments[1] if len(segments) == 3 else None
            self.run(exchange, segments[0], version, query=exchange.query)
        else:
            not_found(exchange)

    def run(
        self,
        exchange: Exchange,
        name: str,
        version: str | None,
        *,
        kind: Kind = "predict",
        url_path: str = "",
        query: str = "",
    ) -> None:
        """Submit the request to a model as a job; `query` holds parameters of the URL that are inputs too."""
        model = self._registry.find(name, version)
        if exchange.method == "OPTIONS":
            respond_json(exchange, 200, model_document(model.name))
            return
        reply = self._reply(exchange, model, self._style)
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


def is_invoke(segments: list[str]) -> bool:
    """Whether a path below /models belongs to the inference API."""
    return len(segments) == 3 and segments[2] == "invoke"


class Prediction:
    """Writes a job's reply to its exchange: whole if it is a single part, else as a stream."""

    __slots__ = ("_events", "exchange", "model", "style")

    def __init__(self, exchange: Exchange, model: Model, style: ErrorStyle) -> None:
        self.exchange = exchange
        self.model = model
        self.style = style
        self._events = NO_EVENTS

    def on_parts(self, parts: list[Part]) -> None:
        exchange, first = self.exchange, parts[0]
        if not exchange.is_started:
            self.model.answers[first.status] += 1
            if first.last:
                self.respond(first)
                return
            headers = first.headers or ()
            if is_event_stream(header(headers, "content-type") or ""):
                self._events = OWN_EVENTS
            elif accepts_events(exchange.header("accept") or ""):
                self._events = MADE_EVENTS
                headers = [*(each for each in headers if each[0].lower() != "content-type"), *EVENT_HEADERS]
            exchange.start(
                first.status, [*headers, ("ts_stream_next", "true")], first.phrase, has_trailer=not self._events
            )
        ends = parts[-1].last
        chunks = [part.body for part in parts]
        if self._events == MADE_EVENTS:
            chunks = [to_event(body) for body in chunks if body]
        if ends and self._events and (explanation := exchange.take_explanation()):
            chunks.append(b"event: explain\ndata: %b\n\n" % explanation)
        if ends and self._events == MADE_EVENTS:
            chunks.append(END_EVENT)
        exchange.send(chunks, ends=ends)

    def respond(self, whole: Part) -> None:
        """Send a reply that is a single part."""
        self.exchange.respond(whole.status, whole.body, whole.headers or (), whole.phrase)

    def on_error(self, error: FlambeauError) -> None:
        """Respond with the error. A stream of events that has started ends with an error event; any other response
        is aborted, so that the client sees that it is incomplete.
        """
        self.log(error)
        exchange = self.exchange
        if exchange.is_started:
            self.model.count_broken(status_and_type(error)[0])
        if exchange.is_started and self._events and not isinstance(error, ReplyNotRead):
            exchange.note_error(error)
            exchange.send([error_event(error, self.style)], ends=True)
        elif exchange.is_started:
            exchange.abort()
        else:
            self.model.answers[respond_error(exchange, error, self.style)] += 1

    def log(self, error: FlambeauError) -> None:
        """Log the cause of a handler's error."""
        if isinstance(error, JobFailed) and error.cause:
            request_id = self.exchange.request_id
            text, extra = "request %s to %s: %s\n%s", self.exchange.log_fields
            logger.warning(text, request_id, self.model, error, error.cause.rstrip(), extra=extra)


class TypedPrediction(Prediction):
    """A prediction that is JSON by its content type, where the handler returns no text or bytes, and sets no type."""

    __slots__ = ()

    def respond(self, whole: Part) -> None:
        body = whole.body
        headers: Sequence[Header] = whole.headers or ()
        if body[:1] in JSON_FIRST and not (headers and header(headers, "content-type") is not None):
            if is_json_document(body):
                body += b"\n"  # so that the next prompt of a terminal begins a line
                headers = [*headers, JSON_TYPE] if headers else ONLY_JSON_TYPE
            elif is_json_scalar(body):
                headers = [*headers, JSON_TYPE] if headers else ONLY_JSON_TYPE
        self.exchange.respond(whole.status, body, headers, whole.phrase)


def is_json_document(body: bytes) -> bool:
    """Whether a body is a dict or a list as workers write them: indented, or empty."""
    return body[:2] in JSON_STARTS and body[-1:] in (b"}", b"]")


def is_json_scalar(body: bytes) -> bool:
    """Whether a body is a number, true, false or null."""
    return len(body) <= MAX_SCALAR and SCALAR.fullmatch(body) is not None


EVENT_STREAM = "text/event-stream"
# Proxies such as nginx would collect the events otherwise.
EVENT_HEADERS = (("content-type", f"{EVENT_STREAM}; charset=utf-8"), ("x-accel-buffering", "no"))
END_EVENT = b"event: end\ndata: {}\n\n"


def accepts_events(accept: str) -> bool:
    """Whether an Accept header names server-sent events; `*/*` does not."""
    for choice in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        if kind == EVENT_STREAM:
            return not any(part.startswith("q=0") and not part.strip("q=0.") for part in parameters)
    return False


def to_event(body: bytes) -> bytes:
    """A part of a reply as a server-sent event. Text that the format cannot carry unchanged is base64."""
    if b"\r" in body or not is_text(body):
        return b"event: base64\ndata: %b\n\n" % base64.b64encode(body)
    return b"data: %b\n\n" % body.replace(b"\n", b"\ndata: ")


def is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_event_stream(content_type: str) -> bool:
    return content_type.lower().startswith(EVENT_STREAM)


def choose_version(exchange: Exchange, model: Model, version: str | None) -> tuple[Model, str | None]:
    """The version that a request names, or the one whose turn it is."""
    if version is not None or model.split is None:
        return model, version
    model = model.split.choose(exchange.headers)
    exchange.model_version = model.version
    return model, model.version


def submit(reply: Prediction, job: Job, version: str | None) -> None:
    """Add a job to its model, or to the version whose turn it is; if that rejects it, respond with the error."""
    exchange, model = reply.exchange, reply.model
    if version is None and model.split is not None:
        model, version = choose_version(exchange, model, version)
        reply.model = model
    exchange.on_gone = job.cancel
    exchange.job = job
    exchange.model_name = model.name
    job.tenant = exchange.tenant
    split = model.split if exchange.model_version else None
    if split is not None:
        split.default.stand_in_for(model, job, partial(on_moved, reply))
    if exchange.trace is not None:
        exchange.trace.add(job, model.name, model.version)
    try:
        if exchange.priority is not None:
            job.priority = priority_named(exchange.priority)
        if exchange.timeout is not None:
            job.timeout_s = timeout_named(exchange.timeout)
        model.add(job, requested_version=version)
    except FlambeauError as error:
        job.body.release()
        reply.on_error(error)
        return
    if split is not None:
        split.copy(job, reply.model)


def on_moved(reply: Prediction, model: Model) -> None:
    """Another version answers."""
    reply.model, reply.exchange.model_version = model, model.version
