"""Each session to its worker, and how little a request costs with many sessions."""

from __future__ import annotations

import pytest

from flambeau.config.server import SequenceHeaders
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.scheduling.batch_policy import BatchLimits
from flambeau.serving.scheduling.dispatcher import NO_TICKET
from flambeau.serving.scheduling.session_dispatcher import CLOSED, LOST, SessionDispatcher
from flambeau.serving.scheduling.sessions import SessionLimits, Sessions
from flambeau.wire.messages import Part
from support.jobs import new_job as plain_job
from support.jobs import new_worker

NAMES = SequenceHeaders()


def new_job(session):
    return plain_job(headers=[(NAMES.id, session)])


class Stateful:
    """A dispatcher with its workers; keeps what was rejected."""

    def __init__(self, num_workers=1, *, count=100, size=8, idle_s=60.0, needs_ticket=False):
        self.rejected = []
        self.workers = []
        limits = SessionLimits(count=count, queue_size=10, idle_s=idle_s)
        self.queue = Sessions(limits, NAMES, 10)
        self.dispatcher = SessionDispatcher(
            self.queue,
            self.workers,
            BatchLimits(size=size),
            min_workers=lambda: num_workers,
            needs_ticket=needs_ticket,
            reject=lambda job, reason: self.rejected.append((job, reason)),
        )
        for _ in range(num_workers):
            self.workers.append(new_worker(on_free=self.dispatcher.feed))

    def add(self, *names):
        jobs = [new_job(name) for name in names]
        for job in jobs:
            assert self.dispatcher.add(job) == ""
        return jobs

    def answer(self, job, headers=None):
        worker = next(worker for worker in self.workers if job.id in worker._jobs)
        worker._receive([Part(job.id, b"", headers=headers)])

    def held_by(self, worker):
        return [job for job, _ in worker._jobs.values()]


async def test_sessions_are_spread_and_stay():
    model = Stateful(2)
    a, b = model.add("a", "b")
    assert [model.held_by(worker) for worker in model.workers] == [[a], [b]]
    model.answer(a)
    model.answer(b)
    b2, a2 = model.add("b", "a")
    assert [model.held_by(worker) for worker in model.workers] == [[a2], [b2]]


async def test_request_visits_no_session_but_its_own():
    model = Stateful()
    for job in model.add(*map(str, range(50))):
        if job.id in model.workers[0]._jobs:
            model.answer(job)
    while model.queue.pending.num_jobs or model.workers[0].batches:
        model.answer(model.held_by(model.workers[0])[0])
    model.queue.all = lambda: pytest.fail("all sessions were visited")
    [job] = model.add("7")
    assert len(model.queue) == 0
    model.answer(job)
    assert job.is_over


async def test_number_of_waiting_jobs_is_kept():
    model = Stateful()
    running, *waiting = model.add("a", "a", "a", "b")
    assert len(model.queue) == 3
    waiting[0].cancel()
    assert len(model.queue) == 2
    model.answer(running)
    assert len(model.queue) == 0  # the next job of a, with that of b
    assert model.queue.pending.of(model.workers[0]) == []


async def test_session_ends_with_its_worker():
    model = Stateful(2)
    a, a2, _ = model.add("a", "a", "b")
    gone = model.workers[0]
    gone._end(WorkerExit(reason="gone"))
    model.workers.remove(gone)
    model.dispatcher.on_worker_exit()
    assert model.rejected == [(a2, LOST)]
    assert [*model.queue.num_of] == model.workers
    [again] = model.add("a")
    assert again not in model.held_by(gone)
    assert a.id not in model.workers[0]._jobs


async def test_job_for_a_retiring_worker_is_rejected_at_once_and_the_others_at_the_next_tick():
    model = Stateful()
    _, waits = model.add("a", "a")
    _, other = model.add("b", "b")
    model.workers[0].is_retiring = True
    [late] = model.add("a")
    assert model.rejected == [(waits, LOST), (late, LOST)]
    model.dispatcher.tick()
    assert [job for job, _ in model.rejected[2:]][-1] is other


async def test_expired_session_ends_at_the_next_tick():
    model = Stateful(idle_s=0.0)
    [job] = model.add("a")
    model.dispatcher.tick()
    assert len(model.queue.all()) == 1  # its job runs
    model.answer(job)
    model.dispatcher.tick()
    assert model.queue.all() == []
    assert not model.queue.num_of


async def test_reply_that_closes_a_session_rejects_its_waiting_jobs():
    model = Stateful()
    job, waits = model.add("a", "a")
    model.answer(job, [(NAMES.end, "a")])
    assert model.rejected == [(waits, CLOSED)]
    assert len(model.queue) == 0


async def test_job_beyond_the_limits_is_rejected_and_not_queued():
    model = Stateful(count=1)
    model.add("a")
    assert "maxNumSequence" in model.dispatcher.add(new_job("b"))
    assert len(model.queue) == 0


async def test_job_without_a_ticket_is_rejected():
    model = Stateful(needs_ticket=True, size=1)
    [job] = model.add("a")
    assert model.dispatcher.add(new_job("a")) == NO_TICKET
    model.answer(job)
    assert model.dispatcher.add(new_job("a")) == ""
