"""Each sequence to its worker, and how little a request costs where there are many."""

from __future__ import annotations

import asyncio

import pytest

from flambeau.config.server import SequenceHeaders
from flambeau.serving.scheduling.batching import BatchLimits
from flambeau.serving.scheduling.sequence_dispatch import CLOSED, LOST, SequenceDispatcher
from flambeau.serving.scheduling.sequences import SequenceLimits, Sequences
from flambeau.serving.workers.recovery import Death
from flambeau.wire.messages import Part
from support.jobs import new_job as plain_job
from support.jobs import new_worker

NAMES = SequenceHeaders()


def new_job(sequence):
    return plain_job(headers=[(NAMES.id, sequence)])


class Model:
    """A dispatcher with its workers; keeps what was refused."""

    def __init__(self, num_workers=1, *, count=100, size=8, idle_s=60.0):
        self.refused = []
        self.workers = []
        limits = SequenceLimits(count=count, queue_size=10, idle_s=idle_s)
        self.queue = Sequences(limits, NAMES, 10)
        self.dispatcher = SequenceDispatcher(
            self.queue,
            self.workers,
            BatchLimits(size=size),
            min_workers=lambda: num_workers,
            needs_ticket=False,
            refuse=lambda job, reason: self.refused.append((job, reason)),
        )
        for _ in range(num_workers):
            self.workers.append(new_worker(on_free=self.dispatcher.feed))

    def add(self, *names):
        jobs = [new_job(name) for name in names]
        for job in jobs:
            assert self.dispatcher.refusal(job) == ""
            self.dispatcher.add(job)
        return jobs

    def answer(self, job, headers=None):
        worker = next(worker for worker in self.workers if job.id in worker._jobs)
        worker._receive([Part(job.id, b"", headers=headers)])

    def held_by(self, worker):
        return [job for job, _ in worker._jobs.values()]


def run(story):
    async def tell():
        story()

    asyncio.run(tell())


def test_sequences_are_spread_and_stay():
    def story():
        model = Model(2)
        a, b = model.add("a", "b")
        assert [model.held_by(worker) for worker in model.workers] == [[a], [b]]
        model.answer(a)
        model.answer(b)
        b2, a2 = model.add("b", "a")
        assert [model.held_by(worker) for worker in model.workers] == [[a2], [b2]]

    run(story)


def test_request_looks_at_no_sequence_but_its_own():
    def story():
        model = Model()
        for job in model.add(*map(str, range(50))):
            if job.id in model.workers[0]._jobs:
                model.answer(job)
        while model.queue.pending.num_jobs or model.workers[0].batches:
            model.answer(model.held_by(model.workers[0])[0])
        model.queue.live = lambda: pytest.fail("all sequences were looked at")
        [job] = model.add("7")
        assert len(model.queue) == 0
        model.answer(job)
        assert job.is_over

    run(story)


def test_number_of_waiting_jobs_is_kept():
    def story():
        model = Model()
        running, *waiting = model.add("a", "a", "a", "b")
        assert len(model.queue) == 3
        waiting[0].cancel()
        assert len(model.queue) == 2
        model.answer(running)
        assert len(model.queue) == 0  # the next of a, with that of b
        assert model.queue.pending.of(model.workers[0]) == []

    run(story)


def test_sequence_ends_with_its_worker():
    def story():
        model = Model(2)
        a, a2, _ = model.add("a", "a", "b")
        gone = model.workers[0]
        gone._end(Death(reason="gone"))
        model.workers.remove(gone)
        model.dispatcher.on_lost()
        assert model.refused == [(a2, LOST)]
        assert [*model.queue.num_of] == model.workers
        [again] = model.add("a")
        assert again not in model.held_by(gone)
        assert a.id not in model.workers[0]._jobs

    run(story)


def test_job_for_a_worker_that_retires_is_refused_at_once_and_the_others_at_the_next_look():
    def story():
        model = Model()
        _, waits = model.add("a", "a")
        _, other = model.add("b", "b")
        model.workers[0].is_retiring = True
        [late] = model.add("a")
        assert model.refused == [(waits, LOST), (late, LOST)]
        model.dispatcher.look_after()
        assert [job for job, _ in model.refused[2:]][-1] is other

    run(story)


def test_sequence_that_is_overdue_ends_at_the_next_look():
    def story():
        model = Model(idle_s=0.0)
        [job] = model.add("a")
        model.dispatcher.look_after()
        assert len(model.queue.live()) == 1  # its job runs
        model.answer(job)
        model.dispatcher.look_after()
        assert model.queue.live() == []
        assert not model.queue.num_of

    run(story)


def test_reply_that_closes_a_sequence_refuses_what_waits_in_it():
    def story():
        model = Model()
        job, waits = model.add("a", "a")
        model.answer(job, [(NAMES.end, "a")])
        assert model.refused == [(waits, CLOSED)]
        assert len(model.queue) == 0

    run(story)
