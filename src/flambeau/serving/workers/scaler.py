"""Scaler: changes the number of a model's workers with its load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flambeau.serving.scheduling.queue import JobQueue
from flambeau.serving.workers.host_resources import available_bytes, resident_bytes_of
from flambeau.serving.workers.pool import WorkerPool
from flambeau.serving.workers.scaling_policy import LoadSample, ScalingPolicy, has_room

logger = logging.getLogger(__name__)


class Scaler:
    """Carries out the decisions of the scaling policy for one model.

    `free_memory` stops an idle model of the server and returns whether there was one.
    """

    def __init__(self, name: str, pool: WorkerPool, queue: JobQueue, free_memory: Callable[[], bool]) -> None:
        self.last_arrival = asyncio.get_running_loop().time()
        self._name = name
        self._pool = pool
        self._queue = queue
        self._free_memory = free_memory
        self._policy = ScalingPolicy(self.last_arrival)
        self._worker_bytes = 0  # the largest seen
        self._is_short = False  # of memory; the warning was logged

    def tick(self) -> None:
        """Add or remove one worker if the load asks for it."""
        limits = self._pool.limits
        if not limits.leave_room:
            return
        now = asyncio.get_running_loop().time()
        sample = self._sample(now)
        wanted = self._policy.decide(sample, limits, now)
        if wanted > sample.present and not self._pool.has_failed_for_good:
            self._grow(wanted)
        elif wanted < sample.present:
            logger.info("%s is scaled down to %d workers: too little load for %g s", self._name, wanted, limits.idle_s)
            self._pool.scale(0, wanted)

    def wake(self) -> None:
        """Start the workers of a sleeping model."""
        if not self.has_room() and self._free_memory():
            logger.info("%s needs memory: the workers of another model are stopped", self._name)
        logger.info("%s starts its workers for a request", self._name)
        limits = self._pool.limits
        self._pool.scale(limits.awake, limits.maximum)

    def sleep(self) -> None:
        """Retire all workers until the next job arrives."""
        self._pool.scale(0, 0)

    def _sample(self, now: float) -> LoadSample:
        pool = self._pool
        return LoadSample(
            present=pool.num_present,
            ready=pool.num_ready,
            busy=sum(bool(worker.batches) for worker in pool.workers if not worker.is_retiring),
            wait_s=now - self._queue.oldest.arrived if self._queue else 0.0,
            quiet_s=now - self.last_arrival,
            load_s=pool.load_s or 0.0,
        )

    def _grow(self, wanted: int) -> None:
        if self.has_room():
            self._is_short = False
            logger.info("%s is scaled up to %d workers: its jobs wait too long", self._name, wanted)
            self._pool.scale(wanted, wanted)
        elif not self._free_memory() and not self._is_short:  # memory that another model frees is used later
            self._is_short = True
            logger.warning(
                "%s gets no more workers though its jobs wait: one takes %d MB, and %d MB of memory are left",
                self._name,
                self._worker_bytes >> 20,
                (available_bytes() or 0) >> 20,
            )

    def has_room(self) -> bool:
        """Whether there is memory for one more worker."""
        sizes = [resident_bytes_of(worker.local_pids) for worker in self._pool.workers if worker.is_ready]
        self._worker_bytes = max([self._worker_bytes, *sizes])
        return has_room(available_bytes(), self._worker_bytes)
