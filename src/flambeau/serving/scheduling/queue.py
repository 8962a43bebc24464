"""JobQueue: the waiting jobs of a model, by priority, then in turns of their tenants, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from flambeau.serving.job import NORMAL, PRIORITIES, Job, next_priority

Lane = OrderedDict[int, Job]
NOBODY = ""  # the name of jobs without a tenant


class TenantLanes:
    """The jobs of one priority: a lane for each tenant. Tenants take turns by weight (stride scheduling).

    Each has a virtual time, which advances with what its jobs cost, the slower the larger its weight; the tenant that
    is furthest behind is next. One that has been idle does not catch up.
    """

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {NOBODY: OrderedDict()}
        self._times: dict[str, float] = {}
        self._now = 0.0  # the virtual time of the tenant that was served last

    def __bool__(self) -> bool:
        return any(self.lanes.values())

    def has_any(self, held: Collection[str]) -> bool:
        """Whether a job waits whose tenant is not held."""
        return any(lane and name not in held for name, lane in self.lanes.items())

    def put(self, job: Job) -> None:
        name = name_of(job)
        lane = self.lanes.setdefault(name, OrderedDict())
        if not lane:
            self._times[name] = max(self._now, self._times.get(name, 0.0))
        lane[job.id] = job

    def first(self, held: Collection[str]) -> Job:
        return next(iter(self.lanes[self._next(held)].values()))

    def pop(self, held: Collection[str]) -> Job:
        name = self._next(held)
        job = self.lanes[name].popitem(last=False)[1]
        self._now = self._times.get(name, self._now)
        self._times[name] = self._now + max(1, job.estimated_tokens) / (job.tenant.limits.weight if job.tenant else 1.0)
        return job

    def _next(self, held: Collection[str]) -> str:
        waiting = [name for name, lane in self.lanes.items() if lane and name not in held]
        if len(waiting) == 1:
            return waiting[0]
        return min(waiting, key=lambda name: (self._times.get(name, self._now), next(iter(self.lanes[name]))))

    def remove(self, job: Job) -> bool:
        lane = self.lanes.get(name_of(job))
        return lane is not None and lane.pop(job.id, None) is not None

    def __iter__(self) -> Iterator[Job]:
        return (job for lane in self.lanes.values() for job in lane.values())

    def clear(self) -> None:
        for lane in self.lanes.values():
            lane.clear()


class JobQueue:
    """Jobs that wait for a worker. Cancelled and expired jobs leave at once.

    Nearly all jobs have normal priority, and no tenant where the server has no keys. The other lanes cost nothing while
    they are empty.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: Collection[str] = ()  # tenants that get no more places for now
        self.last_arrivals: dict[str, float] = {}  # by tenant
        self._priorities = [TenantLanes() for _ in PRIORITIES]
        self._jobs: Lane = self._priorities[NORMAL].lanes[NOBODY]
        self._num_special = 0  # jobs in other lanes than that one
        self._passed_over = [0] * len(PRIORITIES)  # jobs taken since this priority was served

    def __len__(self) -> int:
        return len(self._jobs) + self._num_special

    def is_full_for(self, job: Job) -> bool:
        """Whether a job finds no room, once as many wait as may: a tenant with less than its share still does."""
        if job.tenant is None:
            return True
        name = job.tenant.name
        waiting = {found for lanes in self._priorities for found, lane in lanes.lanes.items() if lane}
        own = sum(len(lanes.lanes.get(name, ())) for lanes in self._priorities)
        return own >= self.capacity / len({*waiting, name})

    @property
    def has_next(self) -> bool:
        """Whether a job may leave now."""
        if not self.held:
            return len(self) > 0
        return any(lanes.has_any(self.held) for lanes in self._priorities)

    @property
    def oldest(self) -> Job:
        """The job that leaves next."""
        if not self._num_special:
            return next(iter(self._jobs.values()))
        return self._priorities[self._next()].first(self.held)

    def put(self, job: Job) -> None:
        """Add a job at the end. The caller checks `capacity`."""
        job.on_cancel = self.remove
        if job.tenant is None and job.priority == NORMAL:
            self._jobs[job.id] = job
            return
        self._priorities[job.priority].put(job)
        self._num_special += 1
        if job.tenant is not None:
            self.last_arrivals[job.tenant.name] = job.arrived

    def put_back(self, job: Job) -> None:
        """Return a job to the front, also when the queue is full."""
        self.put(job)
        self._priorities[job.priority].lanes[name_of(job)].move_to_end(job.id, last=False)

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
        while len(batch) < limit and self.has_next and may_leave_together(batch[0], self.oldest):
            batch.append(self._pop())
        return batch

    def _pop(self) -> Job:
        served = self._next()
        for rank, lanes in enumerate(self._priorities):
            self._passed_over[rank] = self._passed_over[rank] + 1 if lanes and rank != served else 0
        job = self._priorities[served].pop(self.held)
        self._num_special -= is_special(job)
        return job

    def _next(self) -> int:
        return next_priority([lanes.has_any(self.held) for lanes in self._priorities], self._passed_over)

    def remove(self, job: Job) -> None:
        """Drop a job that was cancelled or has expired."""
        if self._priorities[job.priority].remove(job):
            self._num_special -= is_special(job)

    def take_all(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs = [job for lanes in self._priorities for job in lanes]
        for lanes in self._priorities:
            lanes.clear()
        self._num_special = 0
        return jobs


def name_of(job: Job) -> str:
    return NOBODY if job.tenant is None else job.tenant.name


def is_special(job: Job) -> bool:
    return job.tenant is not None or job.priority != NORMAL


def may_leave_together(first: Job, other: Job) -> bool:
    """Whether two jobs may be in one batch: predictions in the same envelope."""
    return not (first.is_alone or other.is_alone) and first.envelope == other.envelope
