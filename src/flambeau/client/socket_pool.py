"""Connections of the client for threads, which are kept for its next calls."""

from __future__ import annotations

import select
import socket
import ssl
from threading import Lock

from flambeau.client.transport import (
    MAX_IDLE,
    MAX_RESPONSE_BYTES,
    READ_BYTES,
    ResponseParser,
    ServerAddress,
    WireRequest,
    no_server,
    time_left,
)
from flambeau.errors import CallTimedOut, NoConnection
from flambeau.http_client import HttpReply, tls_context


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
        poller = select.poll()  # unlike select(), for descriptors of any number
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

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
