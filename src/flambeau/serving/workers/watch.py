"""Watch: looks after a model's workers every now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flambeau.config.model import ModelConfig
from flambeau.serving.workers.memory import resident_bytes_of
from flambeau.serving.workers.recovery import Death
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.supervisor import Supervisor

logger = logging.getLogger(__name__)

CHECK_S = 0.1  # how often stalled workers are looked for


class Watch:
    """Ends workers that are silent or take too much memory; whoever else wants to look is called, too."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        supervisor: Supervisor,
        workers: list[RemoteWorker],
        others: tuple[Callable[[], None], ...],
    ) -> None:
        self._name = name
        self._timeout_s = config.response_timeout_s
        self._memory_limit_mb = config.memory_limit_mb
        self._supervisor = supervisor
        self._workers = workers
        self._looks = (self._check_workers, *others)
        self._problems: dict[int, str] = {}  # which look failed, and how; said once, not ten times a second
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on; one that has come to an end begins again."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.look()

    def look(self) -> None:
        """Look once at everything; a mistake in one look costs neither the others nor the next."""
        for i, look in enumerate(self._looks):
            try:
                look()
                self._problems.pop(i, None)
            except Exception as error:
                if self._problems.get(i) != repr(error):
                    logger.exception("%s could not be looked after", self._name)
                self._problems[i] = repr(error)

    def _check_workers(self) -> None:
        for worker in [*self._workers]:
            self._check(worker)

    def _check(self, worker: RemoteWorker) -> None:
        timeout, limit_mb = self._timeout_s, self._memory_limit_mb
        if worker.seconds_without_progress() > timeout:
            logger.error("Backend worker did not respond in given time: worker %d of %s", worker.spec.id, self._name)
            worker.blame_silent(timeout)
            logger.error("Number or consecutive unsuccessful inference %d", self._failures_of(worker))
            worker.kill(Death(reason=f"no answer within responseTimeout, {timeout:g} s"))
        elif limit_mb is not None and (used := resident_bytes_of(worker.pids)) > limit_mb << 20:
            reason = f"it used {used >> 20} MB of memory; workerMemoryLimitMb is {limit_mb}"
            worker.kill(Death(reason=reason, out_of_memory=True))

    def _failures_of(self, worker: RemoteWorker) -> int:
        if worker.has_answered:
            return 1
        return 1 + sum(slot.failures for slot in self._supervisor.slots if slot.worker is worker)
