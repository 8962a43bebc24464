from __future__ import annotations

import dataclasses

import pytest

from flambeau.serving.workers.scaling_policy import (
    SETTLE_S,
    LoadSample,
    ScalingLimits,
    ScalingPolicy,
    has_room,
    patience_s,
)

LIMITS = ScalingLimits(minimum=1, maximum=4, target_queue_s=0.1, idle_s=60)
BUSY = LoadSample(present=1, ready=1, busy=1, wait_s=0.5, quiet_s=0.0)
IDLE = LoadSample(present=3, ready=3, busy=0, wait_s=0.0, quiet_s=0.0)
LATER = SETTLE_S + 0.1


def looks(sight, limits=LIMITS, *, seconds, every=0.1, scaler=None):
    """What is wanted over that many seconds of the same sight, each number once."""
    scaler = scaler or ScalingPolicy(0.0)
    wanted = [scaler.decide(sight, limits, LATER + i * every) for i in range(round(seconds / every))]
    return sorted(set(wanted) - {sight.present})


def test_worker_is_added_when_jobs_wait_too_long():
    assert looks(BUSY, seconds=1) == [2]


def test_one_step_at_a_time():
    scaler = ScalingPolicy(0.0)
    assert scaler.decide(BUSY, LIMITS, 10.0) == 2
    starting = dataclasses.replace(BUSY, present=2)
    assert [scaler.decide(starting, LIMITS, 10.0 + i) for i in range(1, 30)] == [2] * 29  # the new one loads
    loaded = dataclasses.replace(BUSY, present=2, ready=2, busy=2)
    assert scaler.decide(loaded, LIMITS, 39.5) == 2  # its effect must show first
    assert scaler.decide(loaded, LIMITS, 41.0) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"wait_s": 0.05},  # soon enough
        {"present": 4, "ready": 4, "busy": 4},  # as many as there may be
        {"present": 2},  # one starts, or cannot load
        {"present": 2, "ready": 2, "busy": 1},  # one is free: the jobs wait for company
    ],
)
def test_nothing_is_added_where_it_would_not_help_or_may_not_be(change):
    assert looks(dataclasses.replace(BUSY, **change), seconds=30) == []


def test_short_burst_does_not_start_a_worker_that_takes_long_to_load():
    slow = dataclasses.replace(BUSY, load_s=30.0)
    assert looks(slow, seconds=2.5) == []
    assert looks(slow, seconds=3.5) == [2]
    assert patience_s(10_000) == 5


def test_wait_that_is_interrupted_begins_anew():
    scaler, slow = ScalingPolicy(0.0), dataclasses.replace(BUSY, load_s=30.0)
    for i in range(10):
        at = LATER + 2 * i
        assert scaler.decide(slow, LIMITS, at) == 1
        assert scaler.decide(slow, LIMITS, at + 1.5) == 1
        assert scaler.decide(dataclasses.replace(slow, wait_s=0.0), LIMITS, at + 1.6) == 1


def test_worker_that_was_not_needed_for_long_goes():
    one_works = dataclasses.replace(IDLE, busy=1)
    assert looks(one_works, seconds=58) == []
    assert looks(one_works, seconds=70) == [2]


def test_worker_that_is_needed_now_and_then_stays():
    scaler = ScalingPolicy(0.0)
    for i in range(20):
        sight = dataclasses.replace(IDLE, busy=3 if i % 2 else 1)
        assert scaler.decide(sight, LIMITS, 40.0 * i + LATER) == 3


def test_model_without_requests_shrinks_to_its_minimum_at_once():
    assert looks(dataclasses.replace(IDLE, quiet_s=61.0), seconds=70) == [1]


def test_model_falls_asleep_only_where_it_may():
    quiet = dataclasses.replace(IDLE, present=1, ready=1, quiet_s=100.0)
    assert looks(quiet, seconds=70) == []
    assert looks(quiet, dataclasses.replace(LIMITS, scales_to_zero=True), seconds=70) == [0]
    assert looks(quiet, dataclasses.replace(LIMITS, minimum=0), seconds=70) == [0]
    working = dataclasses.replace(quiet, busy=1)
    assert looks(working, dataclasses.replace(LIMITS, scales_to_zero=True), seconds=70) == []


def test_idle_time_begins_when_the_model_has_loaded():
    limits = dataclasses.replace(LIMITS, scales_to_zero=True)
    scaler = ScalingPolicy(0.0)
    loading = LoadSample(present=1, ready=0, busy=0, wait_s=0.0, quiet_s=100.0)
    assert looks(loading, limits, seconds=100, scaler=scaler) == []
    assert scaler.decide(dataclasses.replace(loading, ready=1), limits, 102.0) == 1
    assert scaler.decide(dataclasses.replace(loading, ready=1, quiet_s=161.0), limits, 163.0) == 0


def test_limits_that_leave_nothing_to_decide():
    assert not ScalingLimits(minimum=2, maximum=2).leave_room
    assert not ScalingLimits(minimum=0, maximum=0).leave_room
    assert not ScalingLimits(minimum=0, maximum=0, scales_to_zero=True).leave_room
    assert ScalingLimits(minimum=1, maximum=1, scales_to_zero=True).leave_room
    assert ScalingLimits(minimum=1, maximum=2).leave_room


def test_more_workers_than_the_maximum_are_not_the_business_of_growth():
    assert looks(dataclasses.replace(BUSY, present=6, ready=6, busy=6), seconds=10) == []


def test_memory_must_be_left_for_one_more():
    assert has_room(1200, 1000)
    assert not has_room(1000, 1000)
    assert has_room(None, 1000)  # where it cannot be told
