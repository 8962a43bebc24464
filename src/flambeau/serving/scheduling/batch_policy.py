"""When a batch leaves and how many batches a worker gets in advance. Pure decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

# A worker this fast waits for its next batch as long as it works on one, so it gets several in advance. A slower one
# gets its next batch when it is done: no job waits behind another while a second worker is idle. A model's only
# worker gets one in advance, since no other worker could take it.
FAST_S = 0.002
MAX_IN_FLIGHT_FAST = 4
MAX_IN_FLIGHT_ALONE = 2
# Of the places of a model that generates, one in so many is kept for other tenants of the last minute.
KEPT_SHARE = 8
RECENT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How many jobs leave together, and how long the first may wait for more (None: not at all).

    `concurrency` is how many jobs a concurrent worker holds.
    """

    size: int = 1
    delay_s: float | None = None
    concurrency: int = 64


class Capacity(Protocol):
    """The part of a worker that tells whether it can take a job."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_retiring(self) -> bool: ...

    @property
    def is_concurrent(self) -> bool: ...

    @property
    def places(self) -> int: ...

    @property
    def num_batches(self) -> int: ...


def free_places(worker: Capacity, limits: BatchLimits) -> int:
    """How many jobs a worker would begin at once: a batch when it is idle, or the free places of a running batch."""
    if not worker.is_ready or worker.is_retiring:
        return 0
    if worker.is_concurrent:
        return max(0, (worker.places or limits.concurrency) - worker.num_batches)
    return 0 if worker.num_batches else limits.size


def wait_s(num_waiting: int, oldest_age_s: float, limits: BatchLimits) -> float:
    """How long an idle worker should still wait for a fuller batch; 0 or less: send now."""
    if limits.delay_s is None or num_waiting >= limits.size:
        return 0.0
    return limits.delay_s - oldest_age_s


def may_send_ahead(
    num_waiting: int,
    num_in_flight: int,
    service_s: float | None,
    limits: BatchLimits,
    *,
    is_only_worker: bool,
    depth: int = 1,
) -> bool:
    """Whether a busy worker may get one more full batch: if it is fast, alone, or works on several."""
    if num_waiting < limits.size:
        return False
    is_fast = service_s is not None and service_s < FAST_S
    return num_in_flight < max(depth, MAX_IN_FLIGHT_FAST if is_fast else MAX_IN_FLIGHT_ALONE if is_only_worker else 1)


def held_tenants(
    num_places: int, running: Mapping[str, int], last_arrivals: Mapping[str, float], now: float
) -> set[str]:
    """Tenants that get no more places: those that would leave none for other tenants of the last minute.

    So a request of another tenant need not wait until one of theirs is over. The last places are for tenants that have
    none, as long as there is one.
    """
    recent = {name for name, arrival in last_arrivals.items() if now - arrival < RECENT_S}
    if len(recent) < 2 or num_places < 2:
        return set()
    most = num_places - max(1, num_places // KEPT_SHARE)
    if sum(running.values()) >= most and not all(running.get(name) for name in recent):
        return {name for name, number in running.items() if number}
    return {name for name, number in running.items() if number >= most}
