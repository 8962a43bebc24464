"""Holding: the jobs a worker holds, batch by batch; without effects, and time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.job import Job


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs sent together; `progress` is when the worker last showed a sign of work on it."""

    size: int
    remaining: int
    progress: float
    started: float
    is_ahead: bool = False  # sent while the worker was busy with others, and not begun
    handler_s: float = 0.0  # how long the handler took
    ids: list[str] = field(default_factory=list)  # of its requests, where the log names them


class Holding:
    """What one worker has been sent and has not answered; it begins its batches in order, `depth` at a time.

    A concurrent worker begins each at once. One that is continuous or generates answers all with every step.
    """

    def __init__(self, traffic: ModelTraffic) -> None:
        self.is_concurrent = False
        self.speaks_for_all = False  # whatever it says is a sign of work on each
        self.depth = 1
        self.heard_at = 0.0  # when the worker last said anything; kept where that counts for all
        self.batches: deque[Batch] = deque()
        self.jobs: dict[int, tuple[Job | None, Batch]] = {}  # None: it was taken back
        self._traffic = traffic

    def add(self, jobs: Sequence[Job], now: float) -> Batch:
        """These jobs are sent, as one batch."""
        size = len(jobs)
        batch = Batch(size, size, now, now)
        if len(self.batches) >= self.depth and not self.is_concurrent:
            batch.is_ahead = True
            self._traffic.num_ahead += size
        self.batches.append(batch)
        held = self.jobs
        for job in jobs:
            held[job.id] = (job, batch)
        return batch

    def finish(self, job_id: int, batch: Batch, now: float) -> bool:
        """A job is answered; whether it was the last of its batch."""
        del self.jobs[job_id]
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
        """Jobs that are not begun, taken away so that an idle worker can have them, by the ids they had here."""
        if self.is_concurrent or len(self.batches) <= self.depth:
            return {}
        taken = {
            job_id: job
            for job_id, (job, batch) in self.jobs.items()
            if batch.is_ahead and job is not None and not job.is_over and job.body.segment is None
        }
        for job_id, job in taken.items():
            self.jobs[job_id] = (None, self.jobs[job_id][1])
            job.renew_id()  # the old one stays with this worker until it has let go
        return taken

    def seconds_without_progress(self, now: float) -> float:
        """How long what the worker works on has shown no sign of progress; 0 when it has nothing."""
        if not self.batches:
            return 0.0
        if self.speaks_for_all:
            return now - max(self.batches[0].progress, self.heard_at)
        return now - (min(batch.progress for batch in self.batches) if self.is_concurrent else self.batches[0].progress)

    def blame_silent(self, limit_s: float, now: float) -> None:
        """Where jobs run beside others: those silent for so long are to blame, and not tried again with the rest."""
        if self.is_concurrent and not self.speaks_for_all:
            for job, batch in self.jobs.values():
                if job is not None and now - batch.progress > limit_s:
                    job.crashes += 1

    def part(self) -> tuple[list[tuple[Job, int]], list[Job]]:
        """The worker is gone: the jobs it worked on, each with the size of its company, and those it had not begun."""
        begun = [batch for batch in self.batches if not batch.is_ahead]
        # They shared the process, as a batch does.
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
        self.batches.clear()
        return suspects, innocent
