"""The two ends of a connection that carries messages: asyncio in the server, blocking in the worker."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from flambeau.wire.frames import BadFrame, FrameBuffer, decode_to_server, decode_to_worker, to_frame
from flambeau.wire.messages import Part, ToServer, ToWorker

BURST_READS = 16
BURST_GAP_S = 0.0001
BURST_PAUSE_S = 0.001
SLACK_BYTES = 1 << 20  # room in a frame besides one body of the largest allowed size


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
        self._transport: asyncio.Transport | None = None
        self._fault = ""
        self._streak = 0  # reads in a row that followed each other at once
        self._read_at = 0.0

    def send(self, message: ToWorker) -> None:
        """Send a message; does nothing when the channel is closed."""
        if self._transport is not None:
            self._transport.write(to_frame((message,)))

    def close(self) -> None:
        """Close the channel; the worker reads the end of the stream."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it

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
        if self._streak >= BURST_READS and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(BURST_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._read_at = time.monotonic()  # the next read continues the burst
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed(self._fault)


class WorkerChannel:
    """The worker's end: blocking, and polled for cancellations while the handler runs."""

    def __init__(self, sock: socket.socket, max_frame_bytes: int) -> None:
        sock.setblocking(True)
        self.socket = sock
        self._frames = FrameBuffer(max_frame_bytes)
        self._arrived: deque[ToWorker] = deque()
        self._sending = threading.Lock()  # handlers may send from threads of their own

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
        for payload in self._frames.filled(count):
            self._arrived.extend(decode_to_worker(payload))
        return True
