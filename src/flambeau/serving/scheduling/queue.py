"""JobQueue: bounded, first come first served within a class; forgets expired and cancelled jobs at once."""

from __future__ import annotations

from collections import OrderedDict

from flambeau.serving.job import Job
from flambeau.serving.scheduling.priorities import CLASSES, NORMAL, next_class

Lane = OrderedDict[int, Job]


class JobQueue:
    """Jobs that wait for a worker, in order of arrival; jobs put back go first.

    Almost always all are of one class, so the others have lanes of their own, which cost nothing while they are empty.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._jobs: Lane = OrderedDict()
        self._lanes: list[Lane] = [self._jobs if rank == NORMAL else OrderedDict() for rank in range(len(CLASSES))]
        self._num_special = 0  # jobs in lanes other than `_jobs`
        self._passed_over = [0] * len(CLASSES)  # since the class was served last

    def __len__(self) -> int:
        return len(self._jobs) + self._num_special

    @property
    def oldest(self) -> Job:
        """The job that leaves next."""
        lane = self._jobs if not self._num_special else self._lanes[self._next()]
        return next(iter(lane.values()))

    def put(self, job: Job) -> None:
        """Add a job at the end; the caller has seen that there is room."""
        job.on_cancel = self.remove
        if job.priority == NORMAL:
            self._jobs[job.id] = job
        else:
            self._lanes[job.priority][job.id] = job
            self._num_special += 1

    def put_back(self, job: Job) -> None:
        """Return a job to the front: it has waited already, so there is always room for it."""
        self.put(job)
        self._lanes[job.priority].move_to_end(job.id, last=False)

    def take(self, limit: int) -> list[Job]:
        """The next jobs that may leave together: predictions in one envelope; a lone job or another kind goes alone."""
        if self._num_special:
            return self._take_by_class(limit)
        jobs = self._jobs
        first = jobs.popitem(last=False)[1]
        batch = [first]
        while jobs and len(batch) < limit and may_leave_together(first, self.oldest):
            batch.append(jobs.popitem(last=False)[1])
        return batch

    def _take_by_class(self, limit: int) -> list[Job]:
        batch = [self._pop()]
        while len(batch) < limit and any(self._lanes) and may_leave_together(batch[0], self.oldest):
            batch.append(self._pop())
        return batch

    def _pop(self) -> Job:
        served = self._next()
        for rank, lane in enumerate(self._lanes):
            self._passed_over[rank] = self._passed_over[rank] + 1 if lane and rank != served else 0
        self._num_special -= served != NORMAL
        return self._lanes[served].popitem(last=False)[1]

    def _next(self) -> int:
        return next_class([bool(lane) for lane in self._lanes], self._passed_over)

    def remove(self, job: Job) -> None:
        """Forget a job that was cancelled or has expired."""
        if self._lanes[job.priority].pop(job.id, None) is not None and job.priority != NORMAL:
            self._num_special -= 1

    def take_all(self) -> list[Job]:
        """Empty the queue."""
        jobs = [job for lane in self._lanes for job in lane.values()]
        for lane in self._lanes:
            lane.clear()
        self._num_special = 0
        return jobs


def may_leave_together(first: Job, other: Job) -> bool:
    """Whether two jobs may be in one batch: predictions in the same envelope."""
    return not (first.is_alone or other.is_alone) and first.envelope == other.envelope
