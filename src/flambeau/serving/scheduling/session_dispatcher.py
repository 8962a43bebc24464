"""SessionDispatcher: sends the jobs of a stateful model to the worker that holds their session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from flambeau.serving.job import Job
from flambeau.serving.scheduling.batch_policy import BatchLimits, free_places, wait_s
from flambeau.serving.scheduling.dispatcher import NO_TICKET, Timer, Worker
from flambeau.serving.scheduling.sessions import Session, SessionReceiver, Sessions, sessions_per_worker
from flambeau.wire.messages import Part

LOST = "The worker that held this sequence has ended."
CLOSED = "Its handler has closed this sequence."
CLOSED_BY_CLIENT = "The client of this sequence has gone."
EXPIRED = "This sequence has expired (sequenceMaxIdleMSec, sequenceTimeoutMSec)."


class SessionDispatcher:
    """Sends to each worker the next jobs of its own sessions, at most one of each in a batch."""

    def __init__(
        self,
        queue: Sessions,
        workers: Sequence[Worker],
        limits: BatchLimits,
        *,
        min_workers: Callable[[], int],
        needs_ticket: bool,
        reject: Callable[[Job, str], None],
    ) -> None:
        self._queue = queue
        self._workers = workers
        self._limits = limits
        self._min_workers = min_workers
        self._needs_ticket = needs_ticket
        self._reject = reject
        self._loop = asyncio.get_running_loop()
        self._timer = Timer(self.feed)  # the oldest job has waited long enough for a fuller batch

    # ---- incoming jobs ----

    def add(self, job: Job) -> str:
        belongs = job.kind != "describe"  # a description belongs to no session
        if belongs and (reason := self._queue.rejection(job.headers)):
            return reason
        if self._needs_ticket and not self._has_ticket(job):
            return NO_TICKET
        if belongs:
            session = self._queue.put_in_session(job, self._loop.time())
            job.receiver = SessionReceiver(job.receiver, session, self._on_reply)
            if is_lost(session.worker):
                self._end(session, LOST)
        else:
            self._queue.put(job)
        self.feed()
        return ""

    def _has_ticket(self, job: Job) -> bool:
        session = None if job.kind == "describe" else self._queue.find(job.headers)
        bound = session.worker if session else None
        candidates = [bound] if bound else self._with_room()
        pending = self._queue.pending
        ahead = sum(len(other.waiting) for worker in (None, *candidates) for other in pending.of(worker))
        return sum(free_places(worker, self._limits) for worker in candidates) > ahead + self._queue.num_lone

    # ---- outgoing batches ----

    def feed(self) -> None:
        self._assign()
        for worker in self._workers:
            places = free_places(worker, self._limits)
            if places and self._queue.num_lone:
                worker.send(self._queue.take(1))
                places = free_places(worker, self._limits)
            if places:
                self._feed_worker(worker, places)

    def _feed_worker(self, worker: Worker, places: int) -> None:
        """Send the jobs that have waited longest, of different sessions, as one batch or into the running one."""
        ready = [session for session in self._queue.pending.of(worker) if session.may_send]
        if not ready:
            return
        ready.sort(key=lambda session: session.first.arrived)
        if worker.is_concurrent:
            for session in ready[:places]:
                worker.send([session.take()])
            return
        wait = wait_s(len(ready), self._loop.time() - ready[0].first.arrived, self._limits)
        if wait > 0:
            self._timer.start(wait)
        elif ready[0].first.is_alone:
            worker.send([ready[0].take()])
        else:
            together = [session for session in ready if not session.first.is_alone]
            worker.send([session.take() for session in together[:places]])

    def _assign(self) -> None:
        """Bind each new session to the worker with the fewest."""
        counts = self._queue.num_of
        for session in self._queue.pending.of(None):
            candidates = self._with_room()
            if not candidates:
                return
            self._queue.assign(session, min(candidates, key=lambda worker: (counts[worker], worker.num_batches)))

    def _with_room(self) -> list[Worker]:
        counts = self._queue.num_of
        room = sessions_per_worker(self._queue.limits.count, self._min_workers())
        return [worker for worker in self._workers if not is_lost(worker) and counts[worker] < room]

    # ---- ends of sessions ----

    def tick(self) -> None:
        """End the sessions that have expired or whose worker retires."""
        for session in self._queue.expired(self._loop.time()):
            self._end(session, EXPIRED)
        self.on_worker_exit()

    def on_worker_exit(self) -> None:
        """End the sessions whose state is lost."""
        for session in self._queue.all():
            if is_lost(session.worker):
                self._end(session, LOST)
        self.feed()

    def end_sequence(self, id: str) -> None:
        if (session := self._queue.named(id)) is not None:
            self._end(session, CLOSED_BY_CLIENT)
            self.feed()

    def _on_reply(self, session: Session, parts: list[Part]) -> None:
        for ended in self._queue.on_reply(session, parts, self._loop.time()):
            self._end(ended, CLOSED)

    def _end(self, session: Session, reason: str) -> None:
        for job in self._queue.end(session):
            self._reject(job, reason)

    def close(self) -> None:
        self._timer.cancel()


def is_lost(worker: Worker | None) -> bool:
    """Whether a session's worker takes no more jobs. A session without a worker is not lost."""
    return worker is not None and (not worker.is_ready or worker.is_retiring)
