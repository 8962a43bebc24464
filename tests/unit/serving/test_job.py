"""One request in flight."""

from __future__ import annotations

import asyncio

import pytest

from flambeau.errors import BadRequest
from flambeau.serving.job import (
    HIGH,
    LOW,
    MAX_PASSED_OVER,
    NORMAL,
    PRIORITIES,
    Job,
    ReplyCollector,
    RequestBody,
    next_priority,
    priority_of,
    timeout_named,
)
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.wire.messages import Part
from support.jobs import BrokenListener, Listener, new_job


def test_job_ends_exactly_once():
    job = new_job()
    job.deliver([Part(job.id, b"a", last=False), Part(job.id, b"b", last=False)])
    job.deliver([Part(job.id, b"c")])
    job.deliver([Part(job.id, b"d")])
    job.fail(BadRequest("late"))
    job.cancel()
    assert [part.body for part in job.receiver.parts] == [b"a", b"b", b"c"]
    assert job.receiver.errors == []


def test_cancelled_job_gets_nothing_and_its_holder_drops_it():
    job, dropped = new_job(), []
    job.on_cancel = dropped.append
    job.cancel()
    job.cancel()
    job.deliver([Part(job.id, b"x")])
    assert dropped == [job]
    assert job.receiver.parts == job.receiver.errors == []


def test_expired_job_is_cancelled_and_gets_an_error():
    job, dropped = new_job(), []
    job.on_cancel = dropped.append
    error = BadRequest("late")
    job.expire(error)
    job.expire(error)
    assert dropped == [job]
    assert job.receiver.errors == [error]


async def test_end_of_a_job_cancels_its_deadline():
    job = new_job()
    job.expiry = asyncio.get_running_loop().call_later(60, job.cancel)
    job.deliver([Part(job.id, b"x")])
    assert job.expiry.cancelled()


def test_shared_body_is_returned_after_its_last_reader():
    returned = []
    segment = object()
    body = RequestBody.shared(segment, 10, returned.append)
    job = new_job(body=body)
    body.hold()  # a worker reads it
    job.cancel()
    assert returned == []
    body.release()
    assert returned == [segment]


def test_receiver_that_raises_affects_nothing_else(caplog):
    failed, expired = (new_job(BrokenListener(even_errors=True)) for _ in range(2))
    failed.fail(BadRequest("no"))
    expired.expire(BadRequest("late"))
    assert failed.is_over
    assert expired.is_over
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_other_kinds_than_predictions_run_alone():
    assert [new_job(kind=kind).is_alone for kind in ("predict", "explain", "describe")] == [False, True, True]


def test_reply_can_be_resumed_until_a_part_without_state_was_sent():
    job = new_job()
    assert job.can_resume
    parts = [Part(job.id, b"x", last=False, state=b"1")]
    job.keep_state(parts)
    job.deliver(parts)
    assert job.can_resume
    assert job.to_request(share=False).state == [b"1"]
    job.keep_state([Part(job.id, b"y", last=False)])
    assert not job.can_resume
    job.keep_state(parts)
    assert not job.can_resume  # a gap stays a gap


def test_new_id_is_unlike_the_old_one():
    job = new_job()
    old = job.id
    job.renew_id()
    assert job.id != old


async def test_collector_joins_the_parts_of_a_reply():
    collector = ReplyCollector()
    job = new_job(collector)
    job.deliver([Part(job.id, b"a", last=False)])
    job.deliver([Part(job.id, b"b")])
    assert await collector.done == b"ab"


async def test_collector_raises_the_error_of_a_job():
    collector = ReplyCollector()
    new_job(collector).fail(BadRequest("no"))
    with pytest.raises(BadRequest, match="no"):
        await collector.done


def prioritized(priority=NORMAL, kind="predict"):
    job = Job(Listener(), request_id="r", headers=[], body=RequestBody(b""), arrived=0.0, kind=kind)
    job.priority = priority
    return job


def queue_of(*jobs):
    queue = JobQueue(1000)
    for job in jobs:
        queue.put(job)
    return queue


def test_class_is_read_from_its_header_whatever_the_case():
    assert priority_of([]) == NORMAL
    assert priority_of([("accept", "*/*"), ("X-Flambeau-Priority", " High ")]) == HIGH
    assert priority_of([("x-flambeau-priority", "low")]) == LOW


@pytest.mark.parametrize("value", ["urgent", "", "1", "high,low"])
def test_unknown_class_names_those_there_are(value):
    with pytest.raises(BadRequest, match="high, normal, low"):
        priority_of([("x-flambeau-priority", value)])


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan", "inf", "1e9", "1,5"])
def test_time_limit_that_is_none_is_refused_with_an_example(value):
    with pytest.raises(BadRequest, match=r"x-flambeau-timeout is .*; write seconds, above 0 .* such as 2.5"):
        timeout_named(value)
    assert timeout_named(" 2.5 ") == 2.5


def test_highest_class_goes_first_unless_a_lower_one_was_passed_over_too_often():
    assert next_priority([True, True, True], [0, 0, 0]) == HIGH
    assert next_priority([False, True, True], [0, 0, 0]) == NORMAL
    assert next_priority([True, True, True], [0, 0, MAX_PASSED_OVER]) == LOW
    assert next_priority([True, True, True], [0, MAX_PASSED_OVER, MAX_PASSED_OVER]) == NORMAL
    assert next_priority([True, False, False], [0, MAX_PASSED_OVER, 0]) == HIGH


def test_jobs_leave_by_class_and_within_a_class_in_order_of_arrival():
    jobs = [prioritized(priority) for priority in (LOW, NORMAL, HIGH, NORMAL, HIGH, LOW)]
    queue = queue_of(*jobs)
    assert len(queue) == 6
    assert queue.oldest is jobs[2]
    order = [queue.take(1)[0] for _ in range(6)]
    assert order == [jobs[i] for i in (2, 4, 1, 3, 0, 5)]
    assert not queue


def test_no_class_starves_under_a_flood_of_the_highest():
    low, normal = prioritized(LOW), prioritized(NORMAL)
    queue = queue_of(low, normal)
    served = []
    for _ in range(3 * (MAX_PASSED_OVER + 1)):
        queue.put(prioritized(HIGH))
        served += queue.take(1)
    assert served.index(normal) == MAX_PASSED_OVER
    assert served.index(low) == MAX_PASSED_OVER + 1
    assert sum(job.priority == HIGH for job in served) == len(served) - 2


def test_high_class_keeps_most_of_the_places_while_all_wait():
    queue = queue_of(*[prioritized(priority) for priority in (HIGH, NORMAL, LOW) for _ in range(100)])
    first = [queue.take(1)[0].priority for _ in range(90)]
    shares = [first.count(rank) for rank in range(len(PRIORITIES))]
    assert shares[HIGH] >= 70
    assert min(shares) >= 8


def test_batch_is_filled_across_classes_and_a_lone_job_goes_by_itself():
    high, normal, alone, low = prioritized(HIGH), prioritized(), prioritized(kind="describe"), prioritized(LOW)
    queue = queue_of(low, normal, alone, high)
    assert queue.take(8) == [high, normal]
    assert queue.take(8) == [alone]
    assert queue.take(8) == [low]


def test_jobs_of_any_class_are_put_back_removed_and_taken_together():
    first, second, third = prioritized(HIGH), prioritized(HIGH), prioritized(LOW)
    queue = queue_of(second, third)
    queue.put_back(first)
    assert queue.oldest is first
    first.cancel()
    first.cancel()
    assert len(queue) == 2
    assert queue.take_all() == [second, third]
    assert len(queue) == 0
    queue.put(prioritized())
    assert len(queue.take(4)) == 1
