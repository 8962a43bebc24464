"""SequenceDispatcher: feeds the workers of a stateful model, each sequence to the worker that began it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flambeau.serving.job import Job
from flambeau.serving.scheduling.alarm import Alarm
from flambeau.serving.scheduling.batching import BatchLimits, free_places, wait_s
from flambeau.serving.scheduling.dispatch import NO_TICKET
from flambeau.serving.scheduling.sequence import Sequence
from flambeau.serving.scheduling.sequences import SequenceReceiver, Sequences, per_worker
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.wire.messages import Part

LOST = "The worker that held this sequence has ended."
CLOSED = "Its handler has closed this sequence."
EXPIRED = "This sequence has expired (sequenceMaxIdleMSec, sequenceTimeoutMSec)."


class SequenceDispatcher:
    """Sends to each worker the next jobs of its own sequences, at most one of each in a batch."""

    def __init__(
        self,
        queue: Sequences,
        workers: list[RemoteWorker],
        limits: BatchLimits,
        *,
        min_workers: Callable[[], int],
        needs_ticket: bool,
        refuse: Callable[[Job, str], None],
    ) -> None:
        self._queue = queue
        self._workers = workers
        self._limits = limits
        self._min_workers = min_workers
        self._needs_ticket = needs_ticket
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self.feed)  # a batch has waited long enough for company

    # ---- what comes in ----

    def refusal(self, job: Job) -> str:
        """Why a job cannot be taken now; empty when it can."""
        reason = "" if job.kind == "describe" else self._queue.refusal(job.headers)
        if not reason and self._needs_ticket and not self._has_ticket(job):
            return NO_TICKET
        return reason

    def add(self, job: Job) -> None:
        """Queue a job and see that it is sent."""
        if job.kind == "describe":  # it belongs to no sequence
            self._queue.put(job)
        else:
            sequence = self._queue.put_in_sequence(job, self._loop.time())
            job.receiver = SequenceReceiver(job.receiver, sequence, self._on_reply)
            if is_lost(sequence.worker):
                self._end(sequence, LOST)
        self.feed()

    def _has_ticket(self, job: Job) -> bool:
        sequence = None if job.kind == "describe" else self._queue.find(job.headers)
        bound = sequence.worker if sequence else None
        candidates = [bound] if bound else self._with_room()
        pending = self._queue.pending
        ahead = sum(len(other.waiting) for worker in (None, *candidates) for other in pending.of(worker))
        return sum(free_places(worker, self._limits) for worker in candidates) > ahead + self._queue.num_lone

    # ---- what goes out ----

    def feed(self) -> None:
        """Send whatever workers can take now."""
        self._assign()
        for worker in self._workers:
            places = free_places(worker, self._limits)
            if places and self._queue.num_lone:
                worker.send(self._queue.take(1))
                places = free_places(worker, self._limits)
            if places:
                self._feed_one(worker, places)

    def _feed_one(self, worker: RemoteWorker, places: int) -> None:
        """Send the jobs that have waited longest, of different sequences, as one batch or into the running one."""
        ready = [sequence for sequence in self._queue.pending.of(worker) if sequence.may_send]
        if not ready:
            return
        ready.sort(key=lambda sequence: sequence.first.arrived)
        if worker.is_concurrent:
            for sequence in ready[:places]:
                worker.send([sequence.take()])
            return
        wait = wait_s(len(ready), self._loop.time() - ready[0].first.arrived, self._limits)
        if wait > 0:
            self._alarm.set(wait)
        elif ready[0].first.is_alone:
            worker.send([ready[0].take()])
        else:
            together = [sequence for sequence in ready if not sequence.first.is_alone]
            worker.send([sequence.take() for sequence in together[:places]])

    def _assign(self) -> None:
        """Give each new sequence the worker that has the fewest."""
        counts = self._queue.num_of
        for sequence in self._queue.pending.of(None):
            candidates = self._with_room()
            if not candidates:
                return
            self._queue.assign(sequence, min(candidates, key=lambda worker: (counts[worker], worker.num_batches)))

    def _with_room(self) -> list[RemoteWorker]:
        counts = self._queue.num_of
        room = per_worker(self._queue.limits.count, self._min_workers())
        return [worker for worker in self._workers if not is_lost(worker) and counts[worker] < room]

    # ---- how sequences end ----

    def look_after(self) -> None:
        """End the sequences whose time has come, or whose worker retires; called every now and then."""
        for sequence in self._queue.overdue(self._loop.time()):
            self._end(sequence, EXPIRED)
        self.on_lost()

    def on_lost(self) -> None:
        """A worker has ended, and with it what it remembered."""
        for sequence in self._queue.live():
            if is_lost(sequence.worker):
                self._end(sequence, LOST)
        self.feed()

    def _on_reply(self, sequence: Sequence, parts: list[Part]) -> None:
        for ended in self._queue.on_reply(sequence, parts, self._loop.time()):
            self._end(ended, CLOSED)

    def _end(self, sequence: Sequence, reason: str) -> None:
        for job in self._queue.end(sequence):
            self._refuse(job, reason)

    def close(self) -> None:
        """Stop waiting for batches to fill."""
        self._alarm.cancel()


def is_lost(worker: RemoteWorker | None) -> bool:
    """Whether the worker of a sequence takes no more jobs; one that is not chosen yet is not lost."""
    return worker is not None and (not worker.is_ready or worker.is_retiring)
