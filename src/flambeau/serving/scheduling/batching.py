"""When a batch leaves, and how far ahead a worker is fed; pure decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# A worker this quick spends as long waiting for its next batch as working on one, so a few are sent ahead.
# A slower one gets its next batch when it is done, so that no job waits behind a stranger while another worker
# is free; where there is no other worker, one batch ahead costs nobody anything and spares it the wait.
QUICK_S = 0.002
AHEAD_OF_QUICK = 4
AHEAD_OF_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How many jobs leave together, and how long the first may wait for company (None: not at all).

    `concurrency` is how many a worker holds that takes jobs one by one while it works on others.
    """

    size: int = 1
    delay_s: float | None = None
    concurrency: int = 64


class Taker(Protocol):
    """What has to be known of a worker to tell whether it can take a job."""

    is_ready: bool
    is_retiring: bool
    is_concurrent: bool
    places: int

    @property
    def num_batches(self) -> int:
        """Batches it holds."""


def free_places(worker: Taker, limits: BatchLimits) -> int:
    """How many jobs a worker would begin at once: a batch when it is idle, or what a running batch has room for."""
    if not worker.is_ready or worker.is_retiring:
        return 0
    if worker.is_concurrent:
        return max(0, (worker.places or limits.concurrency) - worker.num_batches)
    return 0 if worker.num_batches else limits.size


def wait_s(num_waiting: int, oldest_age_s: float, limits: BatchLimits) -> float:
    """How long an idle worker should still wait for a fuller batch; 0 or less means go."""
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
    """Whether a busy worker may get one more batch: a full one, if it is quick, the only one, or works on several."""
    if num_waiting < limits.size:
        return False
    is_quick = service_s is not None and service_s < QUICK_S
    return num_in_flight < max(depth, AHEAD_OF_QUICK if is_quick else AHEAD_OF_ONLY if is_only_worker else 1)


def smoothed(old: float | None, new: float) -> float:
    """A service time that follows slow-downs at once and speed-ups gradually."""
    return new if old is None or new > old * 8 else old + (new - old) * 0.1
