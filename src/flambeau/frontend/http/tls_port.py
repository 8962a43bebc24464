"""TlsPort: accepts the clients of a TLS port, and counts them from then on, not from the end of their handshake."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Iterable
from itertools import islice

from flambeau.frontend.http.connection import HttpConnection
from flambeau.frontend.http.listener import Listener, address_of

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
ACCEPTED_PER_TURN = 16  # those that are closed to make room need a turn for it
RETRY_S = 0.5  # after there were no descriptors
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TlsHandshake:
    """The handshake of one client."""

    def __init__(self, listener: Listener, address: str) -> None:
        self._listener = listener
        self._address = address
        self._is_finished = False
        self._task: asyncio.Task[None] | None = None

    def start(self, client: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        self._listener.handshakes[self] = loop.time()
        self._task = loop.create_task(self._run(client, context))
        self._task.add_done_callback(lambda _: self._give_up(client))

    async def _run(self, client: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: HttpConnection(self._listener, self), client, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # also ssl.SSLError, and the time-out
            logger.debug("the TLS handshake of %s failed: %s", self._address, error)

    def finish(self) -> str:
        """Count the client as a connection from now on; returns the address it is counted under."""
        self._is_finished = True
        self._listener.handshakes.pop(self, None)
        return self._address

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _give_up(self, client: socket.socket) -> None:
        if not self._is_finished:
            address = self.finish()
            if self._listener.addresses is not None:
                self._listener.addresses.remove(address)
            client.close()


class TlsPort:
    """The listening sockets of one TLS address."""

    def __init__(self, listener: Listener, context: ssl.SSLContext, sockets: Iterable[socket.socket]) -> None:
        self._listener = listener
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.sockets = [*sockets]
        for listening in self.sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Stop listening; clients in the backlog are accepted."""
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            for client in backlog_of(listening):
                self._admit(client)
            listening.close()
        self.sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        try:
            for client in islice(backlog_of(listening), ACCEPTED_PER_TURN):
                self._admit(client)
        except OSError as error:
            logger.warning("no TLS client can be accepted: %s; the limit of open files (ulimit -n) is too low", error)
            self._loop.remove_reader(listening)
            self._loop.call_later(RETRY_S, self._listen_again, listening)

    def _listen_again(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _admit(self, client: socket.socket) -> None:
        listener = self._listener
        address = ""
        if listener.addresses is not None:
            address = address_of(peer_of(client))
            if listener.addresses.add(address):
                listener.addresses.remove(address)
                client.close()
                return
        handshake = TlsHandshake(listener, address)
        handshake.start(client, self._context)
        if listener.room.is_full_for(listener) and not listener.room.make_room(listener, handshake):
            handshake.cancel()


def backlog_of(listening: socket.socket) -> Iterable[socket.socket]:
    """The clients that are connected but not accepted yet. Raises OSError if there are no descriptors."""
    while True:
        try:
            client, _ = listening.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return
        client.setblocking(False)
        yield client


def peer_of(client: socket.socket) -> object:
    try:
        return client.getpeername()
    except OSError:
        return None
