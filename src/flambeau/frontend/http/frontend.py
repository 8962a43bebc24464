"""HttpFrontend: opens the HTTP ports of a server, and drains them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from flambeau.config.server import Address, ServerConfig
from flambeau.errors import CannotListen
from flambeau.frontend.authorization import HostCheck, Keys
from flambeau.frontend.http.connection import HttpConnection
from flambeau.frontend.http.exchange import common_headers
from flambeau.frontend.http.idempotency import IdempotentReplies
from flambeau.frontend.http.listener import PROBES, AddressCounts, ConnectionRoom, HttpLimits, Listener, TurnQueue
from flambeau.frontend.http.router import Endpoint, Router
from flambeau.frontend.http.tls_port import TlsPort, backlog_of
from flambeau.frontend.tls import server_context
from flambeau.serving.reply_budget import ReplyBudget
from flambeau.serving.server import Server

logger = logging.getLogger(__name__)

BACKLOG = 4096
SWEEP_S = 5.0
LISTENING = "0A"  # in /proc/net/tcp
MAX_COMMAND = 120  # characters of a command line in an error message
RESERVED_FILES = 256  # kept for workers, archives and logs
MANY_FILES = 1 << 20
LARGE_BODIES_SHARE, GRPC_SHARE = 8, 8  # one part in so many is for large bodies, and for the clients of a gRPC port
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
        self.opened: dict[Address, Address] = {}  # by configured address; a port 0 became an actual one
        config = server.config
        self._turns = TurnQueue()
        self._room = ConnectionRoom(http_connections(config), num_ports=len(routes))
        limit = config.max_connections_per_address
        max_bytes = config.idempotency_cache_mb << 20
        self._repeats = IdempotentReplies(max_bytes, config.idempotency_cache_s) if max_bytes else None
        self._addresses = AddressCounts(limit) if limit else None
        self._listeners: list[Listener] = self._room.listeners
        self._sockets: list[asyncio.Server | TlsPort] = []
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def inference(self) -> Address:
        """The address of the inference API, with its actual port."""
        return self.opened[self._server.config.inference]

    async def __aenter__(self) -> Self:
        try:
            if self._server.segments is not None:  # a large body is an open file too
                self._server.segments.max_open = files_to_share() // LARGE_BODIES_SHARE
            for address, routes in self._routes.items():
                await self._listen(address, routes)
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
            for handshake in [*listener.handshakes]:
                handshake.cancel()
            for connection in [*listener.connections]:
                connection.close_if_idle() if error is None else connection.abort()

    async def _listen(self, address: Address, routes: Mapping[str, Endpoint]) -> None:
        config = self._server.config
        limits = HttpLimits(
            max_body_bytes=config.max_request_bytes,
            share_from_bytes=config.shared_memory_from_bytes,
            keep_alive_s=config.keep_alive_s,
            read_timeout_s=config.request_read_timeout_s,
            response_timeout_s=config.response_read_timeout_s,
            max_unfinished_bytes=max(UNFINISHED_BYTES, UNFINISHED_BODIES * config.max_request_bytes),
        )
        listener = Listener(
            Router(
                routes,
                style=config.error_style,
                has_keys=self._keys is not None,
                max_body_bytes=config.max_request_bytes,
                decodes_all=config.strict_calls,
                repeats=self._repeats if address == config.inference else None,
                host_check=HostCheck(config.allowed_hosts, config.cors) if self._needs_host_check(address) else None,
            ),
            limits,
            self._server.segments,
            common_headers(config.cors),
            self._server.telemetry.traffic,
            self._server.access_log,
            PROBES | {"/ping"} if config.plain_errors else PROBES,
            turns=self._turns,
            room=self._room,
            addresses=self._addresses,
            unread=ReplyBudget(config.max_response_bytes),
            messages=ReplyBudget(config.max_request_bytes),
        )
        opened: asyncio.Server | TlsPort
        loop = asyncio.get_running_loop()
        try:
            if address.path is not None:
                remove_stale_socket(address.path)
                opened = await loop.create_unix_server(partial(HttpConnection, listener), address.path, backlog=BACKLOG)
            elif address.is_tls:
                context = server_context(config.tls, address.host)
                opened = TlsPort(listener, context, await listening_sockets(address))
            else:
                opened = await loop.create_server(
                    partial(HttpConnection, listener), address.host, address.port, backlog=BACKLOG
                )
        except OSError as error:
            reason = listen_error(address, error, flag_of(config, address))
            if says_in_use(error):
                reason += others_in_use(
                    config, [other for other in self._routes if other not in {address, *self.opened}]
                )
            raise CannotListen(str(address), reason) from None
        self._listeners.append(listener)
        self._sockets.append(opened)
        is_path = address.path is not None
        self.opened[address] = address if is_path else replace(address, port=opened.sockets[0].getsockname()[1])

    def _needs_host_check(self, address: Address) -> bool:
        """Whether browsers could reach an API that asks for no key."""
        if address.path is not None:
            return False
        config = self._server.config
        return self._keys is None or (address.is_loopback and address not in (config.inference, config.management))

    async def _close_ports(self) -> None:
        """Close the ports, but accept the clients in their backlog."""
        loop = asyncio.get_running_loop()
        for listener, opened in zip(self._listeners, self._sockets, strict=True):
            if isinstance(opened, TlsPort):
                opened.close()
                continue
            spares = [socket.socket(fileno=os.dup(listening.fileno())) for listening in opened.sockets]
            opened.close()
            for spare in spares:
                with spare:
                    spare.setblocking(False)
                    for client in backlog_of(spare):
                        with suppress(OSError):  # it has disconnected
                            await loop.connect_accepted_socket(partial(HttpConnection, listener), client)

    async def _until_idle(self, deadline: float) -> None:
        """Wait until pending requests are answered and their responses are sent."""
        while (now := asyncio.get_running_loop().time()) < deadline:
            if not any(listener.is_busy(now) for listener in self._listeners):
                return
            await asyncio.sleep(0.02)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            for listener in self._listeners:
                listener.sweep(loop.time())
            if self._server.segments is not None:
                self._server.segments.close_unused()


def files_to_share() -> int:
    """How many open files connections and large bodies may use."""
    return max(4, raise_file_limit() - RESERVED_FILES)


def num_connections() -> int:
    """How many connections all ports may have, HTTP and gRPC."""
    return files_to_share() * (LARGE_BODIES_SHARE - 1) // LARGE_BODIES_SHARE


def connections_per_grpc_port() -> int:
    return max(1, num_connections() // GRPC_SHARE)


def http_connections(config: ServerConfig) -> int:
    """How many connections the HTTP ports may have together."""
    grpc = {config.grpc.inference, config.grpc.management} - {None}
    return max(1, num_connections() - len(grpc) * connections_per_grpc_port())


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


async def listening_sockets(address: Address) -> list[socket.socket]:
    """Listen at each address of a host name, as `create_server` does."""
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    opened: list[socket.socket] = []
    try:
        for family, _, _, _, where in dict.fromkeys(found):
            listening = socket.socket(family, socket.SOCK_STREAM)
            opened.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(where)
            listening.listen(BACKLOG)
    except OSError:
        for listening in opened:
            listening.close()
        raise
    return opened


def flag_of(config: ServerConfig, address: Address) -> str:
    """The settings of a listener's port: the flag, and the key of config.properties."""
    flags = {
        config.inference: "--port (inference_address)",
        config.management: "--management-port (management_address)",
        config.metrics: "--metrics-port (metrics_address)",
        config.grpc.inference: "--grpc-port (grpc_inference_port)",
        config.grpc.management: "--grpc-management-port (grpc_management_port)",
    }
    return flags.get(address, "")


def listen_error(address: Address, error: OSError, flag: str = "") -> str:
    """Why a port could not be opened, and the remedy; `flag` chooses the port."""
    if says_in_use(error):
        owner = describe_owner(address.port) if address.path is None else ""
        other = f"choose another port with {flag}" if flag else "choose another port"
        return f"{address} is in use by another process{owner}; stop it, or {other}"
    if error.errno == errno.EACCES:
        return f"{address} may not be opened by this user; choose a port above 1023"
    if error.errno == errno.EEXIST:
        return f"{address} is the name of a file that is no socket; choose another, or remove it"
    # The numbers of name resolution are negative, and have texts of their own.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
    return f"{address} could not be opened: {reason}"


def others_in_use(config: ServerConfig, addresses: Iterable[Address]) -> str:
    """The other ports that would fail, so that one new start is enough; empty if there are none."""
    taken = [f"{other} ({flag_of(config, other).partition(' ')[0]})" for other in addresses if is_in_use(other)]
    verb = "is" if len(taken) == 1 else "are"
    return f"; {' and '.join(taken)} {verb} in use, too" if taken else ""


def is_in_use(address: Address) -> bool:
    """Whether a process listens at an IP address and port."""
    if address.path is not None or not address.port:
        return False
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.create_server((address.host, address.port), family=family):
            return False
    except OSError as error:
        return says_in_use(error)


def says_in_use(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE or "address already in use" in str(error)


def describe_owner(port: int) -> str:
    """The process that listens at a port, as ` (flambeau serve m.py, pid 7)`; empty if it belongs to another user."""
    inodes = {f"socket:[{inode}]" for inode in listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if not any(os.readlink(entry) in inodes for entry in (folder / "fd").iterdir()):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has exited, or belongs to another user
            continue
        return f" ({command[:MAX_COMMAND]}{'…' if len(command) > MAX_COMMAND else ''}, pid {folder.name})"
    return ""


def listening_inodes(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
        except OSError:
            continue
        yield from (row[9] for row in rows if row[3] == LISTENING and row[1].endswith(f":{port:04X}"))
