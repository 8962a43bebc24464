"""HTTP/1.1 on asyncio: bytes → Exchange → bytes, with as little in between as possible.

Parsing is httptools' (llhttp). This module adds what a model server needs and ASGI cannot say: header names
as the client wrote them, reason phrases, large bodies received straight into shared memory, and a client's
departure told to its job at once. See docs/decisions/0001-http.md.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools

from flambeau.serving.job import Body
from flambeau.wire.shared import Segment, SegmentPool

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 8
LINGER_S = 2.0  # how long an answer to a request that was cut short may take to reach its client
SLOW_CLIENT_BYTES = 64 << 20  # a client that lets this much pile up has stopped reading

Header = tuple[str, str]

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_COMMON = (
    b"Pragma: no-cache\r\n"
    b"Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
_KEEP_ALIVE = b"connection: keep-alive\r\n"
_CLOSE = b"connection: close\r\n"
_FRAMING_HEADERS = frozenset({"content-length", "transfer-encoding", "connection"})
_UNSAFE = str.maketrans({"\r": " ", "\n": " ", "\0": " "})

# One buffer serves every connection: what is received is consumed before the next read.
_buffer = memoryview(bytearray(RECEIVE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may send and how long it may take."""

    max_body_bytes: int
    share_from_bytes: int
    keep_alive_s: float
    read_timeout_s: float


class App(Protocol):
    """Answers exchanges."""

    def handle(self, exchange: Exchange) -> None:
        """Answer now, or later from a task of the exchange."""

    def too_large(self, exchange: Exchange, limit: int) -> None:
        """Answer a request whose body is over the limit."""

    def malformed(self, exchange: Exchange, reason: str) -> None:
        """Answer bytes that are not HTTP."""


@dataclass(slots=True, eq=False)
class Listener:
    """What the connections of one port share."""

    app: App
    limits: HttpLimits
    segments: SegmentPool | None
    connections: set[HttpConnection] = field(default_factory=set)
    is_draining: bool = False

    def connect(self) -> HttpConnection:
        """A protocol for a new connection."""
        return HttpConnection(self)

    def sweep(self, now: float) -> None:
        """Close connections that have been idle, or in the middle of a request, for too long."""
        for connection in [*self.connections]:
            connection.close_if_stale(now)


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_connection",
        "_is_chunked",
        "_task",
        "arrived",
        "body",
        "headers",
        "is_finished",
        "is_started",
        "keeps_alive",
        "method",
        "on_gone",
        "path",
        "query",
        "request_id",
        "version",
    )

    def __init__(
        self, connection: HttpConnection, method: str, target: str, headers: list[Header], version: str, arrived: float
    ) -> None:
        self._connection = connection
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.version = version
        self.arrived = arrived
        self.body = Body(b"")
        self.keeps_alive = True
        self.request_id = ""
        self.is_started = False
        self.is_finished = False
        self.on_gone: Callable[[], object] | None = None
        self._is_chunked = False
        self._task: asyncio.Task[None] | None = None

    def header(self, name: str) -> str | None:
        """A request header, whatever its case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Answer from a task; it is cancelled when the client goes away."""
        task = self._task = asyncio.get_running_loop().create_task(work)
        self.on_gone = task.cancel

    # ---- the response ----

    def respond(self, status: int, body: bytes, headers: Iterable[Header] = (), phrase: str = "") -> None:
        """Send a whole response."""
        head = self._head(status, headers, phrase)
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        if self.method == "HEAD":
            body = b""
        write = self._connection.write
        if len(body) < RECEIVE_BYTES:
            head.append(body)
            write(b"".join(head))
        else:
            write(b"".join(head))
            write(body)
        self._finish()

    def start(self, status: int, headers: Iterable[Header] = (), phrase: str = "", chunk: bytes = b"") -> None:
        """Send the head of a streamed response, with its first chunk."""
        self._is_chunked = self.version != "1.0"
        if not self._is_chunked:
            self.keeps_alive = False  # the end of the connection ends the body
        head = self._head(status, headers, phrase)
        head.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")
        if chunk:
            head.append(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._is_chunked else chunk)
        self._connection.write(b"".join(head))

    def send_chunk(self, chunk: bytes) -> None:
        """Send the next piece of a streamed response, now."""
        if chunk:  # an empty chunk would end the body
            self._connection.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._is_chunked else chunk)

    def end(self, chunk: bytes = b"") -> None:
        """Send the last piece and end the response."""
        if self._is_chunked:
            self._connection.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk) if chunk else b"0\r\n\r\n")
        elif chunk:
            self._connection.write(chunk)
        self._finish()

    def abort(self) -> None:
        """Break off a streamed response, so that the client sees that it is not complete."""
        self._connection.abort()

    def _head(self, status: int, headers: Iterable[Header], phrase: str) -> list[bytes]:
        self.is_started = True
        if self._connection.listener.is_draining:
            self.keeps_alive = False
        line = _STATUS_LINES.get(status)
        if phrase or line is None:
            line = f"HTTP/1.1 {status} {phrase.translate(_UNSAFE)}\r\n".encode("latin-1", "replace")
        head = [line, b"x-request-id: %b\r\n" % self.request_id.encode("latin-1", "replace"), _COMMON]
        for name, value in headers:
            if name.lower() not in _FRAMING_HEADERS:
                text = f"{name.translate(_UNSAFE)}: {value.translate(_UNSAFE)}\r\n"
                head.append(text.encode("latin-1", "replace"))
        head.append(_KEEP_ALIVE if self.keeps_alive else _CLOSE)
        return head

    def _finish(self) -> None:
        self.is_finished = True
        self.on_gone = None
        self._connection.on_finished(self)


class HttpConnection(asyncio.BufferedProtocol):
    """One client connection: requests in order, responses in the same order."""

    __slots__ = (
        "_active",
        "_content_length",
        "_discarding",
        "_filled",
        "_head_bytes",
        "_headers",
        "_keeps_alive",
        "_loop",
        "_method",
        "_parser",
        "_parts",
        "_reading",
        "_request_id",
        "_segment",
        "_since",
        "_size",
        "_slow",
        "_target",
        "_transport",
        "_version",
        "_waiting",
        "_wants_continue",
        "listener",
    )

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._active: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._discarding = False
        self._slow = False
        self._reading = False  # in the middle of a request
        self._since = 0.0  # when the present state, idle or reading, began
        self._segment: Segment | None = None
        self._filled = 0  # bytes of the body that lie in the segment
        self._reset()

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._since = self._loop.time()
        self.listener.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        segment = self._segment
        if segment is not None and self._filled:  # the head is behind us: receive into shared memory
            return memoryview(segment.memory)[self._filled : self._content_length]
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._discarding:
            return
        if self._segment is not None and self._filled:
            self._filled += nbytes
            if self._filled == self._content_length:
                self._parser = httptools.HttpRequestParser(self)  # the old one still waits for this body
                self.on_message_complete()
            return
        try:
            self._parser.feed_data(_buffer[:nbytes])
        except httptools.HttpParserUpgrade:
            self._refuse("upgrading the connection is not supported")
        except httptools.HttpParserError as error:
            if not self._discarding:
                self._refuse(str(error))

    def eof_received(self) -> None:
        return None  # close: a client that has stopped sending has gone

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.connections.discard(self)
        self._transport = None
        self._parser = None  # it holds our methods: without this the two would wait for the garbage collector
        for exchange in (self._active, *self._waiting):
            if exchange is not None and exchange.on_gone is not None:
                exchange.on_gone()
                exchange.on_gone = None
        self._waiting.clear()
        if self._segment is not None and self.listener.segments is not None:
            self.listener.segments.give_back(self._segment)
            self._segment = None

    def pause_writing(self) -> None:
        self._slow = True

    def resume_writing(self) -> None:
        self._slow = False

    # ---- httptools' side ----

    def on_message_begin(self) -> None:
        self._reading = True
        self._since = self._loop.time()
        self._reset()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise httptools.HttpParserError("the head of the request is too long")
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))
        size = len(name)
        if size == 14:
            if name.lower() == b"content-length":
                self._content_length = int(value)
        elif size == 12:
            if name.lower() == b"x-request-id":
                self._request_id = value.decode("latin-1")
        elif size == 6 and name.lower() == b"expect":
            self._wants_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        parser, limits = self._parser, self.listener.limits
        self._method = parser.get_method().decode("latin-1")
        self._version = parser.get_http_version()
        self._keeps_alive = parser.should_keep_alive()
        if self._content_length > limits.max_body_bytes:
            self._refuse_body()
            return
        if self._wants_continue and self._active is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.listener.segments is not None and self._content_length >= limits.share_from_bytes:
            self._segment = self.listener.segments.take(self._content_length)

    def on_body(self, data: bytes) -> None:
        if self._discarding:
            return
        if self._segment is not None:
            end = self._filled + len(data)
            self._segment.memory[self._filled : end] = data
            self._filled = end
            return
        self._size += len(data)
        if self._size > self.listener.limits.max_body_bytes:
            self._refuse_body()
            return
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._discarding:
            return
        self._reading = False
        exchange = self._new_exchange()
        segment = self._segment
        if segment is not None:
            assert self.listener.segments is not None
            exchange.body = Body.shared(segment, self._content_length, self.listener.segments.give_back)
            self._segment = None
        elif self._parts:
            parts = self._parts
            exchange.body = Body(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._active is None:
            self._active = exchange
            self.listener.app.handle(exchange)
        else:
            self._waiting.append(exchange)
            if len(self._waiting) >= MAX_PIPELINED and self._transport is not None:
                self._transport.pause_reading()

    # ---- our side ----

    def write(self, data: bytes) -> None:
        """Send bytes to the client; silently nothing when it has gone."""
        transport = self._transport
        if transport is None:
            return
        transport.write(data)
        if self._slow and transport.get_write_buffer_size() > SLOW_CLIENT_BYTES:
            logger.warning("a client stopped reading its response; its connection is closed")
            self.abort()

    def abort(self) -> None:
        """Close without ceremony."""
        if self._transport is not None:
            self._transport.abort()

    def on_finished(self, exchange: Exchange) -> None:
        """A response is complete: turn to the next request, or close."""
        self._active = None
        self._since = self._loop.time()
        transport = self._transport
        if transport is None:
            return
        if not exchange.keeps_alive:
            self._waiting.clear()
            if self._discarding:
                self._linger(transport)
            else:
                transport.close()
        elif self._waiting:
            self._active = following = self._waiting.popleft()
            if len(self._waiting) == MAX_PIPELINED - 1:
                transport.resume_reading()
            self.listener.app.handle(following)

    def close_if_idle(self) -> None:
        """Close a connection on which nothing is going on."""
        if self._transport is not None and self._active is None and not self._reading:
            self._transport.close()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being received or answered."""
        return self._active is not None or self._reading

    def close_if_stale(self, now: float) -> None:
        """Close a connection that has idled or dawdled too long."""
        if self._active is not None or self._transport is None:
            return
        limits = self.listener.limits
        if now - self._since > (limits.read_timeout_s if self._reading else limits.keep_alive_s):
            self._transport.close()

    def _new_exchange(self) -> Exchange:
        target = target_of(self._target)
        exchange = Exchange(self, self._method, target, self._headers, self._version, self._since)
        exchange.keeps_alive = self._keeps_alive
        given = self._request_id
        exchange.request_id = given if given and is_request_id(given) else new_request_id()
        return exchange

    def _refuse_body(self) -> None:
        limit = self.listener.limits.max_body_bytes
        exchange = self._give_up()
        self.listener.app.too_large(exchange, limit)

    def _refuse(self, reason: str) -> None:
        exchange = self._give_up()
        self.listener.app.malformed(exchange, reason)

    def _give_up(self) -> Exchange:
        """Stop listening to this client, and answer it a last time."""
        self._discarding = True
        self._reading = False
        exchange = Exchange(self, "", "", [], "1.1", self._since)
        exchange.request_id = new_request_id()
        exchange.keeps_alive = False
        self._active = exchange
        return exchange

    def _linger(self, transport: asyncio.Transport) -> None:
        """Let the answer arrive: closing at once, with unread data, would reset the connection."""
        if transport.can_write_eof():
            transport.write_eof()
        self._loop.call_later(LINGER_S, transport.abort)

    def _reset(self) -> None:
        self._target = b""
        self._method = ""
        self._version = "1.1"
        self._keeps_alive = True
        self._headers: list[Header] = []
        self._head_bytes = 0
        self._content_length = 0
        self._request_id = ""
        self._wants_continue = False
        self._parts: list[bytes] = []
        self._size = 0
        self._filled = 0


def target_of(raw: bytes) -> str:
    """The path and query of a request line; an absolute URL loses its scheme and host."""
    target = raw.decode("latin-1")
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target


def is_request_id(text: str) -> bool:
    """Whether a client's own request id is fit to be repeated in headers and logs."""
    return len(text) <= 128 and text.isascii() and text.isprintable()


def new_request_id() -> str:
    """A random UUID (version 4); ids need to be distinct, not secret."""
    digits = f"{random.getrandbits(128):032x}"
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
