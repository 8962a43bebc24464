"""Job: one request in flight, from its arrival to the last part of its reply."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Protocol

from flambeau.errors import FlambeauError
from flambeau.metrics.traffic import RequestCounts
from flambeau.serving.scheduling.priorities import NORMAL
from flambeau.wire.messages import Kind, Part, Request, Shared
from flambeau.wire.shared import Segment

logger = logging.getLogger(__name__)

MAX_STATE_BYTES = 4 << 20  # of one job; a reply that needs more to go on cannot be resumed

_ids = itertools.count(1)


class Receiver(Protocol):
    """Whoever waits for a job: an HTTP exchange, a gRPC call, a test."""

    def on_parts(self, parts: list[Part]) -> None:
        """Take the next parts; one that is `last` ends the reply."""

    def on_error(self, error: FlambeauError) -> None:
        """The job failed; nothing follows."""


class Body:
    """What the client sent: bytes, or a shared segment that is given back when nobody reads it any more."""

    __slots__ = ("_give_back", "_readers", "content", "segment", "size_bytes")

    def __init__(self, content: bytes, segment: Segment | None = None, size_bytes: int = 0) -> None:
        self.content = content
        self.segment = segment
        self.size_bytes = size_bytes if segment else len(content)
        self._give_back: Callable[[Segment], None] | None = None
        self._readers = 1  # the job itself

    @classmethod
    def shared(cls, segment: Segment, size_bytes: int, give_back: Callable[[Segment], None]) -> Body:
        """A body that lies in shared memory."""
        body = cls(b"", segment, size_bytes)
        body._give_back = give_back
        return body

    def hold(self) -> None:
        """One more process may read the segment."""
        self._readers += 1

    def release(self) -> None:
        """One reader less; the last one gives the segment back."""
        self._readers -= 1
        if not self._readers and self.segment is not None and self._give_back is not None:
            self._give_back(self.segment)
            self.segment = None


class Job:
    """One request in flight. Exactly one of these ends it: its last part, an error, or `cancel`."""

    __slots__ = (
        "arrived",
        "body",
        "crashes",
        "envelope",
        "expiry",
        "fields",
        "headers",
        "id",
        "is_alone",
        "is_over",
        "is_suspect",
        "kind",
        "on_cancel",
        "priority",
        "query",
        "receiver",
        "request_id",
        "started",
        "state",
        "state_bytes",
        "url_path",
        "usage",
    )

    def __init__(
        self,
        receiver: Receiver,
        *,
        request_id: str,
        headers: list[tuple[str, str]],
        body: Body,
        arrived: float,
        kind: Kind = "predict",
        url_path: str = "",
        query: str = "",
        envelope: str = "",
        fields: list[tuple[str, int]] | None = None,
    ) -> None:
        self.id = next(_ids)
        self.receiver = receiver
        self.request_id = request_id
        self.headers = headers
        self.body = body
        self.arrived = arrived
        self.kind: Kind = kind
        self.url_path = url_path
        self.query = query
        self.envelope = envelope
        self.fields = fields  # None: the body is one value
        self.crashes = 0  # workers that died while they held it
        self.is_suspect = False  # it may have been the reason, and is run alone
        self.is_alone = kind != "predict"  # handlers explain and describe one request at a time
        self.is_over = False
        self.started = False  # a part of the reply has gone out
        self.state: list[bytes] | None = None  # what another worker needs to go on with the reply; None: it cannot
        self.state_bytes = 0
        self.on_cancel: Callable[[Job], None] | None = None  # whoever holds it: the queue or a worker
        self.expiry: asyncio.TimerHandle | None = None
        self.priority = NORMAL
        self.usage: RequestCounts | None = None  # what it is counted under, from the moment a model has it

    def renew_id(self) -> None:
        """Take a new id, so that nothing said about the old one concerns this job any more."""
        self.id = next(_ids)

    def to_request(self, *, share: bool) -> Request:
        """The job as a worker sees it."""
        body = self.body
        content: bytes | Shared = body.content
        if body.segment is not None:
            size = body.size_bytes
            content = body.segment.describe(size) if share else body.segment.memory[:size]
        return Request(
            self.id,
            self.request_id,
            self.headers,
            content,
            self.kind,
            self.url_path,
            self.query,
            self.envelope,
            self.fields,
            self.state or [],
        )

    @property
    def can_go_on(self) -> bool:
        """Whether another worker can have it: nothing of the reply has gone out, or all that matters of it is kept."""
        return not self.started or self.state is not None

    def keep_state(self, parts: list[Part]) -> None:
        """Keep what the worker says of its state; a reply of which it says nothing, or too much, cannot go on."""
        if self.started and self.state is None:
            return
        self.state = self.state or []
        for part in parts:
            self.state_bytes += len(part.state)
            if not part.state or self.state_bytes > MAX_STATE_BYTES:
                self.state = None
                return
            self.state.append(part.state)

    def deliver(self, parts: list[Part]) -> None:
        """Pass parts on; after the last one the job is over."""
        if self.is_over:
            return
        if parts[-1].last:
            self._end()
        self.started = True
        self.receiver.on_parts(parts)

    def fail(self, error: FlambeauError) -> None:
        """End the job with an error."""
        if not self.is_over:
            self._end()
            self.tell(error)

    def expire(self, error: FlambeauError) -> None:
        """It has waited too long: whoever waits is told, and nobody works on it any more."""
        if not self.is_over:
            self.cancel()
            self.tell(error)

    def tell(self, error: FlambeauError) -> None:
        """Tell the receiver of an error; its own mistake in that must not cost other jobs, nor a worker."""
        try:
            self.receiver.on_error(error)
        except Exception:
            logger.exception("request %s: its error could not be delivered", self.request_id)

    def cancel(self) -> None:
        """Nobody waits any more: leave the queue, or tell the worker."""
        if not self.is_over:
            self._end()
            if self.on_cancel is not None:
                self.on_cancel(self)

    def _end(self) -> None:
        self.is_over = True
        self.body.release()
        if self.expiry is not None:
            self.expiry.cancel()
