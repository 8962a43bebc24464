"""WorkerPort: where agents and workers of other machines connect, inside TLS, each with a token of its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

from flambeau.certificates import self_signed
from flambeau.errors import ConfigError
from flambeau.wire.tls import TOKEN_BYTES, fingerprint_of, keep_alive, server_context, split_address

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0  # for TLS and the token
MAX_STRANGERS = 64  # connections that have not shown a token yet
QUIET_S = 1.0  # between two lines about strangers

NewProtocol = Callable[[], asyncio.BaseProtocol]


class WorkerPort:
    """One listening port. `expect` returns a token; whoever shows it first gets the protocol that goes with it."""

    def __init__(self, address: str, heartbeat_s: float) -> None:
        self._host, self._port = split_address(address)
        self._heartbeat_s = heartbeat_s
        self._expected: dict[bytes, NewProtocol] = {}  # by the hash of a token, so that a look-up tells nothing of it
        self._strangers: set[TokenCheck] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._refusals = Refusals()
        self.fingerprint = ""

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
            self._listener = self._listen()
        except OSError as error:
            raise ConfigError(
                f"the worker port {self.address} cannot be opened: {error.strerror or error}; "
                "choose an address of this machine and a free port with --worker-address HOST:PORT"
            ) from None
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def _listen(self) -> socket.socket:
        family, *_, place = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=1024)

    async def close(self) -> None:
        if self._accepting is None:
            return
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        for stranger in [*self._strangers]:
            stranger.close()

    def expect(self, new_protocol: NewProtocol) -> str:
        """A token that is good for one connection."""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        self._expected[_hash(token.encode())] = new_protocol
        return token

    def forget(self, token: str) -> None:
        """Accept this token no longer; harmless if it was used."""
        self._expected.pop(_hash(token.encode()), None)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._listener)
            except OSError as error:  # such as too many open files
                self._refusals.note("anyone", str(error))
                await asyncio.sleep(QUIET_S)
                continue
            if len(self._strangers) + len(self._handshakes) >= MAX_STRANGERS:
                self._refusals.note(peer[0], f"{MAX_STRANGERS} connections have not shown a token yet")
                sock.close()
                continue
            task = loop.create_task(self._admit(sock, str(peer[0])))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _admit(self, sock: socket.socket, peer: str) -> None:
        try:
            keep_alive(sock, self._heartbeat_s)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: TokenCheck(self._take, self._strangers, peer, self._refusals),
                sock,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, TimeoutError) as error:  # TLS errors are OSErrors
            self._refusals.note(peer, f"no TLS handshake ({getattr(error, 'reason', None) or error or 'cut'})")
            sock.close()

    def _take(self, token: bytes) -> NewProtocol | None:
        return self._expected.pop(_hash(token), None)


class TokenCheck(asyncio.Protocol):
    """Reads the token of a new connection and hands it over, or closes it."""

    def __init__(
        self,
        take: Callable[[bytes], NewProtocol | None],
        strangers: set[TokenCheck],
        peer: str,
        refusals: Refusals,
    ) -> None:
        self._take = take
        self._strangers = strangers
        self._peer = peer
        self._refusals = refusals
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._refuse, "it sent no token")
        self._strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._strangers:
            self._refusals.note(self._peer, "it left without a token")
        self._let_go()

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if len(self._seen) < TOKEN_BYTES:
            return
        token, rest = self._seen[:TOKEN_BYTES], self._seen[TOKEN_BYTES:]
        new_protocol = self._take(token)
        if new_protocol is None:
            self._refuse("its token is not known, or was used before")
            return
        self._let_go()
        protocol = new_protocol()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if rest:
            feed(protocol, rest)

    def close(self) -> None:
        self._let_go()
        self._transport.abort()

    def _refuse(self, reason: str) -> None:
        self._refusals.note(self._peer, reason)
        self.close()

    def _let_go(self) -> None:
        self._timer.cancel()
        self._strangers.discard(self)


def feed(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    """Give a buffered protocol what arrived before it took over."""
    assert isinstance(protocol, asyncio.BufferedProtocol)
    while data:
        space = memoryview(protocol.get_buffer(len(data)))
        count = min(len(space), len(data))
        space[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]


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
