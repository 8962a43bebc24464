"""Job: one request in flight, from its arrival to the last part of its reply. Priorities and time limits of jobs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from flambeau.errors import BadRequest, FlambeauError
from flambeau.metrics.traffic import RequestCounts
from flambeau.serving.job_times import JobTimes
from flambeau.serving.slow_requests import Explanation
from flambeau.serving.tenants import Tenant
from flambeau.wire.messages import GenerationWork, Kind, Part, Request, Shared
from flambeau.wire.shared_memory import Segment

logger = logging.getLogger(__name__)

MAX_STATE_BYTES = 4 << 20  # of one job; a reply with more state cannot be resumed

_ids = itertools.count(1)
PRIORITY_HEADER = "x-flambeau-priority"
TIMEOUT_HEADER = "x-flambeau-timeout"
MAX_TIMEOUT_S = 1e6
HIGH, NORMAL, LOW = range(3)
PRIORITIES = ("high", "normal", "low")
# A waiting priority gets at least every ninth place: it is slowed down, never starved.
MAX_PASSED_OVER = 8
_PRIORITY_HEADER_SIZE = len(PRIORITY_HEADER)


class Receiver(Protocol):
    """Takes the reply of a job: an HTTP exchange, a gRPC call, a test."""

    def on_parts(self, parts: list[Part]) -> None:
        """Take the next parts; the part that is `last` ends the reply."""

    def on_error(self, error: FlambeauError) -> None:
        """The job failed; nothing follows."""


class JobHolder(Protocol):
    """The worker that a job was sent to."""

    def pause(self, job: Job, excess_bytes: int) -> None:
        """Produce no more of the reply until its client has read `excess_bytes`."""

    def resume(self, job: Job) -> None: ...

    def explain(self, job: Job, status: int) -> Explanation | None:
        """Where the time of a job went; None if it is not known."""


class JobObserver(Protocol):
    """Follows a job whose request is traced."""

    @property
    def trace_id(self) -> str: ...

    def sent(self, job: Job, worker: str, jobs: Sequence[Job]) -> None:
        """The job is about to be sent to a worker, with these jobs as one batch."""

    def failed(self, error: FlambeauError) -> None: ...

    def ended(self, job: Job) -> None: ...


class Awaited(Protocol):
    """What others wait for until the job is over."""

    def end(self) -> None:
        """The job is over."""

    def abandon(self) -> None:
        """The job goes on elsewhere."""


class RequestBody:
    """A request's content: bytes, or a shared segment that is returned to its pool after its last reader."""

    __slots__ = ("_give_back", "_readers", "content", "segment", "size_bytes")

    def __init__(self, content: bytes, segment: Segment | None = None, size_bytes: int = 0) -> None:
        self.content = content
        self.segment = segment
        self.size_bytes = size_bytes if segment else len(content)
        self._give_back: Callable[[Segment], None] | None = None
        self._readers = 1  # the job itself

    @classmethod
    def shared(cls, segment: Segment, size_bytes: int, give_back: Callable[[Segment], None]) -> RequestBody:
        """A body in shared memory."""
        body = cls(b"", segment, size_bytes)
        body._give_back = give_back
        return body

    def hold(self) -> None:
        """Add a reader; each calls `release` once."""
        self._readers += 1

    def release(self) -> None:
        self._readers -= 1
        if not self._readers and self.segment is not None and self._give_back is not None:
            self._give_back(self.segment)
            self.segment = None


class Job:
    """One request in flight. Exactly one of these ends it: its last part, an error, or `cancel`."""

    __slots__ = (
        "arrived",
        "body",
        "cache_key",
        "computation",
        "crashes",
        "envelope",
        "estimated_tokens",
        "expiry",
        "fields",
        "flow",
        "headers",
        "id",
        "is_alone",
        "is_copy",
        "is_over",
        "is_suspect",
        "kind",
        "move",
        "on_cancel",
        "priority",
        "query",
        "receiver",
        "request_id",
        "retried",
        "started",
        "state",
        "state_bytes",
        "tenant",
        "timeout_s",
        "times",
        "trace",
        "url_path",
        "usage",
    )

    def __init__(
        self,
        receiver: Receiver,
        *,
        request_id: str,
        headers: list[tuple[str, str]],
        body: RequestBody,
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
        self.crashes = 0  # workers that crashed while they held it
        self.is_suspect = False  # it may have caused a crash, so it runs alone
        self.is_alone = kind != "predict"  # handlers explain and describe one request at a time
        self.is_over = False
        self.is_copy = False  # of a client's request, for another version
        self.started = False  # a part of the reply was sent to the client
        self.state: list[bytes] | None = None  # lets another worker resume the reply; None: it cannot
        self.state_bytes = 0
        self.on_cancel: Callable[[Job], None] | None = None  # set by its holder: the queue or a worker
        self.cache_key = b""  # of a request whose reply may be kept
        self.computation: Awaited | None = None  # in a cache that waits for its reply
        self.flow: JobHolder | None = None  # the worker it is sent to
        self.move: Callable[[Job], bool] | None = None  # offers it to another version, if this one loses its workers
        self.timeout_s: float | None = None  # how long its client waits, from its arrival
        self.expiry: asyncio.TimerHandle | None = None
        self.priority = NORMAL
        self.tenant: Tenant | None = None  # whose key the request has, once a model has accepted it
        self.estimated_tokens = 0  # of prompt and reply, as far as the request tells
        self.retried = 0.0  # when the last worker that did not answer it was lost
        self.times: JobTimes | None = None  # once a part of the reply has arrived
        self.trace: JobObserver | None = None  # if its request is traced
        self.usage: RequestCounts | None = None  # the counters of its model, once a model has accepted it

    def renew_id(self) -> None:
        """Take a new id, so that later messages about the old one do not reach this job."""
        self.id = next(_ids)

    def to_request(self, *, share: bool) -> Request:
        """The job as a message to a worker; with `share` a body in shared memory is passed by reference."""
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
            self.tenant.name if self.tenant is not None else "",
        )

    @property
    def log_fields(self) -> dict[str, str]:
        """The `extra` of log records about this job."""
        return {"request_id": self.request_id, "trace_id": self.trace.trace_id if self.trace is not None else ""}

    @property
    def can_resume(self) -> bool:
        """Whether another worker can continue it: nothing was sent to the client, or the reply's state is kept."""
        return not self.started or self.state is not None

    def keep_state(self, parts: list[Part]) -> None:
        """Keep the state of a reply; a reply with a part without state, or with too much, cannot be resumed."""
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
        """Pass parts to the receiver; the last one ends the job."""
        if self.is_over:
            return
        if parts[-1].last:
            work = parts[-1].work
            self._end(None if work is None else work.generation)
        self.started = True
        self.receiver.on_parts(parts)

    def fail(self, error: FlambeauError) -> None:
        """End the job with an error."""
        if not self.is_over:
            self._end()
            self.report(error)

    def expire(self, error: FlambeauError) -> None:
        """End the job with an error and cancel it in the queue or worker."""
        if not self.is_over:
            self.cancel()
            self.report(error)

    def report(self, error: FlambeauError) -> None:
        """Pass an error to the receiver. An exception in the receiver is logged: other jobs must not suffer."""
        if self.trace is not None:
            self.trace.failed(error)
        try:
            self.receiver.on_error(error)
        except Exception:
            text = "request %s: the receiver failed to take an error"
            logger.exception(text, self.request_id, extra=self.log_fields)

    def cancel(self) -> None:
        """End the job without a reply; remove it from the queue or cancel it in the worker."""
        if not self.is_over:
            self._end()
            if self.on_cancel is not None:
                self.on_cancel(self)

    def pause(self, excess_bytes: int) -> None:
        """Produce no more of the reply: its client does not read."""
        if self.flow is not None and not self.is_over:
            self.flow.pause(self, excess_bytes)

    def resume(self) -> None:
        """The client reads again."""
        if self.flow is not None and not self.is_over:
            self.flow.resume(self)

    def explain(self, status: int) -> Explanation | None:
        """Where its time went until now; None if no worker has answered it."""
        return None if self.flow is None else self.flow.explain(self, status)

    def _end(self, made: GenerationWork | None = None) -> None:
        self.is_over = True
        if self.tenant is not None:
            self.tenant.release(self.estimated_tokens, made, time.monotonic(), is_used=self.started)
        self.body.release()
        if self.expiry is not None:
            self.expiry.cancel()
        if self.trace is not None:
            self.trace.ended(self)
        if self.computation is not None:
            self.computation.end()


class ReplyCollector:
    """A receiver that collects a job's whole reply in the future `done`."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []

    def on_parts(self, parts: list[Part]) -> None:
        self._parts += [part.body for part in parts]
        if parts[-1].last and not self.done.done():
            self.done.set_result(b"".join(self._parts))

    def on_error(self, error: FlambeauError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def priority_of(headers: Iterable[tuple[str, str]]) -> int:
    """The priority in a request's headers; raises BadRequest if it is unknown."""
    for name, value in headers:
        if len(name) == _PRIORITY_HEADER_SIZE and name.lower() == PRIORITY_HEADER:
            return priority_named(value)
    return NORMAL


def priority_named(name: str) -> int:
    try:
        return PRIORITIES.index(name.strip().lower())
    except ValueError:
        raise BadRequest(f"{PRIORITY_HEADER} is {name!r}; write one of: {', '.join(PRIORITIES)}") from None


def timeout_named(text: str) -> float:
    """The seconds that a request's header allows; raises BadRequest unless they are a number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= MAX_TIMEOUT_S:  # also of nan
        text = f"{TIMEOUT_HEADER} is {text!r}; write seconds, above 0 and at most {MAX_TIMEOUT_S:.0f}, such as 2.5"
        raise BadRequest(text)
    return seconds


def next_priority(is_waiting: Sequence[bool], passed_over: Sequence[int]) -> int:
    """The priority whose job leaves next: the highest with a job, unless a lower one was passed over too often.

    At least one priority must have a job.
    """
    candidates = [rank for rank in range(len(PRIORITIES)) if is_waiting[rank]]
    for rank in candidates:
        if passed_over[rank] >= MAX_PASSED_OVER:
            return rank
    return candidates[0]
