"""InFlight: the jobs that a worker holds, by batch. Without effects; time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.job import Job
from flambeau.wire.messages import Work


class Batch(Struct, eq=False):
    """Jobs sent together. `progress` is the time of the last sign of work on it."""

    size: int
    remaining: int
    progress: float
    started: float
    is_ahead: bool = False  # sent while the worker was busy, and not begun
    jobs: Sequence[Job] = ()
    sent: float = 0.0
    held_since: float = 0.0  # a worker was free from then on, and the batch waited for more jobs; 0: it did not
    work: Work | None = None  # how the worker spent its time, once it has reported it

    @property
    def ids(self) -> list[str]:
        """The ids of its requests."""
        return [job.request_id for job in self.jobs]


class InFlight:
    """The batches that one worker has not finished. It begins them in order, `depth` at a time.

    A concurrent worker begins each at once. A continuous or generating one works on all of them in each step.
    """

    def __init__(self, traffic: ModelTraffic) -> None:
        self.is_concurrent = False
        self.answers_all = False  # every message is a sign of work on all batches
        self.depth = 1
        self.last_message_at = 0.0  # kept only with `answers_all`
        self.batches: deque[Batch] = deque()
        self.jobs: dict[int, tuple[Job | None, Batch]] = {}  # None: taken back
        self.paused: dict[int, float] = {}  # job whose client does not read → until when it may hold up others
        self._traffic = traffic

    def add(self, jobs: Sequence[Job], now: float, held_since: float = 0.0) -> Batch:
        """Note that these jobs are sent as one batch."""
        size = len(jobs)
        batch = Batch(size, size, now, now, False, jobs, now, held_since)
        if len(self.batches) >= self.depth and not self.is_concurrent:
            batch.is_ahead = True
            self._traffic.num_ahead += size
        self.batches.append(batch)
        held = self.jobs
        for job in jobs:
            held[job.id] = (job, batch)
        return batch

    @property
    def num_owed(self) -> int:
        """How many of its jobs somebody waits for: not copies, whose answers are sent to nobody."""
        return sum(1 for job, _ in self.jobs.values() if job is not None and not job.is_copy)

    def finish(self, job_id: int, batch: Batch, now: float) -> bool:
        """Remove an answered job; return whether it was the last of its batch."""
        del self.jobs[job_id]
        if self.paused:
            self.paused.pop(job_id, None)
        batch.remaining -= 1
        if batch.is_ahead:  # cancelled before it began
            self._traffic.num_ahead -= 1
        if batch.remaining:
            batch.progress = now
            return False
        batches = self.batches
        if batches[0] is not batch:
            batches.remove(batch)
        else:
            batches.popleft()
            if batches and not self.is_concurrent:
                following = batches[0]
                following.started = following.progress = now
        if not batch.is_ahead and len(batches) >= self.depth:
            self._begin(batches[self.depth - 1])
        return True

    def _begin(self, batch: Batch) -> None:
        if batch.is_ahead:
            batch.is_ahead = False
            self._traffic.num_ahead -= batch.remaining

    def take_back(self) -> dict[int, Job]:
        """Take away the jobs that are not begun; the keys are the ids they had here."""
        if self.is_concurrent or len(self.batches) <= self.depth:
            return {}
        taken = {
            job_id: job
            for job_id, (job, batch) in self.jobs.items()
            if batch.is_ahead and job is not None and not job.is_over and job.body.segment is None
        }
        for job_id, job in taken.items():
            self.jobs[job_id] = (None, self.jobs[job_id][1])
            job.renew_id()  # this worker may still send messages about the old id
        return taken

    def pause(self, job_id: int, until: float) -> bool:
        """Note that a job waits for its client; False if it did already, or is not here."""
        if job_id not in self.jobs or job_id in self.paused:
            return False
        self.paused[job_id] = until
        return True

    def resume(self, job_id: int, now: float) -> bool:
        """Note that a job goes on, or is cancelled; False if it did not wait."""
        if self.paused.pop(job_id, None) is None:
            return False
        self.jobs[job_id][1].progress = now  # the wait was not the worker's
        return True

    def overdue(self, now: float) -> list[Job]:
        """Paused jobs that have held up others for too long."""
        late = [self.jobs[job_id][0] for job_id, until in self.paused.items() if now > until]
        return [job for job in late if job is not None]

    def seconds_silent(self, now: float) -> float:
        """How long the worker has made no progress that it could have made: not with jobs that wait for clients."""
        if not self.paused or self.answers_all:
            return self.seconds_without_progress(now)
        if not self.is_concurrent:
            return 0.0
        waiting = {id(self.jobs[job_id][1]) for job_id in self.paused}
        return max((now - batch.progress for batch in self.batches if id(batch) not in waiting), default=0.0)

    def seconds_without_progress(self, now: float) -> float:
        """How long the current batch has made no progress; 0 without a batch."""
        if not self.batches:
            return 0.0
        if self.answers_all:
            return now - max(self.batches[0].progress, self.last_message_at)
        return now - (min(batch.progress for batch in self.batches) if self.is_concurrent else self.batches[0].progress)

    def blame_silent(self, limit_s: float, now: float) -> None:
        """Count a crash for each job of a concurrent worker that made no progress for so long."""
        if self.is_concurrent and not self.answers_all:
            for job, batch in self.jobs.values():
                if job is not None and now - batch.progress > limit_s and job.id not in self.paused:
                    job.crashes += 1

    def drain(self) -> tuple[list[tuple[Job, int]], list[Job]]:
        """Remove all jobs of an exited worker: those it worked on, each with the number of jobs that ran together
        with it, and those it had not begun."""
        begun = [batch for batch in self.batches if not batch.is_ahead]
        # Jobs that ran in the process at the same time count as one batch.
        company = len(self.jobs) if self.is_concurrent else sum(b.size for b in begun) if self.depth > 1 else 0
        suspects, innocent = [], []
        for job, batch in self.jobs.values():
            if job is None:
                continue
            if job.body.segment is not None:
                job.body.release()
            if job.is_over:
                continue
            if batch.is_ahead:
                innocent.append(job)
            else:
                suspects.append((job, company or batch.size))
        self._traffic.num_ahead -= sum(batch.remaining for batch in self.batches if batch.is_ahead)
        self.jobs.clear()
        self.paused.clear()
        self.batches.clear()
        return suspects, innocent
