"""WorkerPort: where agents and placed workers connect, each with a token: inside TLS, or by a Unix socket."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import cast

from flambeau.certificates import self_signed
from flambeau.errors import ConfigError
from flambeau.serving.cluster.tls_connection import TlsConnection
from flambeau.wire.tls import (
    SOCKET_BUFFER_BYTES,
    TOKEN_BYTES,
    fingerprint_of,
    keep_alive,
    listen_locally,
    server_context,
    split_address,
)

logger = logging.getLogger(__name__)

TOKEN_S = 10.0  # a process sends its token as soon as it is connected
MAX_STRANGERS = 64  # connections that have not shown a token yet
QUIET_S = 1.0  # between two lines about strangers

NewProtocol = Callable[[], asyncio.BufferedProtocol]


class WorkerPort:
    """One listening port, and a Unix socket for workers of this machine, which need no TLS.

    `expect` returns a token; whoever shows it first gets the protocol that goes with it.
    """

    def __init__(self, address: str, heartbeat_s: float) -> None:
        self._host, self._port = split_address(address)
        self._heartbeat_s = heartbeat_s
        self._expected: dict[bytes, NewProtocol] = {}  # by the hash of a token, so that a look-up tells nothing of it
        self._known: dict[bytes, NewProtocol] = {}
        self._strangers: set[TlsConnection | TokenCheck] = set()  # that have not shown a token yet
        self._servers: list[asyncio.Server] = []
        self._refusals = Refusals()
        self.fingerprint = ""
        self.local_name = ""  # of the Unix socket; empty: there is none

    @property
    def address(self) -> str:
        """HOST:PORT, for those who dial."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    async def open(self) -> None:
        """Make a certificate and listen; raises ConfigError."""
        try:
            certificate, key = await asyncio.to_thread(self_signed, "flambeau-workers")
        except ImportError:
            raise ConfigError("a cluster needs the package cryptography: pip install 'flambeau[ray]'") from None
        self.fingerprint = fingerprint_of(ssl.PEM_cert_to_DER_cert(certificate.decode()))
        self._context = server_context(certificate, key)
        try:
            listener = self._listen()
        except OSError as error:
            raise ConfigError(
                f"the worker port {self.address} cannot be opened: {error.strerror or error}; "
                "choose an address of this machine and a free port with --worker-address HOST:PORT"
            ) from None
        self._port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(self._new_connection, sock=listener))
        if sys.platform == "linux":
            here, self.local_name = listen_locally()
            self._servers.append(await loop.create_unix_server(self._new_local_connection, sock=here))

    def _listen(self) -> socket.socket:
        family, *_, place = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=1024)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for stranger in [*self._strangers]:
            stranger.raw.abort()

    def expect(self, new_protocol: NewProtocol) -> str:
        """A token that is good for one connection."""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        self._expected[_hash(token.encode())] = new_protocol
        return token

    def expect_always(self, token: str, new_protocol: NewProtocol) -> None:
        """Accept a token as often as it is shown."""
        self._known[_hash(token.encode())] = new_protocol

    def forget(self, token: str) -> None:
        """Accept this token no longer; harmless if it was used."""
        self._expected.pop(_hash(token.encode()), None)

    def _new_connection(self) -> TlsConnection:
        connection = TlsConnection(self._context, lambda: self._admit(connection), self._refuse)
        self._strangers.add(connection)
        return connection

    def _admit(self, connection: TlsConnection) -> asyncio.BufferedProtocol:
        """The handshake is done; the token comes next."""
        sock = connection.raw.get_extra_info("socket")
        keep_alive(sock, self._heartbeat_s)
        self._limit_strangers(connection)
        return TokenCheck(self._take, lambda reason: self._settle(connection, reason))

    def _new_local_connection(self) -> TokenCheck:
        check = TokenCheck(self._take, lambda reason: self._settle(check, reason), self._on_local_connection)
        self._strangers.add(check)
        return check

    def _on_local_connection(self, check: TokenCheck) -> None:
        sock = check.raw.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._limit_strangers(check)

    def _limit_strangers(self, newest: TlsConnection | TokenCheck) -> None:
        if len(self._strangers) > MAX_STRANGERS:
            self._refuse(newest, f"{MAX_STRANGERS} connections have not shown a token yet")

    def _settle(self, connection: TlsConnection | TokenCheck, reason: str) -> None:
        """A connection has shown its token, or is refused for a reason."""
        if reason:
            self._refuse(connection, reason)
        self._strangers.discard(connection)

    def _refuse(self, connection: TlsConnection | TokenCheck, reason: str) -> None:
        if connection in self._strangers:
            self._strangers.discard(connection)
            peer = connection.raw.get_extra_info("peername")
            self._refusals.note(str(peer[0]) if peer else "this machine", reason)
            connection.raw.abort()

    def _take(self, token: bytes) -> NewProtocol | None:
        key = _hash(token)
        return self._known.get(key) or self._expected.pop(key, None)


class TokenCheck(asyncio.BufferedProtocol):
    """Reads the token of a new connection and hands it over to the protocol that waits for it."""

    def __init__(
        self,
        take: Callable[[bytes], NewProtocol | None],
        on_settled: Callable[[str], None],
        on_connected: Callable[[TokenCheck], None] = lambda check: None,
    ) -> None:
        self._take = take
        self._on_settled = on_settled
        self._on_connected = on_connected
        self._token = bytearray(TOKEN_BYTES)
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.raw = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(TOKEN_S, self._on_settled, "it sent no token")
        self._on_connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._token)[self._size :]  # not a byte of what follows

    def buffer_updated(self, nbytes: int) -> None:
        self._size += nbytes
        if self._size < TOKEN_BYTES:
            return
        self._timer.cancel()
        new_protocol = self._take(bytes(self._token))
        if new_protocol is None:
            self._on_settled("its token is not known, or was used before")
            return
        self._on_settled("")
        protocol = new_protocol()
        self.raw.set_protocol(protocol)
        protocol.connection_made(self.raw)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._on_settled("it left without a token")


class Refusals:
    """Logs refused connections, at most one line a second."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._num_unlogged = 0

    def note(self, peer: str, reason: str) -> None:
        now = time.monotonic()
        if now < self._quiet_until:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more since the last such line)" if self._num_unlogged else ""
        logger.warning("the worker port refused a connection from %s: %s%s", peer, reason, more)
        self._quiet_until, self._num_unlogged = now + QUIET_S, 0


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
