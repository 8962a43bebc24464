"""HTTP/1.1 on asyncio: bytes → Exchange, with as little in between as possible.

Parsing is httptools' (llhttp). This module adds what a model server needs and ASGI cannot say: header names
as the client wrote them, reason phrases, large bodies received straight into shared memory, and a client's
departure told to its job at once. See docs/decisions/0001-http.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import httptools

from flambeau.frontend.http.exchange import COMMON, Exchange, Header, is_request_id, new_request_id, target_of
from flambeau.logs.access import AccessLog, remote_of
from flambeau.metrics.traffic import HostTraffic
from flambeau.serving import priorities
from flambeau.serving.job import RequestBody
from flambeau.wire.shared_memory import Segment, SegmentPool

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024  # in a row that are not body: a head, a trailer, the extension of a chunk
MAX_OVERHEAD = 8  # of a chunked body, for each byte of it; chunks of a single byte have five
MAX_PIPELINED = 8
PRIORITY = priorities.HEADER.encode()
PRIORITY_SIZE = len(PRIORITY)
MAX_UPGRADES = 16  # wishes for another protocol that are overheard in one read
SMALL_BODY_BYTES = 64 * 1024  # a body up to this size is received before anybody asks who sends it
LINGER_S = 2.0  # how long an answer to a request that was cut short may take to reach its client
SLOW_CLIENT_BYTES = 64 << 20  # a client that lets this much pile up has stopped reading

# One buffer serves every connection: what is received is consumed before the next read.
_buffer = memoryview(bytearray(RECEIVE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may send and how long it may take."""

    max_body_bytes: int
    share_from_bytes: int
    keep_alive_s: float
    read_timeout_s: float
    max_connections: int = 1 << 30
    max_unfinished_bytes: int = 1 << 60  # of large bodies that are still arriving, all together


class App(Protocol):
    """Answers exchanges."""

    def handle(self, exchange: Exchange) -> None:
        """Answer now, or later from a task of the exchange."""

    def admit(self, exchange: Exchange) -> None:
        """Raise what keeps a request out before its body has arrived: that it may send none, or lacks a key."""

    def refuse(self, exchange: Exchange, error: Exception) -> None:
        """Answer a request that is not admitted."""

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
    common: bytes = COMMON  # header lines of every response
    traffic: HostTraffic = field(default_factory=HostTraffic)
    access_log: AccessLog | None = None
    connections: set[HttpConnection] = field(default_factory=set)
    is_draining: bool = False
    unfinished_bytes: int = 0  # of large bodies: announced, or arrived if their size is not known

    def connect(self) -> HttpConnection:
        """A protocol for a new connection."""
        return HttpConnection(self)

    def make_room(self) -> None:
        """Close a tenth of the connections that wait for nothing, beginning with those that do so longest."""
        waiting = sorted((c for c in self.connections if c.is_waiting), key=lambda connection: connection.since)
        logger.warning("%d connections are too many; those that have idled longest are closed", len(self.connections))
        for connection in waiting[: 1 + len(waiting) // 10]:
            connection.abort()

    def shed(self, newest: HttpConnection) -> None:
        """Too much is arriving at once: close those whose bodies have not grown for longest."""
        logger.warning("large bodies arrive faster than they end; those that dawdle most are closed")
        enough = self.limits.max_unfinished_bytes * 9 // 10
        arriving = (c for c in self.connections if c.unfinished_bytes and c is not newest)
        for connection in sorted(arriving, key=lambda connection: connection.since):
            if self.unfinished_bytes <= enough:
                return
            connection.uncount()
            connection.abort()

    def sweep(self, now: float) -> None:
        """Close connections that have been idle, or in the middle of a request, for too long."""
        for connection in [*self.connections]:
            connection.close_if_stale(now)


class HttpConnection(asyncio.BufferedProtocol):
    """One client connection: requests in order, responses in the same order."""

    __slots__ = (
        "_active",
        "_content",
        "_content_length",
        "_discarding",
        "_fed",
        "_filled",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_keeps_alive",
        "_loop",
        "_method",
        "_parser",
        "_peer",
        "_priority",
        "_reading",
        "_request_id",
        "_seen",
        "_segment",
        "_since",
        "_size",
        "_slow",
        "_target",
        "_transport",
        "_unsent",
        "_upgrades",
        "_version",
        "_waiting",
        "_wants_continue",
        "common",
        "listener",
        "unfinished_bytes",
    )

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.common = listener.common
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._active: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._discarding = False
        self._slow = False
        self._reading = False  # in the middle of a request
        self._in_head = False  # … and not yet at its body
        self._unsent = -1  # bytes a closing connection still had at the last look
        self._since = 0.0  # when the present state, idle or reading, began
        self._segment: Segment | None = None
        self._filled = 0  # bytes of the body that lie in the segment
        self._content: bytes | bytearray = b""  # … or are gathered here
        self._size = 0  # as many of them
        self._fed = -1  # bytes of this message after the read in which it began
        self._seen = 0  # how large it was after the last read
        self._head_bytes = 0  # … and how many bytes have come since without any of it
        self._peer = ""  # who the client is, once the log has asked
        self.unfinished_bytes = 0  # of a large body, as its listener counts them
        self._reset()

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._since = self._loop.time()
        connections = self.listener.connections
        connections.add(self)
        if len(connections) > self.listener.limits.max_connections:
            self.listener.make_room()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._segment is not None:  # the head is behind us: receive into shared memory
            return memoryview(self._segment.memory)[self._filled : self._content_length]
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._discarding:
            return
        if self._reading and not self._in_head:
            self._since = self._loop.time()  # a body may take long, as long as it goes on arriving
        if self._segment is not None:
            self._filled += nbytes
            if self._filled == self._content_length:
                self._parser = httptools.HttpRequestParser(self)  # the old one still waits for this body
                self.on_message_complete()
            return
        self._parse(_buffer[:nbytes])

    def eof_received(self) -> None:
        return None  # close: a client that has stopped sending has gone

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.connections.discard(self)
        self.uncount()
        self._transport = None
        self._parser = None  # it holds our methods: without this the two would wait for the garbage collector
        owed, self._active = [*filter(None, [self._active]), *self._waiting], None
        self._waiting.clear()
        for exchange in owed:
            exchange.drop()
        if self._segment is not None and self.listener.segments is not None:
            self.listener.segments.give_back(self._segment)
            self._segment = None

    def pause_writing(self) -> None:
        self._slow = True

    def resume_writing(self) -> None:
        self._slow = False

    # ---- httptools' side ----

    def on_message_begin(self) -> None:
        self._reading = self._in_head = True
        self._since = self._loop.time()
        self._reset()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # the trailer of a chunked body
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))
        size = len(name)
        if size == 14:
            if name.lower() == b"content-length":
                self._content_length = int(value)
        elif size == 12:
            if name.lower() == b"x-request-id":
                self._request_id = value.decode("latin-1")
        elif size == PRIORITY_SIZE and name.lower() == PRIORITY:
            self._priority: str | None = value.decode("latin-1")
        elif size == 6 and name.lower() == b"expect":
            self._wants_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._discarding:
            return
        parser, limits = self._parser, self.listener.limits
        self._upgrades = parser.should_upgrade()
        self._method = parser.get_method().decode("latin-1")
        self._version = parser.get_http_version()
        self._keeps_alive = parser.should_keep_alive()
        if self._upgrades:
            return
        if self._content_length > limits.max_body_bytes:
            self._refuse(self._too_large, self._new_exchange())
            return
        if self._content_length > SMALL_BODY_BYTES or self._wants_continue:
            if not self._is_admitted():
                return
            self._count(self._content_length)
        if self._wants_continue and self._active is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.listener.segments is not None and self._content_length >= limits.share_from_bytes:
            try:
                self._segment = self.listener.segments.take(self._content_length)
            except OSError as error:  # the body is gathered as a small one is
                logger.warning("no shared memory for a body of %d bytes: %s", self._content_length, error)

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
            self._refuse(self._too_large, self._new_exchange())
            return
        if not self._content:
            self._content = data
        else:
            if type(self._content) is bytes:
                self._content = bytearray(self._content)
            self._content += data

    def on_message_complete(self) -> None:
        if self._discarding or self._upgrades:
            return
        self._reading = False
        if self.unfinished_bytes:
            self.uncount()
        exchange = self._new_exchange()
        segment = self._segment
        if segment is not None:
            assert self.listener.segments is not None
            exchange.body = RequestBody.shared(segment, self._content_length, self.listener.segments.give_back)
            self._segment = None
        elif self._content:
            exchange.body = RequestBody(bytes(self._content))
        if self._active is None and not self._waiting:
            self._active = exchange
            self.listener.app.handle(exchange)
        else:
            self._waiting.append(exchange)
            if len(self._waiting) >= MAX_PIPELINED and self._transport is not None:
                self._transport.pause_reading()

    # ---- our side ----

    def _parse(self, data: memoryview) -> None:
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_without_upgrade(data, upgrade.args[0])
        except httptools.HttpParserCallbackError:
            logger.exception("a request could not be handled; its connection is closed")
            self.abort()
        except httptools.HttpParserError as error:
            if not self._discarding:
                self._refuse(partial(self.listener.app.malformed, reason=str(error)))
        if self._reading and not self._discarding:
            self._limit_overhead(len(data))
            if self._size > SMALL_BODY_BYTES and not self._content_length:  # nobody said how large it would be
                self._take_unannounced(len(data))

    def _parse_without_upgrade(self, data: memoryview, end_of_head: int) -> None:
        for _ in range(MAX_UPGRADES):
            head = self._head_without_upgrade()
            self._parser = httptools.HttpRequestParser(self)
            data = memoryview(head + data[end_of_head:])
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                end_of_head = upgrade.args[0]
        self._refuse(partial(self.listener.app.malformed, reason="too many wishes for another protocol"))

    def _limit_overhead(self, size: int) -> None:
        """Refuse a request that goes on and on without a body: the parser would gather all of it."""
        if self._fed < 0:  # it began within these bytes; how much of them is its own nobody knows
            self._fed, self._seen, self._head_bytes = 0, self._size, 0
            return
        self._fed += size
        self._head_bytes = self._head_bytes + size if self._size == self._seen else 0
        self._seen = self._size
        allowed = MAX_HEAD_BYTES + (1 + MAX_OVERHEAD) * self._size
        if self._segment is None and (self._head_bytes > MAX_HEAD_BYTES or self._fed > allowed):
            where = "head" if self._in_head else "framing"
            self._refuse(partial(self.listener.app.malformed, reason=f"the {where} of the request is too long"))

    def _take_unannounced(self, read_bytes: int) -> None:
        """Go on with a chunked body: if its sender may send one, and after the others had their turn."""
        if self._discarding or (not self.unfinished_bytes and not self._is_admitted()):
            return
        self._count(self._size - self.unfinished_bytes)
        if read_bytes > SMALL_BODY_BYTES and self._transport is not None and not self._waiting:
            self._transport.pause_reading()  # chunks of a byte or two take a while, and libuv reads 32 times in a row
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and len(self._waiting) < MAX_PIPELINED:
            self._transport.resume_reading()

    def _is_admitted(self) -> bool:
        """Whether a body may be sent; if not, the client is told so now."""
        exchange = self._new_exchange()
        try:
            self.listener.app.admit(exchange)
        except Exception as error:
            self._refuse(partial(self.listener.app.refuse, error=error), exchange)
            return False
        return True

    def _count(self, size: int) -> None:
        """Add to the bytes that are arriving."""
        listener = self.listener
        self.unfinished_bytes += size
        listener.unfinished_bytes += size
        if listener.unfinished_bytes > listener.limits.max_unfinished_bytes:
            listener.shed(self)

    def uncount(self) -> None:
        """The body has arrived, or never will."""
        self.listener.unfinished_bytes -= self.unfinished_bytes
        self.unfinished_bytes = 0

    def _head_without_upgrade(self) -> bytes:
        """The request again without its wish for another protocol, which every client can do without."""
        if self._method == "CONNECT":
            self._method = "INVALID"  # a proxy's business, not ours
        lines = [f"{self._method} ".encode() + self._target + b" HTTP/1.1"]
        for name, value in self._headers:
            if name.lower() not in ("upgrade", "connection", "http2-settings"):
                lines.append(f"{name}: {value}".encode("latin-1"))
        return b"\r\n".join([*lines, b"", b""])

    def write(self, data: bytes) -> None:
        """Send bytes to the client; silently nothing when it has gone."""
        transport = self._transport
        if transport is None:
            return
        if self._slow and transport.get_write_buffer_size() > SLOW_CLIENT_BYTES:
            logger.warning("a client stopped reading its response; its connection is closed")
            self.abort()
            return
        transport.write(data)

    def abort(self) -> None:
        """Close without ceremony."""
        if self._transport is not None:
            self._transport.abort()

    def on_answer(self, exchange: Exchange, status: int) -> None:
        """A response begins: count it, and log it where that is wanted."""
        listener = self.listener
        listener.traffic.responded(status)
        if listener.access_log is not None:
            seconds = time.monotonic() - exchange.arrived
            listener.access_log.http(
                self._remote(), exchange.method, exchange.path, exchange.query, exchange.version, status, seconds
            )

    def _remote(self) -> str:
        if not self._peer and self._transport is not None:
            self._peer = remote_of(self._transport.get_extra_info("peername"))
        return self._peer

    def on_finished(self, exchange: Exchange) -> None:
        """A response is complete: turn to the next request, or close."""
        self._active = None
        self._since = self._loop.time()
        transport = self._transport
        if transport is None:
            return
        if not exchange.keeps_alive:
            for unanswered in self._waiting:
                unanswered.drop()
            self._waiting.clear()
            if self._discarding:
                self._linger(transport)
            else:
                transport.close()
        elif self._waiting:
            self._loop.call_soon(self._turn_to_next)  # not here: a chain of quick answers must not pile up calls

    def _turn_to_next(self) -> None:
        if self._transport is None or self._active is not None or not self._waiting:
            return
        self._active = following = self._waiting.popleft()
        if len(self._waiting) == MAX_PIPELINED - 1:
            self._transport.resume_reading()
        self.listener.app.handle(following)

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping."""
        return self.listener.is_draining

    def close_if_idle(self) -> None:
        """Close a connection on which nothing is going on."""
        if self._transport is not None and not (self._active or self._waiting or self._reading):
            self._transport.close()

    @property
    def is_waiting(self) -> bool:
        """Whether no answer is owed: nothing came yet, or not all of a request."""
        return self._active is None and not self._waiting

    @property
    def since(self) -> float:
        """When it last made progress."""
        return self._since

    @property
    def is_busy(self) -> bool:
        """Whether a request is being received or answered, or its answer is still being sent."""
        if self._transport is None:
            return False
        unsent = self._transport.get_write_buffer_size()
        return self._active is not None or bool(self._waiting) or self._reading or unsent > 0

    def close_if_stale(self, now: float) -> None:
        """Close a connection that has idled or dawdled too long, or does not take the end of its answer."""
        if self._transport is None:
            return
        if self._transport.is_closing():
            unsent = self._transport.get_write_buffer_size()
            if unsent == self._unsent:
                self._transport.abort()
            self._unsent = unsent
            return
        if self._active is not None:
            return
        limits = self.listener.limits
        if now - self._since > (limits.read_timeout_s if self._reading else limits.keep_alive_s):
            self._transport.close()

    def _new_exchange(self) -> Exchange:
        target = target_of(self._target)
        exchange = Exchange(self, self._method, target, self._headers, self._version, time.monotonic())
        exchange.keeps_alive = self._keeps_alive
        exchange.priority = self._priority
        given = self._request_id
        exchange.request_id = given if given and is_request_id(given) else new_request_id()
        return exchange

    def _too_large(self, exchange: Exchange) -> None:
        self.listener.app.too_large(exchange, self.listener.limits.max_body_bytes)

    def _refuse(self, answer: Callable[[Exchange], None], exchange: Exchange | None = None) -> None:
        """Stop listening to this client and answer it a last time; answers it is owed come first and end it."""
        self._discarding = True
        self._reading = False
        self.uncount()
        if self._active is not None:
            (self._waiting[-1] if self._waiting else self._active).keeps_alive = False
            return
        if exchange is None:
            exchange = Exchange(self, "", "", [], "1.1", self._since)
            exchange.request_id = new_request_id()
        self._active = exchange
        exchange.keeps_alive = False
        answer(exchange)

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
        self._upgrades = False
        self._headers: list[Header] = []
        self._fed = -1
        self._content_length = 0
        self._request_id = ""
        self._priority = None
        self._wants_continue = False
        self._content = b""
        self._size = 0
        self._filled = 0
