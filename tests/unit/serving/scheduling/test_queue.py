"""The order in which waiting jobs leave."""

from __future__ import annotations

from flambeau.serving.job import HIGH
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.serving.tenants import KeyLimits, Tenant
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


# ---- tenants ----


def job_of(name, weight=1.0, num_tokens=0):
    job = new_job()
    job.tenant = Tenant(name, KeyLimits(weight=weight), 0.0)
    job.tenant.num_running = 1
    job.estimated_tokens = num_tokens
    return job


def names_of(jobs):
    return "".join(job.tenant.name for job in jobs)


def test_one_tenants_many_jobs_do_not_hold_up_anothers():
    queue = queue_of(*(job_of("a") for _ in range(5)))
    queue.take(2)
    queue.put(job_of("b"))
    queue.put(job_of("b"))
    assert names_of(queue.take(9)) == "babaa"


def test_tenants_share_by_weight():
    queue = queue_of(*(job_of("a", weight=2) for _ in range(9)), *(job_of("b") for _ in range(9)))
    assert names_of(queue.take(9)).count("a") == 6


def test_tenant_with_long_requests_gets_fewer():
    queue = queue_of(*(job_of("a", num_tokens=300) for _ in range(9)), *(job_of("b", num_tokens=100) for _ in range(9)))
    assert names_of(queue.take(8)).count("a") == 2


def test_tenant_that_was_idle_does_not_catch_up():
    queue = queue_of(*(job_of("a") for _ in range(20)))
    queue.take(10)
    for _ in range(10):
        queue.put(job_of("b"))
    assert names_of(queue.take(8)).count("b") in (4, 5)


def test_priority_comes_before_turns():
    high = job_of("a")
    high.priority = HIGH
    queue = queue_of(job_of("b"), job_of("a"), high)
    assert queue.take(1) == [high]


def test_held_tenant_waits():
    queue = queue_of(job_of("a"), job_of("a"))
    queue.held = {"a"}
    assert (len(queue), queue.has_next) == (2, False)
    queue.put(job_of("b"))
    assert queue.oldest.tenant.name == "b"
    assert names_of(queue.take(9)) == "b"
    queue.held = ()
    assert names_of(queue.take(9)) == "aa"


def test_cancelled_job_of_a_tenant_leaves_the_queue():
    jobs = [job_of("a"), job_of("a"), new_job()]
    queue = queue_of(*jobs)
    jobs[0].cancel()
    assert len(queue) == 2
    assert {*queue.take(9)} == {*jobs[1:]}
    assert len(queue) == 0


def test_full_queue_has_room_for_a_tenant_with_less_than_its_share():
    queue = queue_of(*(job_of("a") for _ in range(10)))
    assert queue.is_full_for(job_of("a"))
    assert queue.is_full_for(new_job())
    assert not queue.is_full_for(job_of("b"))
    for _ in range(5):
        queue.put(job_of("b"))
    assert queue.is_full_for(job_of("b"))
