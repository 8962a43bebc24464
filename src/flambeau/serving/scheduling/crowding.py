"""More workers than cores: whether they compute, so that running more of them at a time only makes all slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from flambeau.serving.scheduling.batching import smoothed

COMPUTES_FROM = 0.7  # of its busy time a worker that computes is running or would like to; one that waits is not
SLEEPS_BELOW = 0.3


class Busy(Protocol):
    """What is looked at of a worker."""

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def num_batches(self) -> int:
        """Batches it holds."""


class Crowd:
    """Looks at the busy workers of a model now and then, and says how many of them should be busy at a time."""

    def __init__(self, num_cores: int, read_cpu_s: Callable[[int], float | None] | None = None) -> None:
        self._num_cores = num_cores
        self._read_cpu_s = read_cpu_s or wanted_cpu_s
        self._seen: dict[int, tuple[float, float]] = {}  # pid → when it was busy, and its CPU time then
        self._share: float | None = None
        self.sleeping: frozenset[int] = frozenset()  # pids that are busy without computing

    @property
    def limit(self) -> int | None:
        """How many computing workers are enough; None: as many as there are."""
        return self._num_cores if self._share is not None and self._share >= COMPUTES_FROM else None

    def look(self, workers: Iterable[Busy], now: float | None = None) -> None:
        """Take note of what the workers that stayed busy since the last look have done meanwhile."""
        now = time.monotonic() if now is None else now
        seen, shares = {}, {}
        for worker in workers:
            cpu_s = self._read_cpu_s(worker.pid) if worker.num_batches else None
            if cpu_s is None:
                continue
            seen[worker.pid] = (now, cpu_s)
            if worker.pid in self._seen and now > self._seen[worker.pid][0]:
                began, before_s = self._seen[worker.pid]
                shares[worker.pid] = min(1.0, max(0.0, cpu_s - before_s) / (now - began))
        self._seen = seen
        self.sleeping = frozenset(pid for pid, share in shares.items() if share < SLEEPS_BELOW)
        for share in shares.values():
            self._share = smoothed(self._share, share)


def wanted_cpu_s(pid: int) -> float | None:
    """How long the main thread of a process has run or waited for a core; None where that cannot be told."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            ran_ns, waited_ns, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(ran_ns) + int(waited_ns)) / 1e9
