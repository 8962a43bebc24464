"""JobTimes: when things happened to a job; `spans_of` turns them into named parts that add up to the whole."""

from __future__ import annotations

from msgspec import Struct

from flambeau.wire.messages import Work

# A worker's clock is not comparable if it is off by more than this, in a time namespace of its own, say.
CLOCK_TOLERANCE_S = 0.001

Span = tuple[str, float, float]  # name, when it began on the monotonic clock, seconds


class JobTimes(Struct, frozen=True, gc=False):
    """Points in time of the monotonic clock, in seconds; 0.0: it did not happen.

    A job has one when the first part of its reply arrives, and a complete one with the last part.
    """

    arrived: float
    sent: float  # to the worker that answers
    started: float  # when that worker could begin: when it was sent, or when the batch before it was done
    received: float  # the part of the reply that this belongs to
    worker: str
    batch_size: int
    work: Work | None = None  # None: unknown, or the reply is not complete
    held_since: float = 0.0  # a worker was free from then on, and the batch waited for more jobs
    first_part: float = 0.0  # of a streamed reply
    retried: float = 0.0  # when the last of the workers that did not answer was lost

    @property
    def total_s(self) -> float:
        return self.received - self.arrived

    @property
    def queue_s(self) -> float:
        """Until a worker could begin, without the wait for a fuller batch."""
        return self.left_queue - max(self.arrived, self.retried)

    @property
    def left_queue(self) -> float:
        """When the job had no longer to wait for a worker."""
        since = max(self.arrived, self.retried)
        end = self.started
        if self.held_since:
            end = self.held_since
        elif self.work is not None and self.sent <= self.work.began < end:
            end = self.work.began  # the worker began before the server had read its reply to the batch before
        return max(since, end)

    @property
    def batch_wait_s(self) -> float:
        return max(0.0, self.sent - self.left_queue) if self.held_since else 0.0


def spans_of(times: JobTimes) -> list[Span]:
    """The parts of a job's time in order; each begins where the one before ends, and they end with `received`."""
    spans: list[Span] = []
    at = times.arrived
    for name, end in points_of(times):
        end = min(max(end, at), times.received)
        if end > at:
            spans.append((name, at, end - at))
            at = end
    if at < times.received:
        spans.append(("to_server" if times.work is not None else "worker", at, times.received - at))
    return spans


def points_of(times: JobTimes) -> list[tuple[str, float]]:
    """The parts with the time that each ends, as far as known."""
    points = [("lost", times.retried), ("queue", times.left_queue)]
    if times.held_since:
        points.append(("batch_wait", times.sent))
    work = times.work
    if work is None:
        return points
    began = work.began
    if not is_comparable(times, work):  # how the time of both transfers divides is not known
        spent = times.received - (times.sent if times.held_since else times.left_queue)
        began = times.received - min(spent, work.ended - work.began)
        points.append(("transfer", began))
    else:
        points.append(("to_worker", began))
    at = began + work.read_s
    points.append(("read", at))
    if work.generation is not None:
        points.append(("first_token", at + work.generation.first_token_s))
        points.append(("generate", at + work.handler_s))
        return points
    stages = stages_of(work)
    if stages is not None:
        for name, seconds in zip(("preprocess", "inference", "postprocess"), stages, strict=True):
            at += seconds
            points.append((name, at))
    points.append(("handler", began + work.read_s + work.handler_s))
    points.append(("reply", began + work.ended - work.began))
    return points


def is_comparable(times: JobTimes, work: Work) -> bool:
    return work.began >= times.sent - CLOCK_TOLERANCE_S and work.ended <= times.received + CLOCK_TOLERANCE_S


def stages_of(work: Work) -> tuple[float, float, float] | None:
    """The seconds of preprocess, inference and postprocess; None if unknown, or if they ran side by side."""
    stages = work.stages
    return stages if stages is not None and sum(stages) <= work.handler_s * 1.001 else None
