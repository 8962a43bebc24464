"""Watchdog: runs a model's periodic checks. LivenessCheck: ends stalled and oversized workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from flambeau.config.model import ModelConfig
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents
from flambeau.serving.workers.host_resources import family_bytes
from flambeau.serving.workers.pool import WorkerPool
from flambeau.serving.workers.remote_worker import RemoteWorker

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
FAMILIES_INTERVAL_S = 0.5
RAISE_IT = "raise responseTimeout in model-config.yaml, if a request may take that long"


class Watchdog:
    """Calls every check ten times a second. A check that raises stops neither the others nor the next round."""

    def __init__(
        self,
        name: str,
        checks: Sequence[Callable[[], None]],
        slow_checks: Sequence[tuple[Callable[[], Awaitable[None]], float]] = (),
    ) -> None:
        self._name = name
        self._checks = checks
        self._slow_checks = slow_checks  # run beside them, each at its own interval in seconds
        self._problems: dict[int, str] = {}  # check → its last exception, so that each is logged once
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, unless it runs already."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, (slow_check, interval_s) in enumerate(self._slow_checks, 1):
                tasks.create_task(self._run_slow(-number, slow_check, interval_s))
            while True:
                await asyncio.sleep(INTERVAL_S)
                self.tick()

    async def _run_slow(self, number: int, check: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await check()
                self._problems.pop(number, None)
            except Exception as error:
                self._report(number, error)

    def tick(self) -> None:
        for i, check in enumerate(self._checks):
            try:
                check()
                self._problems.pop(i, None)
            except Exception as error:
                self._report(i, error)

    def _report(self, check: int, error: Exception) -> None:
        if self._problems.get(check) != repr(error):
            logger.exception("%s: a periodic check failed", self._name)
        self._problems[check] = repr(error)


class LivenessCheck:
    """Ends workers that exceed responseTimeout or workerMemoryLimitMb."""

    def __init__(self, pool: WorkerPool, config: ModelConfig, events: ServerEvents) -> None:
        self._pool = pool
        self._timeout_s = config.response_timeout_s
        self._memory_limit_mb = config.memory_limit_mb
        self._events = events

    def tick(self) -> None:
        for worker in [*self._pool.workers]:
            self._check(worker)

    def _check(self, worker: RemoteWorker) -> None:
        timeout_s, limit_mb = self._timeout_s, self._memory_limit_mb
        if worker.seconds_silent() > timeout_s:
            if not worker.is_ending:
                self._on_stalled(worker)
        elif limit_mb is not None and (used := worker.resident_bytes) > limit_mb << 20:
            self._on_oversized(worker, used, "")

    def _on_stalled(self, worker: RemoteWorker) -> None:
        timeout_s = self._timeout_s
        worker.blame_silent(timeout_s)
        self._events.worker_stalled(worker.spec.ref, timeout_s, self._failures_of(worker))
        reason = f"no answer within responseTimeout, {timeout_s:g} s"
        worker.kill_with_stacks(WorkerExit(reason=reason, last_lines=(RAISE_IT,)))

    async def check_families(self) -> None:
        """End workers that exceed workerMemoryLimitMb together with the processes they have started."""
        if (limit_mb := self._memory_limit_mb) is None:
            return
        for worker in [*self._pool.workers]:
            used = await asyncio.to_thread(family_bytes, worker.local_pids, limit_mb << 20)
            if used > limit_mb << 20:
                self._on_oversized(worker, used, " with its children")

    def _on_oversized(self, worker: RemoteWorker, used: int, whose: str) -> None:
        reason = f"it used {used >> 20} MB of memory{whose}; workerMemoryLimitMb is {self._memory_limit_mb}"
        worker.kill(WorkerExit(reason=reason, out_of_memory=True))

    def _failures_of(self, worker: RemoteWorker) -> int:
        """Failures in a row, with this one."""
        if worker.has_answered:
            return 1
        return 1 + sum(slot.failures for slot in self._pool.slots if slot.worker is worker)
