"""Listener: the limits of one port, and the state that its connections share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

from flambeau.frontend.http.exchange import COMMON, Exchange
from flambeau.logs.writer import AccessLog
from flambeau.metrics.traffic import HostTraffic
from flambeau.serving.reply_budget import ReplyBudget
from flambeau.serving.workers.host_resources import return_free_memory
from flambeau.wire.shared_memory import SegmentPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may send, and how long it may take."""

    max_body_bytes: int
    share_from_bytes: int
    keep_alive_s: float
    read_timeout_s: float
    response_timeout_s: float = 60.0  # to read a part of a response
    max_connections: int = 1 << 30
    max_unfinished_bytes: int = 1 << 60  # of large bodies that are still arriving, in total


class HttpApp(Protocol):
    """Responds to exchanges."""

    def handle(self, exchange: Exchange) -> None:
        """Respond now, or later from a task of the exchange."""

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


@dataclass(slots=True, eq=False)
class Listener:
    """The state that the connections of one port share."""

    app: HttpApp
    limits: HttpLimits
    segments: SegmentPool | None
    common: bytes = COMMON  # header lines of every response
    traffic: HostTraffic = field(default_factory=HostTraffic)
    access_log: AccessLog | None = None
    connections: set[ListenerConnection] = field(default_factory=set)
    is_draining: bool = False
    unread: ReplyBudget[ListenerConnection] = field(default_factory=ReplyBudget)
    unfinished_bytes: int = 0  # of large bodies: announced, or received if the size is not announced

    def make_room(self) -> None:
        """Close a tenth of the idle connections, the longest idle first."""
        idle = sorted((c for c in self.connections if c.is_idle), key=lambda connection: connection.since)
        logger.warning("too many connections (%d); the longest idle ones are closed", len(self.connections))
        for connection in idle[: 1 + len(idle) // 10]:
            connection.abort()

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

        if self.unread.take_drained():
            return_free_memory()

    def cut_greedy(self, now: float) -> None:
        """Close the connections that hold the most of all unread responses, if these are too many."""
        for connection in self.unread.to_cut(now):
            connection.cut("does not read its response, and too much is held for such clients")
