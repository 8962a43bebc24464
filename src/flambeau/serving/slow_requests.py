"""Explanation: where the time of one request went, as a document. SlowRequests: the slowest of the last hour."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from msgspec import UNSET, Struct, UnsetType

from flambeau.serving.job_times import JobTimes, Span, spans_of

MAX_SHARED = 64  # ids of other requests in an explanation
KEPT = 50  # requests of each interval
INTERVAL_S = 300.0
NUM_INTERVALS = 12  # an hour


class TimePart(Struct, frozen=True):
    """One part of a request's time; all together are the whole."""

    name: str
    ms: float


class MeanwhileEvent(Struct, frozen=True):
    """What else happened while a request was in the server."""

    what: str
    after_ms: float  # since the request arrived
    ms: float


class GenerationCounts(Struct, frozen=True):
    """What an engine did for a request."""

    first_token_ms: float  # since it reached the engine
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int


class Explanation(Struct, frozen=True, kw_only=True):
    """Where the time of a request went, who shared its batch, and what its worker did meanwhile."""

    request_id: str
    model: str
    version: str
    arrived: str  # ISO 8601, UTC
    status: int  # 0: its client has gone, or its time was up
    total_ms: float
    parts: list[TimePart]
    worker: str
    batch_size: int
    shared_with: list[str]  # request ids
    meanwhile: list[MeanwhileEvent]
    generation: GenerationCounts | UnsetType = UNSET


def explain(
    times: JobTimes,
    *,
    request_id: str,
    model: str,
    version: str,
    status: int,
    shared_with: Iterable[str] = (),
    loaded: Span | None = None,
    crashes: int = 0,
    now: float,
    wall_time: float,
) -> Explanation:
    """The explanation of a request; `loaded` is the last load of its worker, `now` and `wall_time` the same moment."""
    return Explanation(
        request_id=request_id,
        model=model,
        version=version,
        arrived=to_text(wall_time - (now - times.arrived)),
        status=status,
        total_ms=to_ms(times.total_s),
        parts=[TimePart(name, to_ms(seconds)) for name, _, seconds in spans_of(times)],
        worker=times.worker,
        batch_size=times.batch_size,
        shared_with=[*itertools.islice((each for each in shared_with if each != request_id), MAX_SHARED)],
        meanwhile=meanwhile(times, loaded, crashes),
        generation=generation_of(times),
    )


def meanwhile(times: JobTimes, loaded: Span | None, crashes: int) -> list[MeanwhileEvent]:
    found: list[Span] = []
    if crashes:
        plural = "s" if crashes > 1 else ""
        found.append((f"retry after {crashes} worker{plural} exited", times.arrived, times.retried - times.arrived))
    if loaded is not None:
        found.append(loaded)
    if times.work is not None:
        found += times.work.pauses or ()
        if times.work.generation is not None and (number := times.work.generation.num_preempted):
            found.append((f"preemption ({number} of its sequences)", times.work.began, 0.0))
    return [
        MeanwhileEvent(what, to_ms(max(0.0, began - times.arrived)), to_ms(seconds))
        for what, began, seconds in sorted(found, key=lambda span: span[1])
        if began + seconds >= times.arrived
    ]


def generation_of(times: JobTimes) -> GenerationCounts | UnsetType:
    made = None if times.work is None else times.work.generation
    if made is None:
        return UNSET
    return GenerationCounts(
        to_ms(made.first_token_s),
        made.num_prompt,
        made.num_cached,
        made.num_tokens,
        made.num_drafted,
        made.num_accepted,
        made.num_preempted,
    )


def to_ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def to_text(wall_time: float) -> str:
    return datetime.fromtimestamp(wall_time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class SlowRequests:
    """The slowest requests of a model in each interval of the last hour. Time is an argument.

    A request is worth an `add` if it took longer than `least_s`, or if `ends` has passed.
    """

    def __init__(self, *, kept: int = KEPT, interval_s: float = INTERVAL_S, num_intervals: int = NUM_INTERVALS) -> None:
        self.least_s = 0.0
        self.ends = 0.0  # of the current interval
        self._kept = kept
        self._interval_s = interval_s
        self._intervals: deque[tuple[float, list[tuple[float, int, Explanation]]]] = deque(maxlen=num_intervals)
        self._serials = itertools.count()  # of two requests that took the same time, the heap compares these

    def add(self, total_s: float, explanation: Explanation, now: float) -> None:
        """Keep a request if it is one of the slowest."""
        if now >= self.ends:
            self.ends = now + self._interval_s
            self.least_s = 0.0
            self._intervals.append((self.ends, []))
        heap = self._intervals[-1][1]
        entry = (total_s, next(self._serials), explanation)
        if len(heap) < self._kept:
            heapq.heappush(heap, entry)
        elif total_s > heap[0][0]:
            heapq.heapreplace(heap, entry)
        if len(heap) == self._kept:
            self.least_s = heap[0][0]

    def slowest(self, limit: int, now: float) -> list[tuple[float, Explanation]]:
        """The slowest of the last hour, the slowest first."""
        oldest = now - self._interval_s * (self._intervals.maxlen or 0)
        entries = [entry for ends, heap in self._intervals if ends > oldest for entry in heap]
        return [(total_s, explanation) for total_s, _, explanation in heapq.nlargest(limit, entries)]


def slowest_of(logs: Sequence[SlowRequests], limit: int, now: float | None = None) -> list[Explanation]:
    """The slowest requests of several models together."""
    now = time.monotonic() if now is None else now
    entries = [entry for log in logs for entry in log.slowest(limit, now)]
    entries.sort(key=lambda entry: -entry[0])
    return [explanation for _, explanation in entries[:limit]]
