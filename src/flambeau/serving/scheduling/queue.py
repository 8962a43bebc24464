"""JobQueue: the waiting jobs of a model, by priority and then by arrival."""

from __future__ import annotations

from collections import OrderedDict

from flambeau.serving.job import NORMAL, PRIORITIES, Job, next_priority

Lane = OrderedDict[int, Job]


class JobQueue:
    """Jobs that wait for a worker. Cancelled and expired jobs leave at once.

    Nearly all jobs have normal priority. The lanes of the other priorities cost nothing while they are empty.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._jobs: Lane = OrderedDict()
        self._lanes: list[Lane] = [self._jobs if rank == NORMAL else OrderedDict() for rank in range(len(PRIORITIES))]
        self._num_special = 0  # jobs of other than normal priority
        self._passed_over = [0] * len(PRIORITIES)  # jobs taken since this priority was served

    def __len__(self) -> int:
        return len(self._jobs) + self._num_special

    @property
    def oldest(self) -> Job:
        """The job that leaves next."""
        lane = self._jobs if not self._num_special else self._lanes[self._next()]
        return next(iter(lane.values()))

    def put(self, job: Job) -> None:
        """Add a job at the end. The caller checks `capacity`."""
        job.on_cancel = self.remove
        if job.priority == NORMAL:
            self._jobs[job.id] = job
        else:
            self._lanes[job.priority][job.id] = job
            self._num_special += 1

    def put_back(self, job: Job) -> None:
        """Return a job to the front, also when the queue is full."""
        self.put(job)
        self._lanes[job.priority].move_to_end(job.id, last=False)

    def take(self, limit: int) -> list[Job]:
        """The next jobs, up to `limit`, that may be in one batch."""
        if self._num_special:
            return self._take_by_priority(limit)
        jobs = self._jobs
        first = jobs.popitem(last=False)[1]
        batch = [first]
        while jobs and len(batch) < limit and may_leave_together(first, self.oldest):
            batch.append(jobs.popitem(last=False)[1])
        return batch

    def _take_by_priority(self, limit: int) -> list[Job]:
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
        return next_priority([bool(lane) for lane in self._lanes], self._passed_over)

    def remove(self, job: Job) -> None:
        """Drop a job that was cancelled or has expired."""
        if self._lanes[job.priority].pop(job.id, None) is not None and job.priority != NORMAL:
            self._num_special -= 1

    def take_all(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs = [job for lane in self._lanes for job in lane.values()]
        for lane in self._lanes:
            lane.clear()
        self._num_special = 0
        return jobs


def may_leave_together(first: Job, other: Job) -> bool:
    """Whether two jobs may be in one batch: predictions in the same envelope."""
    return not (first.is_alone or other.is_alone) and first.envelope == other.envelope
