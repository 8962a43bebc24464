"""JobQueue: bounded, first come first served; forgets expired and cancelled jobs at once."""

from __future__ import annotations

from collections import OrderedDict

from flambeau.serving.job import Job


class JobQueue:
    """Jobs that wait for a worker, in order of arrival; jobs put back go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._jobs: OrderedDict[int, Job] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def oldest(self) -> Job:
        """The job that leaves next."""
        return next(iter(self._jobs.values()))

    def put(self, job: Job) -> None:
        """Add a job at the end; the caller has seen that there is room."""
        job.on_cancel = self.remove
        self._jobs[job.id] = job

    def put_back(self, job: Job) -> None:
        """Return a job to the front: it has waited already, so there is always room for it."""
        job.on_cancel = self.remove
        self._jobs[job.id] = job
        self._jobs.move_to_end(job.id, last=False)

    def take(self, limit: int) -> list[Job]:
        """The next jobs that may leave together: predictions in one envelope; a lone job or another kind goes alone."""
        jobs = self._jobs
        first = jobs.popitem(last=False)[1]
        batch = [first]
        if first.is_alone:
            return batch
        while jobs and len(batch) < limit:
            candidate = self.oldest
            if candidate.is_alone or candidate.envelope != first.envelope:
                break
            batch.append(jobs.popitem(last=False)[1])
        return batch

    def remove(self, job: Job) -> None:
        """Forget a job that was cancelled or has expired."""
        self._jobs.pop(job.id, None)

    def take_all(self) -> list[Job]:
        """Empty the queue."""
        jobs = [*self._jobs.values()]
        self._jobs.clear()
        return jobs
