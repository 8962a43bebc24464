"""ClientSession and AsyncClientSession: a WebSocket to one model, for streams in both directions."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from flambeau import websocket_frames as frames
from flambeau.client.async_pool import AsyncConnection
from flambeau.client.calls import Call, path_of
from flambeau.client.replies import as_whole, error_of
from flambeau.client.socket_pool import SocketConnection
from flambeau.client.transport import MAX_RESPONSE_BYTES, SWITCHING
from flambeau.errors import ApiError, ClientError, ConfigError, NoConnection
from flambeau.http_client import HttpReply

ERROR_CODES = range(4000, 5000)  # close codes: 4000 plus the HTTP status of an error
CLOSE_S = 2.0

PartOrEnd = str | bytes | None  # None ends a reply


def upgrade(model: str, version: str | None, headers: Mapping[str, str] | None) -> tuple[Call[HttpReply], str]:
    """The handshake of a WebSocket, and its key."""
    key = frames.new_key()
    wanted = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": key,
        **{name.lower(): value for name, value in (headers or {}).items()},
    }
    return Call(method="GET", path=path_of("predictions", model, version), read=as_whole, headers=wanted), key


def check_upgrade(head: HttpReply, key: str) -> None:
    if head.status != SWITCHING or head.headers.get("sec-websocket-accept") != frames.accept_key(key):
        raise NoConnection(f"the server answered (HTTP {head.status}), but does not speak WebSocket at this path")


def encode_message(data: Any) -> bytes:
    """One message: bytes as they are, text as it is, other values as JSON."""
    if isinstance(data, bytes | bytearray | memoryview):
        return frames.encode_frame(frames.BINARY, bytes(data), is_masked=True)
    if not isinstance(data, str):
        try:
            data = json.dumps(data)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data cannot be sent as JSON ({error}); give bytes, text or values of JSON") from None
    return frames.encode_frame(frames.TEXT, data.encode(), is_masked=True)


class SessionReader:
    """Received bytes → the parts of replies, and the frames to answer with."""

    def __init__(self, request_id: str, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._frames = frames.FrameReader(max_bytes=max_bytes, is_masked=False)
        self._request_id = request_id
        self.parts: deque[PartOrEnd] = deque()
        self.closed: Exception | None = None  # why nothing follows

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; returns what to send in answer. Empty: the server has closed."""
        if not data:
            self.closed = self.closed or NoConnection("the server closed the connection without a reason")
            return b""
        answers = []
        try:
            for frame in self._frames.feed(data):
                if frame.opcode == frames.PING:
                    answers.append(frames.encode_frame(frames.PONG, frame.payload, is_masked=True))
                elif frame.opcode == frames.CLOSE:
                    self.closed = self._reason(*frames.read_close(frame.payload))
                    answers.append(frames.encode_frame(frames.CLOSE, frame.payload[:2], is_masked=True))
                elif frame.opcode == frames.TEXT:
                    self.parts.append(frame.payload.decode() or None)
                elif frame.opcode == frames.BINARY:
                    self.parts.append(frame.payload or None)
        except frames.FrameError as error:
            self.closed = NoConnection(f"the server does not keep to the WebSocket protocol: {error}")
        return b"".join(answers)

    def _reason(self, code: int, reason: str) -> Exception:
        if code in ERROR_CODES:
            return ApiError(
                reason or "the server gave no reason", status=code - ERROR_CODES.start, request_id=self._request_id
            )
        return NoConnection(f"the server closed the session ({code}{f': {reason}' if reason else ''})")

    def take(self) -> PartOrEnd:
        """The next part; call it only if there is one."""
        return self.parts.popleft()


class ClientSession:
    """Messages to one model and its replies. `with` closes it, which ends the sequence of a stateful model."""

    def __init__(self, connection: SocketConnection, head: HttpReply, timeout_s: float | None) -> None:
        self._connection = connection
        self._reader = SessionReader(head.headers.get("x-request-id", ""), connection.max_response_bytes)
        self._timeout_s = timeout_s
        self._is_closed = False

    @classmethod
    def open(
        cls, connection: SocketConnection, call: Call[HttpReply], keys: Any, key: str, timeout_s: float | None
    ) -> Self:
        deadline = deadline_in(timeout_s)
        try:
            connection.send(call.request(keys), deadline)
            head = connection.read_head(deadline)
            if head.status >= 300:
                raise error_of(connection.read_whole(deadline))
            check_upgrade(head, key)
        except BaseException:
            connection.close()
            raise
        return cls(connection, head, timeout_s)

    def send(self, data: Any) -> None:
        """Send a message; it need not wait for the reply to the one before."""
        self._connection.send_bytes(encode_message(data), deadline_in(self._timeout_s))

    def parts(self) -> Iterator[str | bytes]:
        """The parts of the next reply as they arrive; the session's `timeout_s` is for each of them."""
        while (part := self._next()) is not None:
            yield part

    def ask(self, data: Any) -> Iterator[str | bytes]:
        """Send a message; the parts of its reply."""
        self.send(data)
        return self.parts()

    def _next(self) -> PartOrEnd:
        deadline, reader = deadline_in(self._timeout_s), self._reader
        while not reader.parts:
            if reader.closed is not None:
                raise reader.closed
            if answer := reader.feed(self._connection.read_raw(deadline)):
                self._connection.send_bytes(answer, deadline)
        return reader.take()

    def close(self) -> None:
        """Say goodbye and close; a reply that is not read to its end is cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._reader.closed is None:
                goodbye = frames.encode_frame(frames.CLOSE, frames.close_payload(frames.NORMAL), is_masked=True)
                self._connection.send_bytes(goodbye, deadline_in(CLOSE_S))
        except (ClientError, OSError):  # the connection has ended in another way
            pass
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClientSession:
    """`ClientSession` for the tasks of an event loop: one may send while another reads."""

    def __init__(self, connection: AsyncConnection, head: HttpReply, timeout_s: float | None) -> None:
        self._connection = connection
        self._reader = SessionReader(head.headers.get("x-request-id", ""), connection.max_response_bytes)
        self._timeout_s = timeout_s
        self._is_closed = False

    @classmethod
    async def open(
        cls, connection: AsyncConnection, call: Call[HttpReply], keys: Any, key: str, timeout_s: float | None
    ) -> Self:
        deadline = deadline_in(timeout_s)
        try:
            await connection.send(call.request(keys), deadline)
            head = await connection.read_head(deadline)
            if head.status >= 300:
                raise error_of(await connection.read_whole(deadline))
            check_upgrade(head, key)
        except BaseException:
            connection.close()
            raise
        return cls(connection, head, timeout_s)

    async def send(self, data: Any) -> None:
        await self._connection.send_bytes(encode_message(data), deadline_in(self._timeout_s))

    async def parts(self) -> AsyncIterator[str | bytes]:
        while (part := await self._next()) is not None:
            yield part

    async def ask(self, data: Any) -> AsyncIterator[str | bytes]:
        """Send a message; the parts of its reply."""
        await self.send(data)
        while (part := await self._next()) is not None:
            yield part

    async def _next(self) -> PartOrEnd:
        deadline, reader = deadline_in(self._timeout_s), self._reader
        while not reader.parts:
            if reader.closed is not None:
                raise reader.closed
            if answer := reader.feed(await self._connection.read_raw(deadline)):
                await self._connection.send_bytes(answer, deadline)
        return reader.take()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._reader.closed is None:
                goodbye = frames.encode_frame(frames.CLOSE, frames.close_payload(frames.NORMAL), is_masked=True)
                await self._connection.send_bytes(goodbye, deadline_in(CLOSE_S))
        except (ClientError, OSError):  # the connection has ended in another way
            pass
        await self._connection.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def deadline_in(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
