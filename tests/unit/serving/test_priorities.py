"""Who goes first, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from flambeau.errors import BadRequest
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.priorities import HIGH, LOW, MAX_PASSED_OVER, NORMAL, PRIORITIES, next_priority, priority_of
from flambeau.serving.scheduling.queue import JobQueue


class Nobody:
    def on_parts(self, parts):
        pass

    def on_error(self, error):
        pass


def new_job(priority=NORMAL, kind="predict"):
    job = Job(Nobody(), request_id="r", headers=[], body=RequestBody(b""), arrived=0.0, kind=kind)
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


def test_highest_class_goes_first_unless_a_lower_one_was_passed_over_too_often():
    assert next_priority([True, True, True], [0, 0, 0]) == HIGH
    assert next_priority([False, True, True], [0, 0, 0]) == NORMAL
    assert next_priority([True, True, True], [0, 0, MAX_PASSED_OVER]) == LOW
    assert next_priority([True, True, True], [0, MAX_PASSED_OVER, MAX_PASSED_OVER]) == NORMAL
    assert next_priority([True, False, False], [0, MAX_PASSED_OVER, 0]) == HIGH


def test_jobs_leave_by_class_and_within_a_class_in_order_of_arrival():
    jobs = [new_job(priority) for priority in (LOW, NORMAL, HIGH, NORMAL, HIGH, LOW)]
    queue = queue_of(*jobs)
    assert len(queue) == 6
    assert queue.oldest is jobs[2]
    order = [queue.take(1)[0] for _ in range(6)]
    assert order == [jobs[i] for i in (2, 4, 1, 3, 0, 5)]
    assert not queue


def test_no_class_starves_under_a_flood_of_the_highest():
    low, normal = new_job(LOW), new_job(NORMAL)
    queue = queue_of(low, normal)
    served = []
    for _ in range(3 * (MAX_PASSED_OVER + 1)):
        queue.put(new_job(HIGH))
        served += queue.take(1)
    assert served.index(normal) == MAX_PASSED_OVER
    assert served.index(low) == MAX_PASSED_OVER + 1
    assert sum(job.priority == HIGH for job in served) == len(served) - 2


def test_high_class_keeps_most_of_the_places_while_all_wait():
    queue = queue_of(*[new_job(priority) for priority in (HIGH, NORMAL, LOW) for _ in range(100)])
    first = [queue.take(1)[0].priority for _ in range(90)]
    shares = [first.count(rank) for rank in range(len(PRIORITIES))]
    assert shares[HIGH] >= 70
    assert min(shares) >= 8


def test_batch_is_filled_across_classes_and_a_lone_job_goes_by_itself():
    high, normal, alone, low = new_job(HIGH), new_job(), new_job(kind="describe"), new_job(LOW)
    queue = queue_of(low, normal, alone, high)
    assert queue.take(8) == [high, normal]
    assert queue.take(8) == [alone]
    assert queue.take(8) == [low]


def test_jobs_of_any_class_are_put_back_removed_and_taken_together():
    first, second, third = new_job(HIGH), new_job(HIGH), new_job(LOW)
    queue = queue_of(second, third)
    queue.put_back(first)
    assert queue.oldest is first
    first.cancel()
    first.cancel()
    assert len(queue) == 2
    assert queue.take_all() == [second, third]
    assert len(queue) == 0
    queue.put(new_job())
    assert len(queue.take(4)) == 1
