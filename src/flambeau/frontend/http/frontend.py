"""HttpFrontend: opens the HTTP ports of a server, and drains them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from flambeau.config.server import Address, ServerConfig
from flambeau.errors import CannotListen
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.connection import HttpConnection
from flambeau.frontend.http.exchange import common_headers
from flambeau.frontend.http.listener import HttpLimits, Listener
from flambeau.frontend.http.router import Endpoint, Router
from flambeau.frontend.tls import server_context
from flambeau.serving.reply_budget import ReplyBudget
from flambeau.serving.server import Server

logger = logging.getLogger(__name__)

BACKLOG = 4096
SWEEP_S = 5.0
RESERVED_FILES = 256  # kept for workers, archives and logs
MANY_FILES = 1 << 20
UNFINISHED_BYTES, UNFINISHED_BODIES = 1 << 30, 4  # limits of the bodies arriving at a port; the larger counts
LAST_CALL_S = 0.1  # clients may still connect this long after readiness has ended


class HttpFrontend:
    """Serves a Server over HTTP. Two APIs at one address share a port."""

    def __init__(
        self, server: Server, routes: Mapping[Address, Mapping[str, Endpoint]], keys: Keys | None = None
    ) -> None:
        self._server = server
        self._routes = routes
        self._keys = keys
        self.inference = server.config.inference  # with the actual port, if port 0 was configured
        self._listeners: list[Listener] = []
        self._sockets: list[asyncio.Server] = []
        self._contexts: list[ssl.SSLContext | None] = []
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            room = connections_per_port(self._server.config)
            if self._server.segments is not None:  # a large body is an open file too
                self._server.segments.max_open = files_to_share() // 4
            for address, routes in self._routes.items():
                await self._listen(address, routes, room)
        except BaseException:
            for opened in self._sockets:
                opened.close()
            raise
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the ports, answer the accepted requests, then close the connections."""
        self._server.is_draining = True
        for listener in self._listeners:
            listener.is_draining = True
        if error is None:
            await asyncio.sleep(LAST_CALL_S)
        await self._close_ports()
        if error is None:
            await asyncio.sleep(LAST_CALL_S)
            deadline = asyncio.get_running_loop().time() + self._server.config.drain_timeout_s
            await self._server.drain(deadline)
            await self._until_idle(deadline)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for listener in self._listeners:
            for connection in [*listener.connections]:
                connection.close_if_idle() if error is None else connection.abort()

    async def _listen(self, address: Address, routes: Mapping[str, Endpoint], room: int) -> None:
        config = self._server.config
        limits = HttpLimits(
            max_body_bytes=config.max_request_bytes,
            share_from_bytes=config.shared_memory_from_bytes,
            keep_alive_s=config.keep_alive_s,
            read_timeout_s=config.request_read_timeout_s,
            response_timeout_s=config.response_read_timeout_s,
            max_connections=room,
            max_unfinished_bytes=max(UNFINISHED_BYTES, UNFINISHED_BODIES * config.max_request_bytes),
        )
        listener = Listener(
            Router(routes, details=config.shows_error_details, has_keys=self._keys is not None),
            limits,
            self._server.segments,
            common_headers(config.cors),
            self._server.telemetry.traffic,
            self._server.access_log,
            unread=ReplyBudget(config.max_response_bytes),
        )
        context = server_context(config.tls, address.host) if address.is_tls else None
        loop = asyncio.get_running_loop()
        try:
            if address.path is not None:
                remove_stale_socket(address.path)
                opened = await loop.create_unix_server(partial(HttpConnection, listener), address.path, backlog=BACKLOG)
            else:
                opened = await loop.create_server(
                    partial(HttpConnection, listener), address.host, address.port, backlog=BACKLOG, ssl=context
                )
        except OSError as error:
            raise CannotListen(str(address), listen_error(address, error)) from None
        self._listeners.append(listener)
        self._sockets.append(opened)
        self._contexts.append(context)
        if address == self._server.config.inference and address.path is None:
            self.inference = replace(address, port=opened.sockets[0].getsockname()[1])

    async def _close_ports(self) -> None:
        """Close the ports, but accept the clients in their backlog."""
        loop = asyncio.get_running_loop()
        for listener, opened, context in zip(self._listeners, self._sockets, self._contexts, strict=True):
            spares = [socket.socket(fileno=os.dup(listening.fileno())) for listening in opened.sockets]
            opened.close()
            for spare in spares:
                with spare:
                    for client in backlog_of(spare):
                        await loop.connect_accepted_socket(partial(HttpConnection, listener), client, ssl=context)

    async def _until_idle(self, deadline: float) -> None:
        """Wait until pending requests are answered and their responses are sent."""
        while asyncio.get_running_loop().time() < deadline:
            if not any(connection.is_busy for listener in self._listeners for connection in listener.connections):
                return
            await asyncio.sleep(0.02)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            for listener in self._listeners:
                listener.sweep(loop.time())


def files_to_share() -> int:
    """How many open files connections and large bodies may use."""
    return max(4, raise_file_limit() - RESERVED_FILES)


def connections_per_port(config: ServerConfig) -> int:
    """How many connections each port may have, HTTP or gRPC."""
    ports = {config.inference, config.management, config.metrics, config.grpc.inference, config.grpc.management}
    return max(1, files_to_share() * 3 // 4 // len(ports - {None}))


def raise_file_limit() -> int:
    """Raise the limit of open files as far as allowed; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            logger.warning("only %d files may be open at a time; each connection uses one", soft)
    return MANY_FILES if soft == resource.RLIM_INFINITY else soft


def remove_stale_socket(path: str) -> None:
    """Remove the Unix socket of a server that has exited; raises OSError if it is in use."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "a file of this name exists that is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def backlog_of(listening: socket.socket) -> Iterator[socket.socket]:
    """The clients that are connected but not accepted yet."""
    listening.setblocking(False)
    while True:
        try:
            client, _ = listening.accept()
        except OSError:
            return
        client.setblocking(False)
        yield client


def listen_error(address: Address, error: OSError) -> str:
    """Why a port could not be opened, and the remedy."""
    if error.errno == errno.EADDRINUSE or "address already in use" in str(error):
        return f"{address} is in use by another process; stop it, or choose another port"
    if error.errno == errno.EACCES:
        return f"{address} may not be opened by this user; choose a port above 1023"
    if error.errno == errno.EEXIST:
        return f"{address} is the name of a file that is no socket; choose another, or remove it"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{address} could not be opened: {reason}"
