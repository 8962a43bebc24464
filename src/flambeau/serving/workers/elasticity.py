"""Elasticity: lets a model grow and shrink between its limits, fall asleep, and wake up when it is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flambeau.serving.scheduling.queue import JobQueue
from flambeau.serving.workers.autoscaling import Autoscaler, Limits, Sight, has_room
from flambeau.serving.workers.memory import available_bytes, resident_bytes_of
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.supervisor import Supervisor

logger = logging.getLogger(__name__)


class Elasticity:
    """What is done about the decisions of the autoscaler, for one model."""

    def __init__(
        self,
        name: str,
        supervisor: Supervisor,
        workers: list[RemoteWorker],
        queue: JobQueue,
        make_room: Callable[[], bool],
    ) -> None:
        self.last_arrival = asyncio.get_running_loop().time()
        self._name = name
        self._supervisor = supervisor
        self._workers = workers
        self._queue = queue
        self._make_room = make_room
        self._scaler = Autoscaler(self.last_arrival)
        self._worker_bytes = 0  # the largest seen
        self._is_short = False  # of memory, and it was said

    def look(self, limits: Limits) -> None:
        """Compare the workers there are with the work there is, and change their number by one step if need be."""
        if not limits.leave_room:
            return
        now = asyncio.get_running_loop().time()
        sight = self._sight(now)
        wanted = self._scaler.look(sight, limits, now)
        if wanted > sight.present and not self._supervisor.has_failed_for_good:
            self._grow(wanted)
        elif wanted < sight.present:
            text = "falls asleep" if wanted == 0 else f"is scaled down to {wanted} workers"
            logger.info("%s %s: there was not enough to do for %g s", self._name, text, limits.idle_s)
            self._supervisor.scale(0, wanted)

    def wake(self, limits: Limits) -> None:
        """Start the workers of a model that sleeps."""
        if not self._has_room() and self._make_room():
            logger.info("%s needs memory: another model was put to sleep", self._name)
        logger.info("%s wakes up", self._name)
        self._supervisor.scale(limits.awake, limits.maximum)

    def sleep(self) -> None:
        """Let the workers finish, and go."""
        self._supervisor.scale(0, 0)

    def _sight(self, now: float) -> Sight:
        return Sight(
            present=self._supervisor.num_present,
            ready=self._supervisor.num_ready,
            busy=sum(bool(worker.batches) for worker in self._workers if not worker.is_retiring),
            wait_s=now - self._queue.oldest.arrived if self._queue else 0.0,
            quiet_s=now - self.last_arrival,
            load_s=self._supervisor.load_s or 0.0,
        )

    def _grow(self, wanted: int) -> None:
        if self._has_room():
            self._is_short = False
            logger.info("%s is scaled up to %d workers: its jobs wait too long", self._name, wanted)
            self._supervisor.scale(wanted, wanted)
        elif not self._make_room() and not self._is_short:  # what another model gives back is taken at a later look
            self._is_short = True
            logger.warning(
                "%s gets no more workers though its jobs wait: one takes %d MB, and %d MB of memory are left",
                self._name,
                self._worker_bytes >> 20,
                (available_bytes() or 0) >> 20,
            )

    def _has_room(self) -> bool:
        sizes = [resident_bytes_of(worker.pids) for worker in self._workers if worker.is_ready]
        self._worker_bytes = max([self._worker_bytes, *sizes])
        return has_room(available_bytes(), self._worker_bytes)
