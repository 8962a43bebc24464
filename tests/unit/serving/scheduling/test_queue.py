"""The order in which waiting jobs leave."""

from __future__ import annotations

from flambeau.serving.scheduling.queue import JobQueue
from support.jobs import new_job


def queue_of(*jobs):
    queue = JobQueue(10)
    for job in jobs:
        queue.put(job)
    return queue


def test_cancelled_job_leaves_the_queue():
    jobs = [new_job() for _ in range(3)]
    queue = queue_of(*jobs)
    jobs[1].cancel()
    assert queue.take(10) == [jobs[0], jobs[2]]


def test_returned_job_goes_first():
    first, second = new_job(), new_job()
    queue = queue_of(second)
    queue.put_back(first)
    assert queue.oldest is first
    assert queue.take(1) == [first]
    assert len(queue) == 1


def test_lone_jobs_and_other_kinds_are_not_mixed():
    plain, explain, alone, last = new_job(), new_job(kind="explain"), new_job(), new_job()
    alone.is_alone = True
    queue = queue_of(plain, explain, alone, last)
    assert [queue.take(8) for _ in range(4)] == [[plain], [explain], [alone], [last]]


def test_jobs_in_different_envelopes_are_not_mixed():
    json, body = new_job(), new_job()
    json.envelope = "json"
    queue = queue_of(json, body)
    assert queue.take(8) == [json]
