"""Listener: the limits of one port, and the state that its connections share; what all ports share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from flambeau.frontend.http.exchange import COMMON, Exchange
from flambeau.logs.access_log import AccessLog
from flambeau.metrics.traffic import HostTraffic
from flambeau.serving.reply_budget import ReplyBudget
from flambeau.serving.workers.host_resources import return_free_memory
from flambeau.wire.shared_memory import SegmentPool

logger = logging.getLogger(__name__)

TURN_S = 0.002  # how long pipelined requests are answered in a turn of the event loop
HANDSHAKE_GRACE_S = 1.0  # how long a draining server waits for a client that started a handshake
LOG_EVERY_S = 10.0  # a flood of connections is no flood of log lines


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may send, and how long it may take."""

    max_body_bytes: int
    share_from_bytes: int
    keep_alive_s: float
    read_timeout_s: float
    response_timeout_s: float = 60.0  # to read a part of a response
    max_unfinished_bytes: int = 1 << 60  # of large bodies that are still arriving, in total


class HttpApp(Protocol):
    """Responds to exchanges."""

    def handle(self, exchange: Exchange) -> None:
        """Respond now, or later from a task of the exchange."""

    def upgrade(self, exchange: Exchange) -> bool:
        """Respond to a request for another protocol; False: it is an ordinary request here."""

    def admit(self, exchange: Exchange) -> None:
        """Raise the error that rejects a request before its body has arrived."""

    def reject(self, exchange: Exchange, error: Exception) -> None:
        """Respond to a request that is not admitted."""

    def too_large(self, exchange: Exchange, limit: int) -> None:
        """Respond to a request whose body is over the limit."""

    def malformed(self, exchange: Exchange, reason: str) -> None:
        """Respond to bytes that are not HTTP."""


class ListenerConnection(Protocol):
    """The part of a connection that its listener needs."""

    unfinished_bytes: int

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def since(self) -> float:
        """When it last made progress."""

    def uncount(self) -> None:
        """Stop counting its unfinished body."""

    def abort(self) -> None: ...

    def cut(self, reason: str) -> None:
        """Close at once: the client does not read."""

    def close_if_idle(self) -> None: ...

    def close_if_stale(self, now: float) -> None: ...


class WaitingConnection(Protocol):
    """A connection with pipelined requests."""

    def answer_next(self) -> None:
        """Handle the first of them."""


class MessageConnection(Protocol):
    """A WebSocket whose messages are held until a model takes them."""

    def give_up(self, reason: str) -> None:
        """Close, and say why."""


class TurnQueue:
    """Connections with pipelined requests. One after another answers one, for a bounded time per turn of the loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connections: deque[WaitingConnection] = deque()
        self._is_scheduled = False

    def add(self, connection: WaitingConnection) -> None:
        self._connections.append(connection)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        connections = self._connections
        end = self._clock() + TURN_S
        try:
            while connections:
                connections.popleft().answer_next()
                if self._clock() >= end:
                    break
        finally:
            self._is_scheduled = bool(connections)
            if connections:
                asyncio.get_running_loop().call_soon(self._run)


class AddressCounts:
    """Counts the open connections of each client address, on all ports."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()
        self._logged_at = -LOG_EVERY_S

    def add(self, address: str) -> str:
        """Count a connection; returns why it is refused, or nothing. Clients of unix sockets have no address."""
        if not address:
            return ""
        self._counts[address] += 1
        if self._counts[address] <= self._limit:
            return ""
        if (now := time.monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "%s has %d connections, and max_connections_per_address is %d: more are refused. Raise it if the "
                "address is that of a proxy",
                address,
                self._limit,
                self._limit,
            )
        return f"There are {self._limit} connections from {address}; max_connections_per_address sets this limit."

    def remove(self, address: str) -> None:
        self._counts[address] -= 1
        if self._counts[address] <= 0:
            del self._counts[address]


def address_of(peer: Any) -> str:
    """The address of a client without its port; empty for clients of unix sockets."""
    return str(peer[0]) if isinstance(peer, tuple) else ""


class ConnectionRoom:
    """How many connections all ports may have together. Each has a reserve that the others cannot take."""

    def __init__(self, max_connections: int = 1 << 30, *, num_ports: int = 1) -> None:
        self.max_connections = max_connections
        self._reserve = max_connections // 20 if num_ports > 1 else 0
        self._shared = max(1, max_connections - num_ports * self._reserve)
        self._logged_at = -LOG_EVERY_S
        self.listeners: list[Listener] = []

    @property
    def refusal(self) -> str:
        return f"The server has {self.max_connections} connections; its limit of open files allows no more."

    def is_full_for(self, listener: Listener) -> bool:
        """Whether a port has more connections than it may have now."""
        reserve = self._reserve
        if listener.num_connections <= reserve:
            return False
        listeners = self.listeners or [listener]
        return sum(max(0, each.num_connections - reserve) for each in listeners) > self._shared

    def make_room(self, listener: Listener, newest: object) -> bool:
        """Close some idle connections, but not the newest, of the port that has the most; False if it has none."""
        largest = max(self.listeners or [listener], key=lambda each: each.num_connections)
        num_closed = largest.make_room(newest)
        if (now := time.monotonic()) - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "too many connections: the limit of open files allows %d in all; %s. "
                "Raise the limit (ulimit -n, LimitNOFILE=) before the server starts",
                self.max_connections,
                "the longest idle ones are closed" if num_closed else "all are in use, and more are refused",
            )
        return num_closed > 0


class Handshake(Protocol):
    """A TLS client that is connected, but has not finished its handshake."""

    def cancel(self) -> object: ...


# Existing monitoring may count failures of /ping, so it is not here.
PROBES = frozenset({"/livez", "/readyz", "/startupz", "/v2/health/live", "/v2/health/ready"})


@dataclass(slots=True, eq=False)
class Listener:
    """The state that the connections of one port share."""

    app: HttpApp
    limits: HttpLimits
    segments: SegmentPool | None
    common: bytes = COMMON  # header lines of every response
    traffic: HostTraffic = field(default_factory=HostTraffic)
    access_log: AccessLog | None = None
    probes: frozenset[str] = PROBES  # paths whose failures are not counted as failed requests
    connections: set[ListenerConnection] = field(default_factory=set)
    handshakes: dict[Handshake, float] = field(default_factory=dict)  # of TLS clients, with their start, oldest first
    turns: TurnQueue = field(default_factory=TurnQueue)
    room: ConnectionRoom = field(default_factory=ConnectionRoom)
    addresses: AddressCounts | None = None
    num_refused: int = 0  # lately, with a response
    is_draining: bool = False
    unread: ReplyBudget[ListenerConnection] = field(default_factory=ReplyBudget)
    messages: ReplyBudget[MessageConnection] = field(default_factory=ReplyBudget)  # of WebSockets, not submitted yet
    logged_at: float = -LOG_EVERY_S  # that these were too many, by the loop's clock
    unfinished_bytes: int = 0  # of large bodies: announced, or received if the size is not announced

    @property
    def num_connections(self) -> int:
        return len(self.connections) + len(self.handshakes)

    def is_busy(self, now: float) -> bool:
        """Whether a request is being received or answered, or is announced by a handshake that goes on."""
        return any(now - since < HANDSHAKE_GRACE_S for since in self.handshakes.values()) or any(
            connection.is_busy for connection in self.connections
        )

    def make_room(self, newest: object = None) -> int:
        """Close a tenth of the handshakes, the oldest first, or of the connections, the longest idle first."""
        handshakes = [each for each in self.handshakes if each is not newest]
        if handshakes:
            oldest = handshakes[: (len(handshakes) + 9) // 10]
            for handshake in oldest:
                del self.handshakes[handshake]
                handshake.cancel()
            return len(oldest)
        idle = [each for each in self.connections if each.is_idle and each is not newest]
        idle.sort(key=lambda connection: connection.since)
        closed = idle[: (len(idle) + 9) // 10]
        for connection in closed:
            connection.abort()
        return len(closed)

    def forget_refused(self) -> None:
        self.num_refused -= 1

    def shed_load(self, newest: ListenerConnection) -> None:
        """Close connections whose bodies have not grown for the longest time, until the total is below the limit."""
        logger.warning("too many large bodies are arriving; the slowest connections are closed")
        enough = self.limits.max_unfinished_bytes * 9 // 10
        arriving = (c for c in self.connections if c.unfinished_bytes and c is not newest)
        for connection in sorted(arriving, key=lambda connection: connection.since):
            if self.unfinished_bytes <= enough:
                return
            connection.uncount()
            connection.abort()

    def sweep(self, now: float) -> None:
        """Close connections that have been idle, or within a request, for too long."""
        for connection in [*self.connections]:
            connection.close_if_stale(now)
        patience_s = self.limits.response_timeout_s
        for connection in self.unread.stalled(now, patience_s):
            connection.cut(f"did not read its response for {patience_s:g} s (response_read_timeout)")
        is_drained = self.unread.take_drained()
        if self.messages.take_drained() or is_drained:
            return_free_memory()

    def cut_greedy(self, now: float) -> None:
        """Close the connections that hold the most of all unread responses, if these are too many."""
        for connection in self.unread.to_cut(now):
            connection.cut("does not read its response, and too much is held for such clients")

    def close_largest(self, now: float) -> None:
        """Close the WebSockets that hold the most of all messages, if these are too many."""
        if now - self.logged_at >= LOG_EVERY_S:
            self.logged_at = now
            logger.warning("WebSocket messages that arrive or wait hold too much; the largest are closed (1013)")
        for connection in self.messages.to_cut(now):
            connection.give_up("too much is arriving in messages of all clients; try again later")
