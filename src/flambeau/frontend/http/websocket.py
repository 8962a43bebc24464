"""WebSocketConnection: a client's connection after its upgrade. ModelSession: its messages are requests to one model.

Each message is a job, and each part of the reply is a message. See docs/decisions/0016-websockets.md.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from flambeau import websocket_frames as frames
from flambeau.config.server import ErrorStyle
from flambeau.errors import BadRequest, FlambeauError, JobFailed, KeyLimitReached
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.errors import message_of, status_and_type
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.listener import Listener
from flambeau.frontend.http.router import UPGRADE, Endpoint, not_found
from flambeau.serving.job import Job, RequestBody, priority_named
from flambeau.serving.model import Model
from flambeau.serving.reply_budget import resume_below_bytes
from flambeau.serving.scheduling.sessions import value_of
from flambeau.serving.server import Server
from flambeau.serving.traces import RequestTrace, Tracing
from flambeau.wire.messages import Part

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 64 * 1024
MAX_WAITING = 8  # messages behind the one that is answered; nothing is read meanwhile
MAX_UNREAD_BYTES = 64 << 20  # of replies that cannot be paused; with more, the connection is closed
PING_S, PONG_S = 20.0, 20.0  # silence before a ping, and before a client that does not answer it is given up
CLOSE_S = 2.0  # for the client to answer a close frame
MAX_DROPPED_BYTES = 64 * 1024  # read after a close frame was sent; the rest stays in the client's socket
TURN_FRAMES = 64  # read in a row, before other connections have their turn
TURN_BYTES = 16 * 1024  # if more has arrived, it waits for a turn
MAX_CONTROL_FRAMES = 1000  # of a client in a second
COUNTED_BYTES = 64 * 1024  # messages that hold less are not counted
PROGRESS_BYTES = 256 * 1024  # of a message that is still arriving, in each `request_read_timeout`
REQUEST_TIMEOUT = 408
FAILED_FROM = 400  # statuses that are errors
ERROR_CODES = 4000  # the close code of an error is this plus its HTTP status
PROTOCOL = "flambeau"
KEY_PROTOCOL = "flambeau.key."  # a page cannot send headers, so it offers its key as a protocol
VERSION = "13"
MAX_CLOSE_BYTES = 6 + frames.MAX_CONTROL_BYTES  # of a masked close frame
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")
_NOT_PASSED_ON = frozenset({"authorization", "connection", "content-length", "content-type", "upgrade"})

# One buffer serves every connection: received bytes are consumed before the next read.
_memory = bytearray(RECEIVE_BYTES)
_buffer = memoryview(_memory)


class SocketSession(Protocol):
    """What the messages of a connection are for."""

    @property
    def is_busy(self) -> bool:
        """Whether a reply is owed."""

    @property
    def waiting_bytes(self) -> int:
        """Of messages that have not been submitted."""

    def start(self, connection: WebSocketConnection) -> None: ...

    def on_message(self, payload: bytes, *, is_text: bool) -> None: ...

    def on_closed(self) -> None:
        """Cancel what runs; the client has gone."""

    def pause(self, excess_bytes: int) -> None:
        """The client does not read."""

    def resume(self) -> None: ...

    def proceed(self) -> None:
        """Answer the next message, which waited for the client to read."""


class UpgradeExchange(Exchange):
    """A request to speak WebSocket. It is answered by `accept`, or like any other request."""

    __slots__ = ("_on_accept",)

    def __init__(
        self,
        exchange: Exchange,
        on_accept: Callable[[UpgradeExchange, SocketSession], None],
    ) -> None:
        super().__init__(
            exchange._connection, exchange.method, exchange.path, exchange.headers, exchange.version, exchange.arrived
        )
        self.query = exchange.query
        self.request_id = exchange.request_id
        self.priority, self.host, self.origin = exchange.priority, exchange.host, exchange.origin
        self.keeps_alive = False
        self._on_accept = on_accept
        offered = [name.strip() for name in (self.header("sec-websocket-protocol") or "").split(",")]
        key = next((name.removeprefix(KEY_PROTOCOL) for name in offered if name.startswith(KEY_PROTOCOL)), "")
        if key and self.header("authorization") is None:
            self.headers = [*self.headers, ("authorization", f"Bearer {key}")]

    def accept(self, session: SocketSession) -> None:
        """Switch protocols; the session gets the messages from now on."""
        self._on_accept(self, session)

    def check_handshake(self) -> None:
        """Raise BadRequest unless this is a handshake of the only version there is."""
        if self.header("sec-websocket-version") != VERSION:
            raise BadRequest(f"The WebSocket version must be {VERSION} (Sec-WebSocket-Version).")
        if self.version == "1.0":
            raise BadRequest("A WebSocket needs HTTP/1.1, and the request is HTTP/1.0.")
        names = [name.lower() for name, _ in self.headers]
        if "transfer-encoding" in names or (self.header("content-length") or "0").strip("0"):
            raise BadRequest("The request for a WebSocket must have no body (Content-Length, Transfer-Encoding).")
        if names.count("sec-websocket-key") > 1:
            raise BadRequest("There are two Sec-WebSocket-Key headers; send one.")
        if not frames.is_key(self.header("sec-websocket-key") or ""):
            raise BadRequest("Sec-WebSocket-Key must be 16 bytes in base64.")

    def head(self) -> bytes:
        """The response that switches protocols."""
        lines = [
            "HTTP/1.1 101 Switching Protocols",
            "upgrade: websocket",
            "connection: Upgrade",
            f"sec-websocket-accept: {frames.accept_key(self.header('sec-websocket-key') or '')}",
            f"x-request-id: {self.request_id}",
        ]
        offered = (self.header("sec-websocket-protocol") or "").split(",")
        if PROTOCOL in map(str.strip, offered):
            lines.append(f"sec-websocket-protocol: {PROTOCOL}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def is_websocket(exchange: Exchange) -> bool:
    """Whether a request to change the protocol means this one."""
    return exchange.method == "GET" and (exchange.header("upgrade") or "").lower() == "websocket"


class WebSocketConnection(asyncio.BufferedProtocol):
    """One client: frames in, frames out, with the limits of its listener."""

    __slots__ = (
        "_address",
        "_checked_at",
        "_checked_bytes",
        "_checked_finished",
        "_controls_since",
        "_dropped_bytes",
        "_has_paused",
        "_is_closing",
        "_is_counted",
        "_is_held",
        "_is_paused",
        "_is_slow",
        "_is_waiting_for_turn",
        "_loop",
        "_num_controls",
        "_pinged_at",
        "_reader",
        "_remote",
        "_session",
        "_since",
        "_transport",
        "_unsent_bytes",
        "listener",
        "unfinished_bytes",
    )

    def __init__(
        self, listener: Listener, transport: asyncio.Transport, address: str, remote: str, session: SocketSession
    ) -> None:
        self.listener = listener
        self._transport = transport
        self._address = address  # under which the connection is counted
        self._remote = remote
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._reader = frames.FrameReader(max_bytes=listener.limits.max_body_bytes, is_masked=True)
        self._since = self._loop.time()
        self._pinged_at: float | None = None
        self._is_closing = False  # a close frame was sent
        self._dropped_bytes = 0  # received after that
        self._is_paused = False  # nothing is read
        self._is_held = False  # the session wants no more messages for now
        self._is_waiting_for_turn = False  # to read frames that have arrived
        self._is_counted = False  # among the messages that the listener holds
        self._num_controls, self._controls_since = 0, self._since  # control frames, lately
        # When a message that is arriving was last seen to grow enough: time, size, and how many were finished then.
        self._checked_at, self._checked_bytes, self._checked_finished = self._since, 0, 0
        self._is_slow = False  # the client reads more slowly than replies come
        self._has_paused = False  # the jobs of the session wait for the client
        self._unsent_bytes = -1  # of a closing connection, at the previous sweep
        self.unfinished_bytes = 0  # large bodies are counted for HTTP only
        listener.connections.add(self)

    # ---- callbacks of asyncio ----

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.receive(bytes(_buffer[:nbytes]))

    def receive(self, data: bytes) -> None:
        if self._is_closing:
            self._drop(data)
            return
        now = self._loop.time()
        self._pinged_at = None
        if not self._reader.is_reading:
            self._checked_at, self._checked_bytes = now, 0
        self._since = now
        self._reader.push(data)
        if len(data) > TURN_BYTES:  # libuv reads 32 times in a row, and unmasking takes a while
            self._wait_for_turn()
            self.count()
        elif not self._is_paused:  # TLS may hand over what it had decrypted before the pause
            self._read_frames()

    def _read_frames(self) -> None:
        """Read some of the frames that have arrived; the others when it is this connection's turn again."""
        reader, ping = self._reader, None
        try:
            for frame in reader.frames(TURN_FRAMES):
                if frame.opcode & 0x08:
                    if frame.opcode == frames.PING:
                        ping = frame
                    self._on_control(frame)
                else:
                    self._session.on_message(frame.payload, is_text=frame.opcode == frames.TEXT)
                if self._is_closing or self._is_held:
                    break
        except frames.FrameError as error:
            self.close(error.code, str(error))
        if self._is_closing:
            return
        if ping is not None and not self._is_slow:  # the last one is enough (RFC 6455, 5.5.3)
            self._write(frames.encode_frame(frames.PONG, ping.payload))
        if reader.num_finished != self._checked_finished:
            self._checked_finished = reader.num_finished
            self._checked_at, self._checked_bytes = self._since, 0
        self._wait_for_turn()
        self.count()

    def _wait_for_turn(self) -> None:
        if self._reader.has_more and not self._is_held and not self._is_waiting_for_turn:
            self._is_waiting_for_turn = True
            self.listener.turns.add(self)
        self._set_reading()

    def answer_next(self) -> None:
        """Read frames that have arrived; it is this connection's turn."""
        self._is_waiting_for_turn = False
        if not self._is_closing and not self._is_held:
            self._read_frames()
        self._set_reading()

    def _drop(self, data: bytes) -> None:
        """Look only for the client's close frame, and not for long: closing at once could lose the server's."""
        self._dropped_bytes += len(data)
        if self._dropped_bytes > MAX_DROPPED_BYTES:
            self._set_reading()
        elif len(data) <= MAX_CLOSE_BYTES and is_close(data):
            self._transport.close()

    def eof_received(self) -> bool:
        return False  # the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        listener = self.listener
        listener.connections.discard(self)
        listener.unread.release(self)
        listener.messages.release(self)
        self._reader.clear()
        if listener.addresses is not None:
            listener.addresses.remove(self._address)
        self._is_closing = True
        self._session.on_closed()

    def pause_writing(self) -> None:
        self._is_slow = True
        self._hold()

    def resume_writing(self) -> None:
        self._is_slow = False
        if self._transport.is_closing():
            return
        if self._has_paused:
            self._has_paused = False
            self._transport.set_write_buffer_limits()  # with much unread, this calls `pause_writing` again
            self._session.resume()
        if not self._is_slow:
            self.listener.unread.release(self)
            self._session.proceed()

    # ---- frames ----

    def _on_control(self, frame: frames.Frame) -> None:
        if frame.opcode == frames.CLOSE:
            code, _ = frames.read_close(frame.payload)
            echoed = b"" if code == frames.NO_STATUS else frames.close_payload(code)
            self._write(frames.encode_frame(frames.CLOSE, echoed))
            self._end()
            self._transport.close()
            return
        self._num_controls += 1
        if self._num_controls > MAX_CONTROL_FRAMES:
            if self._since - self._controls_since < 1.0:
                raise frames.FrameError(
                    frames.POLICY, f"there were more than {MAX_CONTROL_FRAMES} pings and pongs in a second"
                )
            self._num_controls, self._controls_since = 0, self._since

    def send(self, payload: bytes, *, is_text: bool) -> None:
        """Send a message; without effect if the client has gone."""
        if not self._is_closing:
            self._write(frames.encode_frame(frames.TEXT if is_text else frames.BINARY, payload))

    def close(self, code: int, reason: str = "") -> None:
        """Close with a reason; the client has a moment to answer."""
        if self._is_closing:
            return
        self._write(frames.encode_frame(frames.CLOSE, frames.close_payload(code, reason)))
        self._end()
        self._is_held = False
        self._set_reading()
        self._loop.call_later(CLOSE_S, self._transport.close)

    def _end(self) -> None:
        """A close frame was sent: nothing more is sent, and what has arrived is not needed."""
        self._is_closing = True
        self._reader.clear()
        self.listener.messages.release(self)
        self._session.on_closed()

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._is_slow:
            self._hold(len(data))

    def _hold(self, added_bytes: int = 0) -> None:
        """Count what is held for the client, and pause its replies if it is much."""
        transport, unread, now = self._transport, self.listener.unread, self._loop.time()
        held = transport.get_write_buffer_size()
        unread.hold(self, held, now, added_bytes=added_bytes)
        pause_above = unread.pause_above_bytes
        if held > MAX_UNREAD_BYTES:
            self.cut(f"stopped reading; {MAX_UNREAD_BYTES} bytes are held for it")
        elif held > pause_above and not self._has_paused:
            self._has_paused = True
            resume_below = resume_below_bytes(pause_above)
            transport.set_write_buffer_limits(max(pause_above, 1), resume_below)
            self._session.pause(held - resume_below)
        if unread.is_exceeded:
            self.listener.cut_greedy(now)

    # ---- for the session ----

    @property
    def is_slow(self) -> bool:
        return self._is_slow

    @property
    def is_draining(self) -> bool:
        return self.listener.is_draining

    def pause_reading(self) -> None:
        self._is_held = True
        self._set_reading()

    def read_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self._wait_for_turn()

    def _set_reading(self) -> None:
        """Read what the client sends, or leave it in its socket."""
        is_paused = self._is_held or self._is_waiting_for_turn or self._dropped_bytes > MAX_DROPPED_BYTES
        if is_paused is not self._is_paused and not self._transport.is_closing():
            self._is_paused = is_paused
            if is_paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def count(self) -> None:
        """Count what is held of messages that the model has not got; with too much in all, the largest are closed."""
        held = self._reader.held_bytes + self._session.waiting_bytes
        messages = self.listener.messages
        if held > COUNTED_BYTES:
            now = self._loop.time()
            self._is_counted = True
            messages.hold(self, held, now)
            if messages.is_exceeded:
                self.listener.close_largest(now)
        elif self._is_counted:
            self._is_counted = False
            messages.release(self)

    # ---- for the listener ----

    @property
    def is_idle(self) -> bool:
        return not self._session.is_busy

    @property
    def is_busy(self) -> bool:
        return self._session.is_busy or self._transport.get_write_buffer_size() > 0

    @property
    def since(self) -> float:
        return self._since

    def uncount(self) -> None:
        """Nothing is counted as a body."""

    def abort(self) -> None:
        self._transport.abort()

    def cut(self, reason: str) -> None:
        self.listener.unread.release(self)
        if not self._transport.is_closing():
            logger.warning("the client %s %s; its WebSocket is closed", self._remote, reason)
        self._transport.abort()

    def give_up(self, reason: str) -> None:
        self.close(frames.TRY_LATER, reason)

    def close_if_idle(self) -> None:
        """The server stops."""
        if not self._session.is_busy:
            self.close(frames.GOING_AWAY, "the server stops")
            self._transport.close()

    def close_if_stale(self, now: float) -> None:
        """Ping a silent client; give up one that does not answer, or does not read its last bytes."""
        if self._transport.is_closing():
            unsent = self._transport.get_write_buffer_size()
            if unsent == self._unsent_bytes:
                self._transport.abort()
            self._unsent_bytes = unsent
        elif self._is_closing:
            return
        elif self._is_slow:
            self._hold()
        elif self._is_late(now):
            self.close(ERROR_CODES + REQUEST_TIMEOUT, "the rest of the message did not arrive in time")
        elif self._pinged_at is not None:
            if now - self._pinged_at > PONG_S:
                self._transport.abort()
        elif now - self._since > PING_S and not self._is_paused:
            self._pinged_at = now
            self._write(frames.encode_frame(frames.PING, b""))

    def _is_late(self, now: float) -> bool:
        """Whether a message did not grow enough in time. Single bytes, pings and pongs give it no more time."""
        held = self._reader.held_bytes
        if not self._reader.is_reading or self._is_held or held - self._checked_bytes >= PROGRESS_BYTES:
            self._checked_at, self._checked_bytes = now, held
        return now - self._checked_at > self.listener.limits.read_timeout_s


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
        priority = None if exchange.priority is None else priority_named(exchange.priority)
        url_path = "/".join(segments[3:])
        exchange.accept(ModelSession(self._server, model, version, exchange, url_path, priority, self._keys))


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
        if not self._is_started:
            self._model.answers[status_and_type(error)[0]] += 1
        self._session.on_failed(self, error)


def type_of(payload: bytes, *, is_text: bool) -> str:
    """The content type of a message, for the handler: a text that looks like an object or a list is JSON."""
    if not is_text:
        return "application/octet-stream"
    return "application/json" if payload.lstrip()[:1] in (b"{", b"[") else "text/plain; charset=utf-8"


def is_close(data: bytes) -> bool:
    """Whether the bytes are a close frame."""
    return data[:1] == bytes((0x80 | frames.CLOSE,))


def is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
