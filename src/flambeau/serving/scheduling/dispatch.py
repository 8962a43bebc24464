"""Dispatcher: feeds a model's workers from its queue."""

from __future__ import annotations

import asyncio

from flambeau.serving.job import Job
from flambeau.serving.scheduling.alarm import Alarm
from flambeau.serving.scheduling.batching import BatchLimits, free_places, may_send_ahead, wait_s
from flambeau.serving.scheduling.crowding import Crowd
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.serving.workers.remote_worker import RemoteWorker

NO_TICKET = "No idle worker can take the request now (useJobTicket)."
STUCK_S = 0.05  # a quick worker that has been on one batch this long gives back what it has not begun


class Dispatcher:
    """Sends a batch to a worker whenever there is one to send and a worker to take it."""

    def __init__(self, queue: JobQueue, workers: list[RemoteWorker], limits: BatchLimits, num_cores: int) -> None:
        self._queue = queue
        self._num_cores = num_cores
        self._workers = workers
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self.feed)  # a batch has waited long enough for company
        self._is_woken = False
        self._crowd: Crowd | None = None  # where there are more workers than cores

    def refusal(self, job: Job) -> str:
        """For models with job tickets: why a job cannot be taken now; empty when an idle worker is there for it."""
        places = sum(free_places(worker, self._limits) for worker in self._workers)
        return "" if places > len(self._queue) else NO_TICKET

    def add(self, job: Job) -> None:
        """Queue a job and see that it is sent.

        Jobs that arrive in the same turn of the event loop leave together when the model batches.
        """
        self._queue.put(job)
        if self._limits.size == 1:
            self.feed()
        elif not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._on_woken)

    def feed(self) -> None:
        """Send as many batches as workers can take now."""
        queue, limits = self._queue, self._limits
        while queue:
            worker = self._pick(len(queue))
            if worker is None:
                return
            if worker.places:  # they join one by one, and none waits for company
                worker.send(queue.take(1))
                continue
            if limits.delay_s is not None and not queue.oldest.is_alone:
                wait = wait_s(len(queue), self._loop.time() - queue.oldest.arrived, limits)
                if wait > 0:
                    self._alarm.set(wait)
                    return
            worker.send(queue.take(limits.size))

    def look_after(self) -> None:
        """See whether the workers are too many, and whether one is stuck; called every now and then."""
        self._look_at_crowd()
        self._free_stuck()

    def _look_at_crowd(self) -> None:
        if len(self._workers) <= self._num_cores:
            self._crowd = None
            return
        self._crowd = self._crowd or Crowd(self._num_cores)
        self._crowd.look(self._workers)
        self.feed()

    def _free_stuck(self) -> None:
        """Give jobs that wait behind a stuck batch to a worker that has nothing to do."""
        if len(self._workers) < 2 or self._queue or not any(worker.is_idle for worker in self._workers):
            return
        for worker in self._workers:
            if worker.num_batches > 1 and worker.seconds_without_progress() > STUCK_S:
                for job in reversed(worker.take_back()):
                    self._queue.put_back(job)
        self.feed()

    def on_lost(self) -> None:
        """A worker has ended: others may have what it gave back."""
        self.feed()

    def _pick(self, num_waiting: int) -> RemoteWorker | None:
        """The least busy worker that can take another batch."""
        best: RemoteWorker | None = None
        may_wake = self._crowd is None or not self._is_crowded(self._crowd)
        for worker in self._workers:
            if not worker.is_ready or worker.is_retiring:
                continue
            load = len(worker.batches)
            if not load:
                if may_wake:
                    return worker
                continue
            if best is not None and load >= len(best.batches):
                continue
            if self._may_send_beside(worker) if worker.is_concurrent else self._may_send_ahead(worker, num_waiting):
                best = worker
        return best

    def _is_crowded(self, crowd: Crowd) -> bool:
        """Whether as many workers compute as there are cores for them."""
        limit = crowd.limit
        if limit is None:
            return False
        return sum(bool(worker.batches) and worker.pid not in crowd.sleeping for worker in self._workers) >= limit

    def _may_send_beside(self, worker: RemoteWorker) -> bool:
        """Whether a worker that runs many jobs may get one more; one that may be poisonous is run alone."""
        is_crowded = len(worker.batches) >= (worker.places or self._limits.concurrency)
        return not (is_crowded or worker.has_suspect or self._queue.oldest.is_suspect)

    def _may_send_ahead(self, worker: RemoteWorker, num_waiting: int) -> bool:
        if worker.depth > 1 and (worker.has_suspect or self._queue.oldest.is_suspect):
            return False
        return may_send_ahead(
            num_waiting,
            len(worker.batches),
            worker.service_s,
            self._limits,
            is_only_worker=len(self._workers) == 1,
            depth=worker.depth,
        )

    def _on_woken(self) -> None:
        self._is_woken = False
        self.feed()

    def close(self) -> None:
        """Stop waiting for batches to fill."""
        self._alarm.cancel()
