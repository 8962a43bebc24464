"""WebSocketConnection: a client's connection after its upgrade: frames in, frames out, within the listener's limits.

What its messages mean is a SocketSession's matter. See docs/decisions/0016-websockets.md.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from flambeau import websocket_frames as frames
from flambeau.frontend.http.listener import Listener
from flambeau.serving.reply_budget import resume_below_bytes

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 64 * 1024
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
ERROR_CODES = 4000  # the close code of an error is this plus its HTTP status
MAX_CLOSE_BYTES = 6 + frames.MAX_CONTROL_BYTES  # of a masked close frame

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


def is_close(data: bytes) -> bool:
    """Whether the bytes are a close frame."""
    return data[:1] == bytes((0x80 | frames.CLOSE,))
