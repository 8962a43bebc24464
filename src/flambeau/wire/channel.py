"""Frames, and the two ends of a connection that carries them: asyncio in the server, blocking in the worker."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgspec

from flambeau.wire.messages import Part, ToServer, ToWorker

BURST_READS = 16
BURST_GAP_S = 0.0001
BURST_PAUSE_S = 0.001
SLACK_BYTES = 1 << 20  # room in a frame besides one body of the largest allowed size
PREFIX = 4
ROOM = 256 * 1024  # bytes of a FrameBuffer; a longer frame gets a larger buffer until it is read


class ServerChannel(asyncio.BufferedProtocol):
    """The server's end. `on_messages` gets messages as they arrive; `on_closed` gets the reason, once."""

    def __init__(
        self,
        on_messages: Callable[[list[ToServer]], None],
        on_closed: Callable[[str], None],
        max_frame_bytes: int,
    ) -> None:
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._frames = FrameBuffer(max_frame_bytes + SLACK_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the connection
        self._transport: asyncio.Transport | None = None
        self._unsent: list[ToWorker] = []  # messages of `send_soon`
        self._fault = ""
        self._streak = 0  # reads in a row that followed each other at once
        self._read_at = 0.0

    def send(self, message: ToWorker) -> None:
        """Send a message; does nothing when the channel is closed."""
        if self._unsent:
            self._unsent.append(message)
            self._send_unsent()
        elif self._transport is not None:
            self._transport.write(to_frame((message,)))

    def send_soon(self, message: ToWorker) -> None:
        """Send a message that need not arrive at once, together with others of this iteration of the event loop."""
        if self._loop is not None:
            self._unsent.append(message)
            if len(self._unsent) == 1:
                self._loop.call_soon(self._send_unsent)

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(to_frame(unsent))

    def close(self) -> None:
        """Close the channel; the worker reads the end of the stream."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the channel at once, without waiting for what was sent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self._loop = asyncio.get_running_loop()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        messages: list[ToServer] = []
        try:
            for payload in self._frames.filled(nbytes):
                messages += decode_to_server(payload)
        except BadFrame as error:
            self._fault = f"sent a malformed frame ({error})"
            assert self._transport is not None
            self._transport.abort()
        if messages:
            self._on_messages(messages)
            if type(messages[-1]) is Part and not messages[-1].last:
                self._throttle()

    def _throttle(self) -> None:
        """In a burst of stream parts, read once a millisecond instead of once a part.

        A fast worker would otherwise wake this process for each part, often on the worker's own core, and both would
        spend their time on context switches. Network cards coalesce interrupts in the same way.
        """
        now = time.monotonic()
        self._streak = self._streak + 1 if now - self._read_at < BURST_GAP_S else 0
        self._read_at = now
        if self._streak >= BURST_READS and self._transport is not None and self._loop is not None:
            self._transport.pause_reading()
            self._loop.call_later(BURST_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._read_at = time.monotonic()  # the next read continues the burst
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._frames.close()  # at once: the collector may come to a closed channel much later
        self._on_closed(self._fault)


class WorkerChannel:
    """The worker's end: blocking, and polled for cancellations while the handler runs."""

    def __init__(self, sock: socket.socket, max_frame_bytes: int) -> None:
        sock.setblocking(True)
        self.socket = sock
        self._frames = FrameBuffer(max_frame_bytes)
        self._arrived: deque[ToWorker] = deque()
        self._sending = threading.Lock()  # handlers may send from threads of their own

    def leave(self, on_use: Callable[[], object]) -> None:
        """Close this end in a copy of the process, which `fork` made; `on_use` is called if it is used nevertheless.

        The copy would send answers and take messages that are the worker's.
        """
        self.socket.close()
        self.socket = cast(socket.socket, LeftSocket(on_use))
        self._sending = threading.Lock()  # a thread that the copy does not have may have held it

    def send(self, messages: Sequence[ToServer]) -> None:
        """Send these messages as one frame."""
        frame = to_frame(messages)
        with self._sending:
            self.socket.sendall(frame)

    def receive(self) -> ToWorker | None:
        """The next message; None when the server is gone."""
        while not self._arrived:
            if not self._read(0):
                return None
        return self._arrived.popleft()

    def poll(self) -> deque[ToWorker]:
        """Everything that has arrived and was not received yet, without waiting."""
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        return self._arrived

    def _read(self, flags: int) -> bool:
        count = self.socket.recv_into(self._frames.space(), 0, flags)
        if not count:
            return False
        self._take(count)
        return True

    def _take(self, count: int) -> None:
        try:
            for payload in self._frames.filled(count):
                self._arrived.extend(decode_to_worker(payload))
        except BadFrame as error:  # nothing that follows can be trusted: the process ends, from any thread or callback
            raise SystemExit(f"the server sent a malformed frame ({error})") from None


class LeftSocket:
    """In the place of a socket that belongs to another process now: calls `on_use` for whatever is done with it."""

    def __init__(self, on_use: Callable[[], object]) -> None:
        self._on_use = on_use

    def __getattr__(self, name: str) -> object:
        return self._on_use()


_size = struct.Struct("<I")  # PREFIX bytes
_read_size, _write_size = _size.unpack_from, _size.pack
_encode = msgspec.msgpack.Encoder().encode
_decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
_decode_to_server = msgspec.msgpack.Decoder(list[ToServer]).decode


# What the decoder raises; texts that are not UTF-8 and deep nesting have exceptions of Python's own.
INVALID = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class BadFrame(Exception):
    """The peer sent an invalid frame."""


def to_frame(messages: Sequence[ToWorker | ToServer]) -> bytes:
    payload = _encode(messages)
    return _write_size(len(payload)) + payload


def decode_to_worker(payload: memoryview) -> list[ToWorker]:
    """Raises BadFrame if the payload is invalid."""
    try:
        return _decode_to_worker(payload)
    except INVALID as error:
        raise BadFrame(str(error)) from None


def decode_to_server(payload: memoryview) -> list[ToServer]:
    """Raises BadFrame if the payload is invalid."""
    try:
        return _decode_to_server(payload)
    except INVALID as error:
        raise BadFrame(str(error)) from None


class FrameBuffer:
    """Collects received bytes and yields the payloads of whole frames.

    Receive into `space()`, then iterate over `filled(n)`. A payload is valid until the next call.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._view = memoryview(bytearray(ROOM))
        self._start = 0
        self._end = 0

    def close(self) -> None:
        """Free the memory; nothing more is received."""
        self._view = memoryview(b"")

    def space(self) -> memoryview:
        """Room for the next received bytes; never empty."""
        return self._view[self._end :]

    def filled(self, count: int) -> Iterator[memoryview]:
        """Add `count` received bytes; yield each whole payload."""
        self._end += count
        while (held := self._end - self._start) >= PREFIX:
            start = self._start + PREFIX
            (size,) = _read_size(self._view, self._start)
            if size > self._max_frame_bytes:
                raise BadFrame(f"a frame of {size} bytes; at most {self._max_frame_bytes} are allowed")
            if held < PREFIX + size:
                self._make_room(PREFIX + size)
                return
            self._start = start + size
            yield self._view[start : self._start]
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._view) > ROOM:
                self._view = memoryview(bytearray(ROOM))
        else:
            self._make_room(PREFIX)

    def _make_room(self, needed: int) -> None:
        """Make a frame of `needed` bytes fit behind `_start`."""
        if len(self._view) - self._start >= needed and self._end < len(self._view):
            return
        held = self._view[self._start : self._end]
        if needed > len(self._view):
            self._view = memoryview(bytearray(needed))
        self._view[: len(held)] = held  # correct even where the two overlap
        self._start, self._end = 0, len(held)
