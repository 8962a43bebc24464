"""Connections of the clients: one parser of responses, read from a socket or from an asyncio stream."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

import httptools

from flambeau.errors import ApiError, CallTimedOut, NoConnection
from flambeau.http_client import HttpReply, explain_tls, host_and_port, tls_context

READ_BYTES = 64 * 1024
MAX_IDLE = 64  # connections that a client keeps for its next calls
MAX_HEAD_BYTES = 1 << 20
MAX_RESPONSE_BYTES = 1 << 30  # of a whole answer, or of one part of a stream
SWITCHING = 101
UNIX = "unix:"
_UNSAFE = str.maketrans({"\r": " ", "\n": " ", "\0": " "})


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens: a host and a port, or a unix socket."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        if url.startswith(UNIX):
            return cls("localhost", 0, path=url.removeprefix(UNIX))
        host, port, is_tls = host_and_port(url)
        return cls(host, port or (443 if is_tls else 80), is_tls)

    @property
    def host_header(self) -> str:
        if self.path:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{UNIX}{self.path}" if self.path else f"{'https' if self.is_tls else 'http'}://{self.host_header}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """One HTTP request."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None = None

    def encode(self, address: ServerAddress) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", f"host: {address.host_header}"]
        lines += [f"{name.translate(_UNSAFE)}: {value.translate(_UNSAFE)}" for name, value in self.headers.items()]
        if self.body is not None:
            lines.append(f"content-length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (self.body or b"")


class ResponseParser:
    """Bytes of a connection → one response; `take` returns what has arrived of its body."""

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._http: Any = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._held_bytes = 0  # of the body, until they are taken
        self._head_bytes = 0
        self.max_bytes = max_bytes
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.has_head = False
        self.is_complete = False
        self.is_upgraded = False  # what follows is in another protocol
        self.keeps_alive = False

    def feed(self, data: bytes) -> None:
        """Parse received bytes; raises NoConnection if they are not HTTP. Empty: the server has closed."""
        if not data:
            if not self.has_head or self.headers.get("transfer-encoding") or "content-length" in self.headers:
                raise NoConnection("the server closed the connection before the end of its answer")
            self.is_complete = True  # the body ends with the connection
            return
        try:
            self._http.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._chunks.append(data[upgrade.args[0] :])
            self.is_upgraded = True
        except httptools.HttpParserError as error:
            raise NoConnection(f"the server's answer is not HTTP: {error}") from None
        if self._held_bytes > self.max_bytes:
            raise too_large(self.status, self.max_bytes)
        if not self.has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise NoConnection(f"the head of the server's answer has more than {MAX_HEAD_BYTES} bytes")

    def check_head(self) -> None:
        """Raise ApiError for an answer that cannot be read to its end: too large, or in another protocol."""
        if self.status == SWITCHING:
            raise ApiError("the server changed the protocol, which this call did not ask for", status=SWITCHING)
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            raise too_large(self.status, self.max_bytes)

    def take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        self._held_bytes = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    # ---- callbacks of httptools ----

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._http.get_status_code()
        if status < 200 and status != SWITCHING:  # the answer follows
            self.headers.clear()
            return
        self.status = status
        self.keeps_alive = self._http.should_keep_alive()
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._held_bytes += len(data)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = True


def too_large(status: int, max_bytes: int) -> ApiError:
    return ApiError(
        f"the server's answer, or one part of it, has more than {max_bytes} bytes; raise max_response_bytes",
        status=status,
    )


def time_left(deadline: float | None) -> float | None:
    """Seconds until a deadline of the monotonic clock; raises CallTimedOut after it."""
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise CallTimedOut("the server took longer to answer than the client waits; raise timeout_s")
    return left


def no_server(address: ServerAddress, error: OSError) -> NoConnection:
    if problem := explain_tls(str(address), error):
        return NoConnection(problem)
    reason = error.strerror or str(error)
    return NoConnection(f"no server answers at {address} ({reason}); start one with `flambeau serve`")


# ---- threads ----


class SocketConnection:
    """One connection on a socket."""

    def __init__(
        self,
        address: ServerAddress,
        tls: ssl.SSLContext | None,
        deadline: float | None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._address = address
        self.max_response_bytes = max_response_bytes
        self._parser = ResponseParser(max_response_bytes)
        try:
            self._socket = open_socket(address, tls, time_left(deadline))
        except TimeoutError:
            raise CallTimedOut(f"{address} did not accept a connection in time") from None
        except OSError as error:
            raise no_server(address, error) from None

    def send(self, request: WireRequest, deadline: float | None) -> None:
        self._parser = ResponseParser(self.max_response_bytes)
        try:
            self.send_bytes(request.encode(self._address), deadline)
        except NoConnection:
            pass  # it may have answered before it closed, for example that the body is too large

    def send_bytes(self, data: bytes, deadline: float | None) -> None:
        try:
            self._socket.settimeout(time_left(deadline))
            self._socket.sendall(data)
        except TimeoutError:
            raise CallTimedOut("the server did not take the request in time") from None
        except OSError as error:
            raise self._broken(error) from None

    def read_raw(self, deadline: float | None) -> bytes:
        """Bytes of the protocol that follows the response; empty if the server has closed."""
        if self._parser.is_upgraded and (data := self._parser.take()):
            return data
        while True:
            try:
                self._socket.settimeout(time_left(deadline))
                return self._socket.recv(READ_BYTES)
            except TimeoutError:
                time_left(deadline)
            except OSError as error:
                raise self._broken(error) from None

    def _broken(self, error: OSError) -> NoConnection:
        return NoConnection(f"the connection to {self._address} broke: {error.strerror or error}")

    def read_head(self, deadline: float | None) -> HttpReply:
        """The head of the response, and as much of the body as came with it left to read."""
        while not self._parser.has_head:
            self._receive(deadline)
        return HttpReply(self._parser.status, self._parser.headers, b"")

    def read(self, deadline: float | None) -> bytes:
        """More of the body; empty at its end."""
        while True:
            if data := self._parser.take():
                return data
            if self._parser.is_complete:
                return b""
            self._receive(deadline)

    def read_whole(self, deadline: float | None) -> HttpReply:
        head = self.read_head(deadline)
        self._parser.check_head()
        while not self._parser.is_complete:
            self._receive(deadline)
        return HttpReply(head.status, head.headers, self._parser.take())

    def _receive(self, deadline: float | None) -> None:
        self._parser.feed(self.read_raw(deadline))

    @property
    def is_reusable(self) -> bool:
        return self._parser.is_complete and self._parser.keeps_alive and not self._parser.is_upgraded

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed the connection meanwhile."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self._socket.close()


def open_socket(address: ServerAddress, tls: ssl.SSLContext | None, timeout_s: float | None) -> socket.socket:
    if address.path:
        opened = socket.socket(socket.AF_UNIX)
        try:
            opened.settimeout(timeout_s)
            opened.connect(address.path)
        except OSError:
            opened.close()
            raise
        return opened
    opened = socket.create_connection((address.host, address.port), timeout_s)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.is_tls:
        return opened
    try:
        return (tls or tls_context()).wrap_socket(opened, server_hostname=address.host)
    except OSError:
        opened.close()
        raise


class SocketPool:
    """Connections to one server, for any number of threads."""

    def __init__(
        self, url: str, tls: ssl.SSLContext | None = None, max_response_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self._idle: list[SocketConnection] = []
        self._lock = Lock()
        self._tls = tls
        self._max_response_bytes = max_response_bytes
        self.address = ServerAddress.parse(url)

    def take(self, deadline: float | None) -> SocketConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return SocketConnection(self.address, self._tls, deadline, self._max_response_bytes)
            if not connection.is_stale:
                return connection
            connection.close()

    def give_back(self, connection: SocketConnection) -> None:
        """Keep a connection for the next call if it can be used again."""
        with self._lock:
            if connection.is_reusable and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        self.close()


# ---- asyncio ----


class AsyncConnection:
    """One connection on an asyncio stream."""

    def __init__(
        self,
        address: ServerAddress,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self.max_response_bytes = max_response_bytes
        self._parser = ResponseParser(max_response_bytes)

    @classmethod
    async def open(
        cls,
        address: ServerAddress,
        tls: ssl.SSLContext | None,
        deadline: float | None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> Self:
        try:
            async with asyncio.timeout(time_left(deadline)):
                if address.path:
                    reader, writer = await asyncio.open_unix_connection(address.path)
                else:
                    context = (tls or tls_context()) if address.is_tls else None
                    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        except TimeoutError:
            raise CallTimedOut(f"{address} did not accept a connection in time") from None
        except OSError as error:
            raise no_server(address, error) from None
        return cls(address, reader, writer, max_response_bytes)

    async def send(self, request: WireRequest, deadline: float | None) -> None:
        self._parser = ResponseParser(self.max_response_bytes)
        try:
            await self.send_bytes(request.encode(self._address), deadline)
        except NoConnection:
            pass  # it may have answered before it closed

    async def send_bytes(self, data: bytes, deadline: float | None) -> None:
        self._writer.write(data)
        try:
            async with asyncio.timeout(time_left(deadline)):
                await self._writer.drain()
        except TimeoutError:
            raise CallTimedOut("the server did not take the request in time") from None
        except OSError as error:
            raise self._broken(error) from None

    async def read_raw(self, deadline: float | None) -> bytes:
        """Bytes of the protocol that follows the response; empty if the server has closed."""
        if self._parser.is_upgraded and (data := self._parser.take()):
            return data
        while True:
            try:
                async with asyncio.timeout(time_left(deadline)):
                    return await self._reader.read(READ_BYTES)
            except TimeoutError:
                time_left(deadline)
            except OSError as error:
                raise self._broken(error) from None

    def _broken(self, error: OSError) -> NoConnection:
        return NoConnection(f"the connection to {self._address} broke: {error.strerror or error}")

    async def read_head(self, deadline: float | None) -> HttpReply:
        while not self._parser.has_head:
            await self._receive(deadline)
        return HttpReply(self._parser.status, self._parser.headers, b"")

    async def read(self, deadline: float | None) -> bytes:
        """More of the body; empty at its end."""
        while True:
            if data := self._parser.take():
                return data
            if self._parser.is_complete:
                return b""
            await self._receive(deadline)

    async def read_whole(self, deadline: float | None) -> HttpReply:
        head = await self.read_head(deadline)
        self._parser.check_head()
        while not self._parser.is_complete:
            await self._receive(deadline)
        return HttpReply(head.status, head.headers, self._parser.take())

    async def _receive(self, deadline: float | None) -> None:
        self._parser.feed(await self.read_raw(deadline))

    @property
    def is_reusable(self) -> bool:
        return self._parser.is_complete and self._parser.keeps_alive and not self._parser.is_upgraded

    @property
    def is_stale(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        self.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass


class AsyncPool:
    """Connections to one server, for the tasks of one event loop."""

    def __init__(
        self, url: str, tls: ssl.SSLContext | None = None, max_response_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self.address = ServerAddress.parse(url)
        self._tls = tls
        self._max_response_bytes = max_response_bytes
        self._idle: list[AsyncConnection] = []

    async def take(self, deadline: float | None) -> AsyncConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()
        return await AsyncConnection.open(self.address, self._tls, deadline, self._max_response_bytes)

    def give_back(self, connection: AsyncConnection) -> None:
        if connection.is_reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.wait_closed()
