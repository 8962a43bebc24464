"""HttpConnection: one client connection on asyncio: keep-alive, pipelining, back-pressure, time limits, shared memory.

It adds to HTTP/1.1 what a model server needs and ASGI cannot express: header names as the client wrote them, reason
phrases, large bodies received straight into shared memory, and jobs that are cancelled as soon as their client
disconnects. See docs/decisions/0001-http.md.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import httptools

from flambeau.errors import BadRequest, InvalidKey, Unavailable
from flambeau.frontend.http.exchange import Exchange, is_request_id, new_request_id, target_of
from flambeau.frontend.http.idempotency import IdempotentExchange
from flambeau.frontend.http.listener import Listener, address_of
from flambeau.frontend.http.parser import MalformedRequest, RequestParser
from flambeau.frontend.http.websocket_connection import SocketSession, WebSocketConnection
from flambeau.frontend.http.websocket_upgrade import UpgradeExchange, is_websocket
from flambeau.logs.access_log import remote_of
from flambeau.serving.job import RequestBody
from flambeau.serving.reply_budget import resume_below_bytes
from flambeau.wire.shared_memory import Segment

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024
MAX_PIPELINED = 8
# A read longer than WHOLE_BYTES is parsed in slices, since it may hold thousands of small requests.
WHOLE_BYTES, SLICE_BYTES, CHUNKED_SLICE_BYTES = 2048, 1024, 16 * 1024
MAX_PIPELINED_BYTES = 64 * 1024  # of bodies that wait for the response before them
SMALL_BODY_BYTES = 64 * 1024  # up to this size a body is received before its sender's key is checked
LINGER_S = 2.0  # how long the response to a rejected request may take to reach its client
MAX_REFUSED = 64  # connections of a port that are told at a time that there is no room; others are only closed
RETRY_AFTER_S = 5
SWITCHING = 101
MAX_UNREAD_BYTES = 64 << 20  # of a response that cannot be paused; with more, its connection is closed

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the kernel drops what it holds, and resets the connection

# One buffer serves every connection: received bytes are consumed before the next read.
_memory = bytearray(RECEIVE_BYTES)
_buffer = memoryview(_memory)


class FinishedHandshake(Protocol):
    """The TLS handshake that a connection began with."""

    def finish(self) -> str:
        """Count the client as a connection from now on; returns the address it is counted under."""


class HttpConnection(asyncio.BufferedProtocol):
    """One client connection: requests in order, responses in the same order."""

    __slots__ = (
        "_active",
        "_address",
        "_handshake",
        "_has_ended",
        "_has_paused",
        "_is_paused",
        "_is_slow",
        "_is_waiting_for_turn",
        "_loop",
        "_may_answer",
        "_parser",
        "_peer",
        "_rejection",
        "_segment",
        "_since",
        "_transport",
        "_unparsed",
        "_unsent_bytes",
        "_waiting",
        "_waiting_bytes",
        "common",
        "counts_bytes",
        "listener",
        "unfinished_bytes",
    )

    def __init__(self, listener: Listener, handshake: FinishedHandshake | None = None) -> None:
        limits = listener.limits
        self.listener = listener
        self.common = listener.common
        self.counts_bytes = listener.access_log is not None and listener.access_log.is_full
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(
            self,
            max_body_bytes=limits.max_body_bytes,
            on_head_from_bytes=min(SMALL_BODY_BYTES, limits.max_body_bytes, limits.share_from_bytes - 1) + 1,
        )
        self._transport: asyncio.Transport | None = None
        self._active: Exchange | None = None  # the one that is being answered
        self._waiting: deque[Exchange] = deque()  # pipelined behind it
        self._is_waiting_for_turn = False
        self._may_answer = True  # the first request of a read is answered at once, the others in turn
        # What was received, and from where on it is parsed once earlier requests are answered.
        self._unparsed: tuple[bytes, int] | None = None
        self._is_paused = False  # nothing is read meanwhile
        self._rejection: Callable[[Exchange], None] | None = None  # the response to the last one that waits
        self._has_ended = False  # the client sends no more
        self._handshake = handshake  # of a TLS client, which was counted when it was accepted
        self._address = ""  # under which the connection is counted; empty if it is not
        self._segment: Segment | None = None  # shared memory of the body that is being received
        self._waiting_bytes = 0  # of their bodies
        self._is_slow = False  # responses are buffered: the client reads more slowly than they come
        self._has_paused = False  # the job of `_active` waits for the client
        self._since = 0.0  # when the connection last made progress, by the loop's clock
        self._unsent_bytes = -1  # of a closing connection, at the previous sweep
        self._peer = ""  # the client's address, once the access log needs it
        self.unfinished_bytes = 0  # of a large body, as its listener counts them

    # ---- callbacks of asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        self._since = self._loop.time()
        listener = self.listener
        listener.connections.add(self)
        if self._handshake is not None:
            self._address = self._handshake.finish()
            self._handshake = None
            return
        if listener.addresses is not None:
            self._address = address_of(transport.get_extra_info("peername"))
            if refusal := listener.addresses.add(self._address):
                self._refuse(refusal)
        if listener.room.is_full_for(listener) and not listener.room.make_room(listener, self):
            self._refuse(listener.room.refusal)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._segment is not None:
            parser = self._parser
            return memoryview(self._segment.memory)[parser.filled_bytes : parser.content_length]
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        parser = self._parser
        if parser.is_discarding:
            return
        if parser.is_reading and not parser.in_head:
            self._since = self._loop.time()  # a body may take long as long as it keeps arriving
        self._may_answer = True
        if self._segment is not None:
            parser.advance(nbytes)
        elif nbytes <= WHOLE_BYTES:
            if not self._repeat(nbytes):
                self._feed(_buffer[:nbytes])
        else:
            self._feed_slices(_memory, 0, nbytes)
        if self._waiting and not self._may_read:
            self._pause()
        if parser.is_reading and parser.size_bytes > SMALL_BODY_BYTES and not parser.content_length:
            self._continue_unannounced(nbytes)

    def _repeat(self, nbytes: int) -> bool:
        """Take a request whose head is that of the one before it."""
        try:
            return self._parser.repeat(_memory, nbytes)
        except Exception:
            self._abort_unexpectedly()
            return True

    def _abort_unexpectedly(self) -> None:
        logger.exception("a request failed unexpectedly; its connection is closed")
        self.abort()

    def _feed(self, data: memoryview) -> None:
        parser = self._parser
        try:
            parser.feed(data)
        except httptools.HttpParserCallbackError:
            self._abort_unexpectedly()
        except MalformedRequest as error:
            if not parser.is_discarding:
                self._reject(partial(self.listener.app.malformed, reason=str(error)))
        if parser.is_reading and not parser.fed_bytes:  # it started in these bytes; a slow head gets no more time
            self._since = self._loop.time()

    def _feed_slices(self, data: bytes | bytearray, start: int, end: int) -> None:
        """Parse head by head and body by body, until enough requests wait; the rest is kept for later."""
        parser = self._parser
        view = memoryview(data)
        while start < end:
            if not parser.is_reading or parser.in_head:
                found = data.find(b"\r\n\r\n", start, min(end, start + SLICE_BYTES))
                size = found + 4 - start if found >= 0 else SLICE_BYTES
            else:
                size = parser.missing_bytes if parser.content_length else CHUNKED_SLICE_BYTES
            stop = min(end, start + size)
            self._feed(view[start:stop])
            start = stop
            if parser.is_discarding or self._transport is None:
                return
            if start < end and not self._may_read:
                kept = data if isinstance(data, bytes) else bytes(view[start:end])
                self._unparsed = (kept, len(kept) - (end - start))
                self._pause()
                return

    def eof_received(self) -> bool:
        """Close, since a client that stops sending has disconnected; but answer what needs only its turn."""
        transport = self._transport
        self._has_ended = self._active is None and bool(self._waiting)
        return self._has_ended and transport is not None and transport.can_write_eof()  # TLS always closes

    def connection_lost(self, exc: Exception | None) -> None:
        listener = self.listener
        listener.connections.discard(self)
        listener.unread.release(self)
        if listener.addresses is not None:
            listener.addresses.remove(self._address)
        self.uncount()
        if self.counts_bytes:
            self._remote()  # while the transport knows it
        self._transport = self._unparsed = None
        self._parser.close()
        owed, self._active = [*filter(None, [self._active]), *self._waiting], None
        self._waiting.clear()
        for exchange in owed:
            if exchange.is_started and self.counts_bytes:
                self._log_end(exchange, " aborted")
            exchange.drop()
        if self._segment is not None and self.listener.segments is not None:
            self.listener.segments.give_back(self._segment)
            self._segment = None

    def pause_writing(self) -> None:
        """The client falls behind: read no more requests of it, and count what is held for it."""
        self._is_slow = True
        self._pause()

    def resume_writing(self) -> None:
        self._is_slow = False
        if self._transport is None or self._transport.is_closing():
            return
        if self._has_paused:
            self._resume_job(self._transport)
        if not self._is_slow:  # or it was set again: only a part of what was held is read
            self.listener.unread.release(self)
            self._continue()
            if self._waiting:
                self._wait_for_turn()

    # ---- callbacks of the parser ----

    def on_head(self) -> None:
        """Check a large body before it arrives, and prepare memory for it."""
        parser, limits, segments = self._parser, self.listener.limits, self.listener.segments
        length = parser.content_length
        if length > limits.max_body_bytes:
            self.on_too_large()
            return
        if length > SMALL_BODY_BYTES or parser.wants_continue:
            if not self._is_admitted():
                return
            self._count(length)
        if parser.wants_continue and self._active is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if segments is not None and length >= limits.share_from_bytes:
            try:
                self._segment = segments.take(length)
                parser.memory = self._segment.memory
            except OSError as error:  # the body is received like a small one
                logger.warning("no shared memory for a body of %d bytes: %s", length, error)

    def on_too_large(self) -> None:
        self._reject(partial(self.listener.app.too_large, limit=self.listener.limits.max_body_bytes), self._exchange())

    def on_request(self) -> None:
        if self.unfinished_bytes:
            self.uncount()
        parser = self._parser
        exchange = self._exchange()
        if self._segment is not None:
            assert self.listener.segments is not None
            exchange.body = RequestBody.shared(self._segment, parser.content_length, self.listener.segments.give_back)
            self._segment = parser.memory = None
        elif parser.content:
            exchange.body = RequestBody(bytes(parser.content))
        if self.counts_bytes and exchange.body is not None:
            exchange.received_bytes = exchange.body.size_bytes
        if self._may_answer and self._active is None and not self._waiting and not self._is_slow:
            self._may_answer = False
            self._active = exchange
            self.listener.app.handle(exchange)
        else:
            self._waiting.append(exchange)
            if exchange.body is not None:
                self._waiting_bytes += exchange.body.size_bytes
            self._wait_for_turn()

    def on_upgrade(self, rest: bytes) -> bool:
        """Let the application answer a request for a WebSocket, if no other request waits."""
        if self._parser.is_discarding:
            return True
        if self._active is not None or self._waiting or self._is_slow:
            return False
        exchange = self._exchange()
        if not is_websocket(exchange):
            return False
        upgrade = UpgradeExchange(exchange, partial(self._switch, rest))
        self._active = upgrade
        if not self.listener.app.upgrade(upgrade):
            self._active = None
            return False
        self._parser.discard()
        return True

    def _switch(self, rest: bytes, exchange: UpgradeExchange, session: SocketSession) -> None:
        """Hand the client over to a WebSocketConnection."""
        transport, listener = self._transport, self.listener
        if transport is None:
            return
        if listener.access_log is not None:
            seconds = time.monotonic() - exchange.arrived
            listener.access_log.http(
                self._remote(), exchange.method, exchange.path, exchange.query, exchange.version, SWITCHING, seconds
            )
        transport.write(exchange.head())
        listener.connections.discard(self)
        opened = WebSocketConnection(listener, transport, self._address, self._remote(), session)
        session.start(opened)
        self._active = self._transport = None
        self._loop.call_soon(self._parser.close)  # not yet: it is parsing
        transport.set_protocol(opened)
        if rest:
            opened.receive(rest)

    def _exchange(self) -> Exchange:
        """The current request as an exchange, without its body."""
        parser = self._parser
        target = target_of(parser.target)
        if parser.idempotency_key is None:
            exchange = Exchange(self, parser.method, target, parser.headers, parser.version, time.monotonic())
        else:
            exchange = IdempotentExchange(
                self,
                parser.method,
                target,
                parser.headers,
                parser.version,
                time.monotonic(),
                parser.idempotency_key,
            )
        exchange.keeps_alive = parser.keeps_alive
        exchange.priority = parser.priority
        exchange.timeout = parser.timeout
        exchange.explains = parser.explains
        exchange.host = parser.host
        exchange.origin = parser.origin
        exchange.is_cross_site = parser.is_cross_site
        exchange.content_encoding = parser.content_encoding
        given = parser.request_id
        exchange.request_id = given if given and is_request_id(given) else new_request_id()
        return exchange

    # ---- large bodies ----

    def _continue_unannounced(self, read_bytes: int) -> None:
        """Continue a chunked body: check its sender once, and give other connections a turn."""
        if not self.unfinished_bytes and not self._is_admitted():
            return
        self._count(self._parser.size_bytes - self.unfinished_bytes)
        if read_bytes > SMALL_BODY_BYTES and not self._is_paused:
            self._pause()  # tiny chunks take a while to parse, and libuv reads 32 times in a row
            self._loop.call_soon(self._continue)

    def _pause(self) -> None:
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _continue(self) -> None:
        """Parse and read on, if this connection may."""
        if self._unparsed is not None and self._may_read:
            (data, start), self._unparsed = self._unparsed, None
            self._feed_slices(data, start, len(data))
        if self._is_paused and self._unparsed is None and self._may_read:
            transport = self._transport
            if transport is not None and not transport.is_closing():
                self._is_paused = False
                transport.resume_reading()

    @property
    def _may_read(self) -> bool:
        """Whether to read further: not while the client must read first, or while enough waits to be answered."""
        if self._is_slow or len(self._waiting) >= MAX_PIPELINED or self._waiting_bytes > MAX_PIPELINED_BYTES:
            return False
        return not self.unfinished_bytes or self.is_idle  # a large body waits for its turn

    def _is_admitted(self) -> bool:
        """Whether the body may be sent; if not, the client gets the error now."""
        exchange = self._exchange()
        try:
            self.listener.app.admit(exchange)
        except Exception as error:
            self._reject(partial(self.listener.app.reject, error=error), exchange)
            return False
        return True

    def _count(self, size: int) -> None:
        listener = self.listener
        self.unfinished_bytes += size
        listener.unfinished_bytes += size
        if not self.is_idle:
            self._pause()
        if listener.unfinished_bytes > listener.limits.max_unfinished_bytes:
            listener.shed_load(self)

    def uncount(self) -> None:
        """Stop counting a body that is complete or was given up."""
        self.listener.unfinished_bytes -= self.unfinished_bytes
        self.unfinished_bytes = 0

    # ---- responses ----

    def write(self, data: bytes) -> None:
        """Send bytes to the client; without effect if it has disconnected."""
        transport = self._transport
        if transport is None:
            return
        if self._is_slow and transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.cut(f"stopped reading its response; {MAX_UNREAD_BYTES} bytes are held for it")
            return
        transport.write(data)
        if self._is_slow:
            self._hold(transport, len(data))

    def _hold(self, transport: asyncio.Transport, added_bytes: int = 0) -> None:
        """Count what is held for the client, and pause the response if it is much."""
        if transport.is_closing():
            return
        unread, held, now = self.listener.unread, transport.get_write_buffer_size(), self._loop.time()
        unread.hold(self, held, now, added_bytes=added_bytes)
        pause_above = unread.pause_above_bytes
        if held > pause_above and not self._has_paused and self._active is not None and self._active.job is not None:
            self._has_paused = True
            resume_below = resume_below_bytes(pause_above)
            transport.set_write_buffer_limits(max(pause_above, 1), resume_below)
            self._active.job.pause(held - resume_below)
        if unread.is_exceeded:
            self.listener.cut_greedy(now)

    def _resume_job(self, transport: asyncio.Transport) -> None:
        self._has_paused = False
        transport.set_write_buffer_limits()  # with much unread, this calls `pause_writing` again
        if self._is_slow:
            self.listener.unread.hold(self, transport.get_write_buffer_size(), self._loop.time())
        if self._active is not None and self._active.job is not None:
            self._active.job.resume()

    def cut(self, reason: str) -> None:
        """Close at once: the client does not read."""
        self.listener.unread.release(self)
        if self._transport is not None:
            if not self._transport.is_closing():
                logger.warning("the client %s %s; its connection is closed", self._remote(), reason)
            self.abort()

    def abort(self) -> None:
        """Close at once, without sending what is buffered."""
        if self._transport is not None:
            if self._is_slow and (sock := self._transport.get_extra_info("socket")) is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._transport.abort()

    def on_answer(self, exchange: Exchange, status: int) -> None:
        """Count a response that starts, and log it if there is an access log."""
        listener = self.listener
        if status < 400 or exchange.path not in listener.probes:  # what a probe finds is no error of a request
            listener.traffic.responded(status)
        if listener.access_log is not None and not self.counts_bytes:
            seconds = time.monotonic() - exchange.arrived
            listener.access_log.http(
                self._remote(), exchange.method, exchange.path, exchange.query, exchange.version, status, seconds
            )

    def _log_end(self, exchange: Exchange, end: str = "") -> None:
        """Log a response that has ended, with its whole duration and the sizes of the bodies."""
        access_log = self.listener.access_log
        assert access_log is not None
        request = (exchange.method, exchange.path, exchange.query, exchange.version, exchange.request_id)
        sizes = (exchange.received_bytes, exchange.sent_bytes)
        seconds = time.monotonic() - exchange.arrived
        trace_id = exchange.trace_id if access_log.is_json else ""
        names = (exchange.model_name, trace_id, exchange.model_version)
        access_log.http_ended(self._remote(), request, exchange.status, seconds, sizes, end, *names)

    def _remote(self) -> str:
        if not self._peer and self._transport is not None:
            self._peer = remote_of(self._transport.get_extra_info("peername"))
        return self._peer

    def on_finished(self, exchange: Exchange) -> None:
        """After a response: handle the next request, or close."""
        if self.counts_bytes:
            self._log_end(exchange)
        self._active = None
        self._since = self._loop.time()
        transport = self._transport
        if transport is None:
            return
        if not exchange.keeps_alive:
            for unanswered in self._waiting:
                unanswered.drop()
            self._waiting.clear()
            self._waiting_bytes = 0
            if self._parser.is_discarding:
                self._linger(transport)
            else:
                transport.close()
        elif self._waiting:
            self._wait_for_turn()
        elif self._has_ended:
            transport.close()
        elif self._is_paused:
            self._continue()

    def _wait_for_turn(self) -> None:
        """Answer the next request after those of others; not before the client has read enough of the last response."""
        if self._active is None and not self._is_slow and not self._is_waiting_for_turn:
            self._is_waiting_for_turn = True
            self.listener.turns.add(self)

    def answer_next(self) -> None:
        """Handle the next of the waiting requests; it is this connection's turn."""
        self._is_waiting_for_turn = False
        if self._transport is None or self._active is not None or not self._waiting or self._is_slow:
            return
        self._active = following = self._waiting.popleft()
        if following.body is not None:
            self._waiting_bytes -= following.body.size_bytes
        if self._is_paused:
            self._continue()
        if self._rejection is not None and not self._waiting:
            self._rejection(following)
        else:
            self.listener.app.handle(following)
        if self._has_ended and self._active is not None and self._transport is not None:
            self._transport.close()  # nobody waits for a prediction

    def _reject(self, respond: Callable[[Exchange], None], exchange: Exchange | None = None) -> None:
        """Ignore further input and respond a last time; earlier requests are answered first, and then it closes."""
        self._parser.discard()
        self._unparsed = None
        self.uncount()
        if exchange is None:
            exchange = Exchange(self, "", "", [], "1.1", time.monotonic())
            exchange.request_id = new_request_id()
        exchange.keeps_alive = False
        if self._active is None and not self._waiting:
            self._active = exchange
            respond(exchange)
        else:
            self._rejection = respond
            self._waiting.append(exchange)
            self._wait_for_turn()

    def _refuse(self, reason: str) -> None:
        """Respond that the server has no room for this connection."""
        if self._parser.is_discarding:
            return
        if self.listener.num_refused < MAX_REFUSED:
            self.listener.num_refused += 1
            self._loop.call_later(LINGER_S, self.listener.forget_refused)
            self._reject(partial(self.listener.app.reject, error=Unavailable(reason, retry_after_s=RETRY_AFTER_S)))
        else:
            self._parser.discard()
            self.abort()

    def _linger(self, transport: asyncio.Transport) -> None:
        """Let the response arrive: closing at once, with unread input, would reset the connection."""
        if self._is_paused and not transport.is_closing():
            self._is_paused = False
            transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._loop.call_later(LINGER_S, transport.abort)

    # ---- idle and slow connections ----

    @property
    def is_draining(self) -> bool:
        return self.listener.is_draining

    @property
    def is_idle(self) -> bool:
        """Whether no response is owed; part of a request may have arrived."""
        return self._active is None and not self._waiting

    @property
    def since(self) -> float:
        return self._since

    @property
    def is_busy(self) -> bool:
        """Whether a request is being received or answered, or its response is still being sent."""
        if self._transport is None:
            return False
        unsent = self._transport.get_write_buffer_size()
        return self._active is not None or bool(self._waiting) or self._parser.is_reading or unsent > 0

    def close_if_idle(self) -> None:
        """Close a connection without a request."""
        if self._transport is not None and not (self._active or self._waiting or self._parser.is_reading):
            self._transport.close()

    def _check_key_again(self, exchange: Exchange) -> None:
        """Cut a stream whose key was revoked, or has expired, since it began."""
        try:
            self.listener.app.admit(exchange)
        except InvalidKey:
            self.cut("streams with a key that was revoked or has expired")
        except BadRequest:
            pass  # a path without a key

    def close_if_stale(self, now: float) -> None:
        """Close a connection that was idle or slow for too long, or whose client does not read its last response."""
        if self._transport is None:
            return
        if self._transport.is_closing():
            unsent = self._transport.get_write_buffer_size()
            if unsent == self._unsent_bytes:
                self._transport.abort()
            self._unsent_bytes = unsent
            return
        if self._is_slow:
            self._hold(self._transport)  # the client may have read meanwhile
        if self._active is not None:
            if self._active.is_started and not self._active.checks_key:
                self._check_key_again(self._active)
            return
        limits = self.listener.limits
        if now - self._since > (limits.read_timeout_s if self._parser.is_reading else limits.keep_alive_s):
            self._transport.close()
