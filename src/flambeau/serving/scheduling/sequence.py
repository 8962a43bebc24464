"""Sequence: jobs that depend on those before them; Pending: which sequences have jobs that wait."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from flambeau.serving.job import Job
from flambeau.serving.workers.remote_worker import RemoteWorker


class Sequence:
    """One sequence: the jobs that wait, those a worker has, and the worker it stays with."""

    def __init__(self, id: str, now: float, pending: Pending) -> None:
        self.id = id
        self.started = now
        self.last_active = now
        self.worker: RemoteWorker | None = None
        self.waiting: OrderedDict[int, Job] = OrderedDict()
        self._sent: list[Job] = []
        self._pending = pending

    @property
    def first(self) -> Job:
        """The job that leaves next."""
        return next(iter(self.waiting.values()))

    @property
    def is_busy(self) -> bool:
        """Whether one of its jobs waits or runs."""
        self._sent = [job for job in self._sent if not job.is_over]
        return bool(self.waiting or self._sent)

    @property
    def may_send(self) -> bool:
        """Whether its next job may leave: never in the same call as the one before it."""
        return bool(self.waiting) and all(job.started or job.is_over for job in self._sent)

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        job.on_cancel = self.remove
        self.waiting[job.id] = job
        self._pending.add(self)

    def take(self) -> Job:
        """The next job, which is about to be sent."""
        job = self.waiting.popitem(last=False)[1]
        self._pending.remove(self)
        self._sent = [*(sent for sent in self._sent if not sent.is_over), job]
        return job

    def remove(self, job: Job) -> None:
        """Forget a job that was cancelled or has expired."""
        if self.waiting.pop(job.id, None) is not None:
            self._pending.remove(self)

    def clear(self) -> list[Job]:
        """The jobs that wait, which are not to wait any longer."""
        jobs = [*self.waiting.values()]
        self.waiting.clear()
        self._pending.remove(self, len(jobs))
        return jobs

    def assign(self, worker: RemoteWorker) -> None:
        """Stay with that worker from now on."""
        self._pending.move(self, worker)
        self.worker = worker


class Pending:
    """The sequences with jobs that wait, by worker (None: not assigned), and how many jobs that are."""

    def __init__(self) -> None:
        self.num_jobs = 0
        self._of: defaultdict[RemoteWorker | None, dict[Sequence, None]] = defaultdict(dict)  # in order of arrival

    def of(self, worker: RemoteWorker | None) -> list[Sequence]:
        """Those of one worker."""
        return [*self._of[worker]] if worker in self._of else []

    def add(self, sequence: Sequence) -> None:
        """A job has come."""
        self.num_jobs += 1
        self._of[sequence.worker][sequence] = None

    def remove(self, sequence: Sequence, num_jobs: int = 1) -> None:
        """Jobs have gone."""
        self.num_jobs -= num_jobs
        if not sequence.waiting:
            self._drop(sequence)

    def move(self, sequence: Sequence, worker: RemoteWorker) -> None:
        """Its worker is chosen."""
        self._drop(sequence)
        if sequence.waiting:
            self._of[worker][sequence] = None

    def _drop(self, sequence: Sequence) -> None:
        mine = self._of[sequence.worker]
        mine.pop(sequence, None)
        if not mine:
            del self._of[sequence.worker]  # workers come and go
