from __future__ import annotations

from flambeau.errors import BadRequest, FlambeauError
from flambeau.serving.job import Body, Job
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.wire.messages import Part


class Listener:
    def __init__(self):
        self.parts: list[Part] = []
        self.errors: list[FlambeauError] = []

    def on_parts(self, parts):
        self.parts += parts

    def on_error(self, error):
        self.errors.append(error)


def new_job(kind="predict", body=None):
    return Job(Listener(), request_id="r", headers=[], body=body or Body(b""), arrived=0.0, kind=kind)


def test_job_ends_exactly_once():
    job = new_job()
    job.deliver([Part(job.id, b"a", last=False), Part(job.id, b"b", last=False)])
    job.deliver([Part(job.id, b"c")])
    job.deliver([Part(job.id, b"d")])
    job.fail(BadRequest("late"))
    job.cancel()
    assert [part.body for part in job.receiver.parts] == [b"a", b"b", b"c"]
    assert job.receiver.errors == []


def test_cancelled_job_hears_nothing_and_leaves_the_queue():
    queue = JobQueue(10)
    jobs = [new_job() for _ in range(3)]
    for job in jobs:
        queue.put(job)
    jobs[1].cancel()
    jobs[1].deliver([Part(jobs[1].id, b"x")])
    assert jobs[1].receiver.parts == []
    assert queue.take(10) == [jobs[0], jobs[2]]


def test_jobs_put_back_go_first():
    queue = JobQueue(10)
    first, second = new_job(), new_job()
    queue.put(second)
    queue.put_back(first)
    assert queue.oldest is first
    assert queue.take(1) == [first]
    assert len(queue) == 1


def test_lone_jobs_and_other_kinds_are_not_mixed():
    queue = JobQueue(10)
    plain, explain, alone, last = new_job(), new_job("explain"), new_job(), new_job()
    alone.is_alone = True
    for job in (plain, explain, alone, last):
        queue.put(job)
    assert [queue.take(8) for _ in range(4)] == [[plain], [explain], [alone], [last]]


def test_shared_body_is_given_back_when_the_last_reader_lets_go():
    given = []
    segment = object()
    body = Body.shared(segment, 10, given.append)
    job = new_job(body=body)
    body.hold()  # a worker reads it
    job.cancel()
    assert given == []
    body.release()
    assert given == [segment]


def test_receiver_that_raises_costs_nobody_else_anything(caplog):
    job = new_job()
    job.receiver.on_error = lambda error: 1 / 0
    job.fail(BadRequest("no"))
    assert job.is_over
    other = new_job()
    other.receiver.on_error = lambda error: 1 / 0
    other.expire(BadRequest("late"))
    assert other.is_over
    assert caplog.text.count("its error could not be delivered") == 2
