"""ModelSession: each message of a WebSocket is a request to one model, and each part of the reply is a message.

See docs/decisions/0016-websockets.md.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque

from flambeau import websocket_frames as frames
from flambeau.config.server import ErrorStyle
from flambeau.errors import FlambeauError, JobFailed, KeyLimitReached
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.errors import message_of, status_and_type
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.router import UPGRADE, Endpoint, not_found
from flambeau.frontend.http.websocket_connection import ERROR_CODES, WebSocketConnection
from flambeau.frontend.http.websocket_upgrade import UpgradeExchange
from flambeau.serving.job import Job, RequestBody, priority_named, timeout_named
from flambeau.serving.model import Model
from flambeau.serving.scheduling.sessions import value_of
from flambeau.serving.server import Server
from flambeau.serving.traces import RequestTrace, Tracing
from flambeau.wire.messages import Part

logger = logging.getLogger(__name__)

MAX_WAITING = 8  # messages behind the one that is answered; nothing is read meanwhile
FAILED_FROM = 400  # statuses that are errors
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")
_NOT_PASSED_ON = frozenset({"authorization", "connection", "content-length", "content-type", "upgrade"})


class WebSocketApi:
    """GET /predictions/{model}[/{version}[/{more}]] with `Upgrade: websocket`."""

    def __init__(self, server: Server, keys: Keys | None = None) -> None:
        self._server = server
        self._keys = keys

    def routes(self) -> dict[str, Endpoint]:
        return {UPGRADE + "predictions": self.predictions}

    def predictions(self, exchange: Exchange, segments: list[str]) -> None:
        if not isinstance(exchange, UpgradeExchange) or len(segments) < 2:
            not_found(exchange)
            return
        exchange.check_handshake()
        version = segments[2] if len(segments) > 2 else None
        model = self._server.registry.find(segments[1], version)
        if version is None and model.split is not None:  # for the whole connection
            model = model.split.choose(exchange.headers)
            version = exchange.model_version = model.version
        priority = None if exchange.priority is None else priority_named(exchange.priority)
        timeout_s = None if exchange.timeout is None else timeout_named(exchange.timeout)
        url_path = "/".join(segments[3:])
        exchange.accept(ModelSession(self._server, model, version, exchange, url_path, priority, timeout_s, self._keys))


class ModelSession:
    """The messages of one connection as requests to one model, in order.

    One at a time is answered. A model with sequences gets them as one sequence, which ends with the connection; with
    continuous batching as well, a message may join while the one before it is answered.
    """

    def __init__(
        self,
        server: Server,
        model: Model,
        version: str | None,
        exchange: Exchange,
        url_path: str = "",
        priority: int | None = None,
        timeout_s: float | None = None,
        keys: Keys | None = None,
    ) -> None:
        self._keys = keys
        self._authorization = exchange.header("authorization")
        self._tracing = server.tracing
        self._handshake = exchange.headers
        self._model = model
        self._version = version
        self._request_id = exchange.request_id
        self._url_path = url_path
        self._priority = priority
        self._timeout_s = timeout_s
        self._headers: list[Header] = [
            each
            for each in exchange.headers
            if each[0].lower() not in _NOT_PASSED_ON and not each[0].lower().startswith("sec-websocket-")
        ]
        self._content_type = exchange.header("content-type")
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._waiting_bytes = 0
        self._details = server.config.shows_error_details
        self._max_waiting_bytes = server.config.max_request_bytes
        self._running: dict[SocketReply, Job] = {}
        self._num_messages = 0
        config = model.config
        self._max_running = 1
        self._sequence = ""
        if config.sequence_batching:
            names = server.config.sequence_headers
            if not value_of(self._headers, names.id):
                self._sequence = f"ws-{self._request_id}"
                self._start = (names.start, "true")
                self._headers.append((names.id, self._sequence))
            if config.continuous_batching:
                self._max_running = 1 + config.sequence_queue_size
        self._connection: WebSocketConnection | None = None

    def start(self, connection: WebSocketConnection) -> None:
        self._connection = connection

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    def on_message(self, payload: bytes, *, is_text: bool) -> None:
        assert self._connection is not None
        if self._connection.is_draining:
            self._connection.close(frames.GOING_AWAY, "the server stops")
            return
        self._waiting.append((payload, is_text))
        self._waiting_bytes += len(payload)
        self.proceed()
        if self._connection is not None and self._is_full:
            self._connection.pause_reading()

    def proceed(self) -> None:
        """Submit as many of the waiting messages as may run now."""
        connection = self._connection
        while connection is not None and self._waiting and len(self._running) < self._max_running:
            if connection.is_slow:
                return
            payload, is_text = self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            self._submit(payload, is_text=is_text)
        if connection is not None and not self._is_full:
            connection.read_on()

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= MAX_WAITING or self._waiting_bytes > self._max_waiting_bytes

    def _submit(self, payload: bytes, *, is_text: bool) -> None:
        reply = SocketReply(self, self._model, is_text=is_text)
        headers = [*self._headers, ("content-type", self._content_type or type_of(payload, is_text=is_text))]
        if self._sequence and not self._num_messages:
            headers.append(self._start)
        self._num_messages += 1
        job = Job(
            reply,
            request_id=f"{self._request_id}-{self._num_messages}",
            headers=headers,
            body=RequestBody(payload),
            arrived=time.monotonic(),
            url_path=self._url_path,
        )
        if self._priority is not None:
            job.priority = self._priority
        job.timeout_s = self._timeout_s
        if self._tracing is not None:
            reply.trace = self._begin_trace(self._tracing, job)
        self._running[reply] = job
        try:
            if self._keys is not None:  # again: the key may have expired, or was revoked
                job.tenant = self._keys.check("inference", self._authorization)
            self._model.add(job, requested_version=self._version)
        except FlambeauError as error:
            reply.on_error(error)

    def _begin_trace(self, tracing: Tracing, job: Job) -> RequestTrace | None:
        """The trace of a message; the handshake names its parent. None if it is not recorded."""
        trace = tracing.begin(self._handshake, job.arrived)
        if trace is not None:
            attributes = {"http.route": "/predictions/{model_name}", "network.protocol.name": "websocket"}
            trace.describe("WEBSOCKET /predictions/{model_name}", attributes)
            trace.add(job, self._model.name, self._model.version)
        return trace

    def send(self, payload: bytes, *, is_text: bool) -> None:
        if self._connection is not None:
            self._connection.send(payload, is_text=is_text)

    def on_replied(self, reply: SocketReply) -> None:
        """A reply is complete: continue with the next message."""
        self._running.pop(reply, None)
        reply.end_trace()
        connection = self._connection
        if connection is None:
            return
        if connection.is_draining and not self._running and not self._waiting:
            connection.close(frames.GOING_AWAY, "the server stops")
        else:
            self.proceed()
            connection.count()

    def on_failed(self, reply: SocketReply, error: FlambeauError) -> None:
        """Close with the error: what follows may depend on the message that failed."""
        job = self._running.pop(reply, None)
        status = status_and_type(error)[0]
        reply.end_trace(str(status) if status >= 500 else "")
        if isinstance(error, JobFailed) and error.cause and job is not None:
            text, extra = "request %s to %s: %s\n%s", {**job.log_fields, "model": self._model.name}
            logger.warning(text, job.request_id, self._model, error, error.cause.rstrip(), extra=extra)
        if self._connection is not None:
            self._connection.close(ERROR_CODES + status, self._reason(error))

    def _reason(self, error: FlambeauError) -> str:
        """The first sentence of the cause, if the server shows details, or of the text: a close frame holds little."""
        if isinstance(error, KeyLimitReached):
            return str(error)  # its second sentence says when to try again
        text = error.reason if self._details else ""
        text = text or message_of(error, ErrorStyle(is_plain=True, has_details=self._details))
        return _SENTENCE_END.split(text.partition("\n")[0], 1)[0]

    def on_closed(self) -> None:
        self._connection = None
        self._waiting.clear()
        self._waiting_bytes = 0
        running, self._running = self._running, {}
        for reply, job in running.items():
            job.cancel()
            reply.end_trace("client_disconnected")
        if self._sequence:
            self._model.end_sequence(self._sequence)
            self._sequence = ""

    def pause(self, excess_bytes: int) -> None:
        for job in self._running.values():
            job.pause(excess_bytes)

    def resume(self) -> None:
        for job in self._running.values():
            job.resume()


class SocketReply:
    """Sends each part of one job's reply as a message; an empty one ends the reply."""

    __slots__ = ("_is_started", "_is_text", "_model", "_session", "trace")

    def __init__(self, session: ModelSession, model: Model, *, is_text: bool) -> None:
        self._session = session
        self._model = model
        self._is_text = is_text  # of the request; the reply is the same if it can be
        self._is_started = False
        self.trace: RequestTrace | None = None

    def end_trace(self, error: str = "") -> None:
        """The message is answered, or will not be: send its spans, once."""
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.end({}, error)

    def on_parts(self, parts: list[Part]) -> None:
        first = parts[0]
        if not self._is_started:
            self._is_started = True
            self._model.answers[first.status] += 1
            if first.status >= FAILED_FROM:
                text = first.body.decode("utf-8", "replace")
                self._session.on_failed(self, JobFailed(text, status=first.status))
                return
        for part in parts:
            if part.body:
                self._session.send(part.body, is_text=self._is_text and is_utf8(part.body))
        if parts[-1].last:
            self._session.send(b"", is_text=self._is_text)
            self._session.on_replied(self)

    def on_error(self, error: FlambeauError) -> None:
        status = status_and_type(error)[0]
        if self._is_started:
            self._model.count_broken(status)
        else:
            self._model.answers[status] += 1
        self._session.on_failed(self, error)


def type_of(payload: bytes, *, is_text: bool) -> str:
    """The content type of a message, for the handler: a text that looks like an object or a list is JSON."""
    if not is_text:
        return "application/octet-stream"
    return "application/json" if payload.lstrip()[:1] in (b"{", b"[") else "text/plain; charset=utf-8"


def is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
