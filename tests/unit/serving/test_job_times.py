"""The parts of a job's time add up to the whole."""

from __future__ import annotations

import pytest

from flambeau.serving.job_times import JobTimes, spans_of
from flambeau.wire.messages import GenerationWork, Work


def times(**fields):
    given = {"arrived": 10.0, "sent": 10.5, "started": 10.5, "received": 12.0, "worker": "w", "batch_size": 1}
    return JobTimes(**{**given, **fields})


def seconds_of(job_times):
    spans = spans_of(job_times)
    at = job_times.arrived
    for _, began, seconds in spans:
        assert began == pytest.approx(at)
        at += seconds
    assert at == pytest.approx(job_times.received)
    return {name: round(seconds, 6) for name, _, seconds in spans}


def test_parts_of_a_whole_reply():
    work = Work(10.6, 11.9, 0.1, 1.1, (0.2, 0.5, 0.3))
    assert seconds_of(times(work=work)) == {
        "queue": 0.5,
        "to_worker": 0.1,
        "read": 0.1,
        "preprocess": 0.2,
        "inference": 0.5,
        "postprocess": 0.3,
        "handler": 0.1,
        "reply": 0.1,
        "to_server": 0.1,
    }


def test_stages_that_are_not_known_are_the_handlers_time():
    assert seconds_of(times(work=Work(10.5, 11.75, 0.0, 1.25))) == {"queue": 0.5, "handler": 1.25, "to_server": 0.25}


def test_stages_that_ran_side_by_side_are_not_shown():
    found = seconds_of(times(work=Work(10.5, 11.75, 0.0, 1.25, (1.0, 1.0, 1.0))))
    assert found == {"queue": 0.5, "handler": 1.25, "to_server": 0.25}


def test_wait_for_a_fuller_batch_is_no_queue_time():
    found = seconds_of(times(held_since=10.2, work=Work(10.5, 12.0, 0.0, 1.5)))
    assert found == {"queue": 0.2, "batch_wait": 0.3, "handler": 1.5}
    assert times(held_since=10.2).queue_s == pytest.approx(0.2)
    assert times(held_since=10.2).batch_wait_s == pytest.approx(0.3)


def test_job_that_arrives_while_a_batch_is_held_waits_only_for_the_batch():
    assert seconds_of(times(held_since=9.0)) == {"batch_wait": 0.5, "worker": 1.5}


def test_time_behind_another_batch_of_the_worker_is_queue_time():
    # It was sent at 10.1 and could begin at 11.0, where the worker began a moment before the server knew.
    found = seconds_of(times(sent=10.1, started=11.0, work=Work(10.99, 11.99, 0.0, 1.0)))
    assert found == {"queue": 0.99, "handler": 1.0, "to_server": 0.01}


def test_time_with_workers_that_were_lost_is_a_part_of_its_own():
    found = seconds_of(times(retried=10.4, work=Work(10.5, 12.0, 0.0, 1.5)))
    assert found == {"lost": 0.4, "queue": 0.1, "handler": 1.5}


def test_head_of_a_stream_knows_the_queue():
    assert seconds_of(times()) == {"queue": 0.5, "worker": 1.5}


def test_parts_of_a_generation():
    work = Work(10.6, 11.9, 0.1, 1.2, generation=GenerationWork(0.2, 5, 0, 7))
    assert seconds_of(times(work=work)) == {
        "queue": 0.5,
        "to_worker": 0.1,
        "read": 0.1,
        "first_token": 0.2,
        "generate": 1.0,
        "to_server": 0.1,
    }


@pytest.mark.parametrize("began", [5000.0, 0.0])
def test_worker_with_another_clock_has_one_part_for_both_transfers(began):
    found = seconds_of(times(work=Work(began, began + 1.25, 0.0, 1.25)))
    assert found == {"queue": 0.5, "transfer": 0.25, "handler": 1.25}
