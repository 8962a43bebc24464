"""CpuContention: limits busy workers to the number of cores when they are CPU-bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from flambeau.serving.scheduling.batch_policy import smoothed

# Shares of its busy time in which a worker's main thread runs or waits for a core.
CPU_BOUND_FROM = 0.7
SLEEPING_BELOW = 0.3


class BusyWorker(Protocol):
    """The part of a worker that CPU contention needs."""

    @property
    def pid(self) -> int: ...

    @property
    def num_batches(self) -> int: ...


class CpuContention:
    """Samples the CPU time of a model's busy workers. `limit` is how many of them should be busy at a time."""

    def __init__(self, num_cores: int, read_cpu_s: Callable[[int], float | None] | None = None) -> None:
        self._num_cores = num_cores
        self._read_cpu_s = read_cpu_s or runnable_s
        self._samples: dict[int, tuple[float, float]] = {}  # pid → time of the sample, CPU time until then
        self._share: float | None = None
        self.sleeping: frozenset[int] = frozenset()  # pids that are busy without using a core

    @property
    def limit(self) -> int | None:
        """How many CPU-bound workers may be busy; None: no limit."""
        return self._num_cores if self._share is not None and self._share >= CPU_BOUND_FROM else None

    def sample(self, workers: Iterable[BusyWorker], now: float | None = None) -> None:
        """Measure the workers that have been busy since the last sample."""
        now = time.monotonic() if now is None else now
        samples, shares = {}, {}
        for worker in workers:
            cpu_s = self._read_cpu_s(worker.pid) if worker.num_batches else None
            if cpu_s is None:
                continue
            samples[worker.pid] = (now, cpu_s)
            if worker.pid in self._samples and now > self._samples[worker.pid][0]:
                before, cpu_s_before = self._samples[worker.pid]
                shares[worker.pid] = min(1.0, max(0.0, cpu_s - cpu_s_before) / (now - before))
        self._samples = samples
        self.sleeping = frozenset(pid for pid, share in shares.items() if share < SLEEPING_BELOW)
        for share in shares.values():
            self._share = smoothed(self._share, share)


def runnable_s(pid: int) -> float | None:
    """How long the main thread of a process has run or waited for a core; None if the kernel does not report it."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            ran_ns, waited_ns, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(ran_ns) + int(waited_ns)) / 1e9
