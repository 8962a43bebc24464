"""Performance goals as data, and the comparison with measured values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workloads import MEMORY_REQUESTS

OURS = "flambeau"
RIVAL = "torchserve-tuned"

# peer → point → metric → median over the rounds
Medians = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One goal: a metric at a point, at least or at most `limit` times the peer's, or in its own unit."""

    title: str
    point: str
    metric: str
    unit: str
    sense: Literal["at least", "at most"]
    limit: float
    against: str | None = RIVAL


def _faster(title: str, point: str, limit: float, metric: str = "rps", unit: str = "requests/s") -> Goal:
    return Goal(title=title, point=point, metric=metric, unit=unit, sense="at least", limit=limit)


def _sooner(title: str, point: str, metric: str, limit: float) -> Goal:
    return Goal(title=title, point=point, metric=metric, unit="ms", sense="at most", limit=limit)


def _near_bare_loop(title: str, point: str) -> Goal:
    return Goal(
        title=title,
        point=point,
        metric="of_bare_loop",
        unit="of it",
        sense="at least",
        limit=0.97,
        against=None,
    )


def _below(title: str, point: str, metric: str, unit: str, limit: float) -> Goal:
    return Goal(title=title, point=point, metric=metric, unit=unit, sense="at most", limit=limit, against=None)


GOALS: tuple[Goal, ...] = (
    _faster("W1 echo, 64 clients", "W1 c=64", 4),
    _sooner("W1 echo, one client, median latency", "W1 c=1", "p50_ms", 0.6),
    _faster("W2 echo in batches of 32, 256 clients", "W2 c=256", 1.4),
    _faster("W3 small network, batch 1", "W3 b1 c=64", 1.6),
    _faster("W3 small network, batch 16", "W3 b16 c=64", 1.3),
    _faster("W4 bodies of 1 MB", "W4 1MB c=4", 1.8),
    _faster("W4 bodies of 10 MB", "W4 10MB c=4", 1.8),
    _faster("W5 pictures, 1 worker", "W5 w1 c=8", 1.0),
    _faster("W5 pictures, 2 workers", "W5 w2 c=8", 1.0),
    _near_bare_loop("W5 pictures, 1 worker, next to a bare loop", "W5 w1 c=8"),
    _near_bare_loop("W5 pictures, 2 workers, next to 2 bare loops", "W5 w2 c=8"),
    _faster("W6 streaming, 16 clients", "W6 c=16", 4, "chunks_per_s", "chunks/s"),
    _sooner("W6 time to first chunk", "W6 stream", "first_chunk_ms", 0.5),
    _below("W6 answers with a chunk missing or out of order", "W6 stream", "bad_answers", "", 0),
    # Half of the pause between chunks: beyond it, chunks might arrive in pairs.
    _below("W6 slow stream, longest delay of a chunk", "W6 stream", "slow_delay_ms", "ms", 10),
    _below("Start to listening", "start", "listening_s", "s", 0.4),
    _below("Start to first answer", "start", "first_answer_s", "s", 1.0),
    _below("Idle memory (RSS, server and worker)", "memory", "idle_rss_mb", "MB", 100),
    # "None": what allocators and lazy imports add once is allowed, what adds up is not.
    _below(f"Memory growth over {MEMORY_REQUESTS:,} requests", "memory", "growth_mb", "MB", 5),
)


def judge(goal: Goal, medians: Medians) -> dict[str, Any]:
    """The goal with Flambeau's value, the peer's, their ratio, and whether it is met (None: not measured)."""
    ours = medians.get(OURS, {}).get(goal.point, {})
    value = ours.get(goal.metric)
    # A goal in its own unit still shows the rival's value, for the record.
    rival = medians.get(goal.against or RIVAL, {}).get(goal.point, {}).get(goal.metric)
    ratio = value / rival if value is not None and rival else None
    judged = ratio if goal.against else value
    met = None
    if judged is not None:
        met = judged >= goal.limit if goal.sense == "at least" else judged <= goal.limit
        met = met and not ours.get("errors")
    return {
        "title": goal.title,
        "point": goal.point,
        "metric": goal.metric,
        "unit": goal.unit,
        "sense": goal.sense,
        "limit": goal.limit,
        "against": goal.against,
        "flambeau": value,
        "rival": rival,
        "ratio": None if ratio is None else round(ratio, 3),
        "met": met,
    }
