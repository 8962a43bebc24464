"""Slow and hung workers are told apart."""

from __future__ import annotations

import pytest

from flambeau.serving.workers.health import (
    LOOP_FACTOR,
    MAX_BATCHES,
    MIN_BATCHES,
    UNPROVEN_FACTOR,
    StepTimes,
    WorkerWatch,
    hang_in_words,
    hung_after_s,
    needs_proof,
    sign_of_hang,
    slow_after_s,
    slowness_in_words,
)
from flambeau.serving.workers.process_state import ProcessState


def learned(seconds, count=100):
    times = StepTimes()
    for _ in range(count):
        times.add(seconds)
    return times


def state(activity, user_s=0.0, system_s=0.0, num_events=0):
    return ProcessState(activity=activity, user_s=user_s, system_s=system_s, num_events=num_events)


def test_usual_time_is_one_within_which_nearly_all_batches_were_done():
    times = learned(0.05, 990)
    for _ in range(10):
        times.add(3.0)
    assert 0.05 <= times.usual_s <= 0.1
    times.add(3.0)
    assert 3.0 <= times.usual_s <= 6.0
    assert StepTimes().usual_s == 0.0


def test_old_times_count_less_and_less():
    times = learned(4.0, MAX_BATCHES)
    for _ in range(8 * MAX_BATCHES):
        times.add(0.001)
    assert times.usual_s < 0.01


def test_times_beyond_the_last_bucket_are_kept():
    assert learned(1e9).usual_s > 1e6


def test_computation_is_only_a_hang_if_the_model_is_known_to_be_quicker_or_it_is_proven():
    assert needs_proof("computing", StepTimes())
    assert needs_proof("computing", learned(0.01, 19))
    assert not needs_proof("computing", learned(0.01))
    assert not needs_proof("locked", StepTimes())
    assert hung_after_s("computing", StepTimes(), 10) == 30
    assert hung_after_s("computing", learned(0.01), 10) == 30
    assert hung_after_s("computing", learned(10), 10) >= 100
    assert hung_after_s("stopped", StepTimes(), 10) == hung_after_s("locked", StepTimes(), 10) == 10


def test_worker_is_slow_if_it_takes_ten_times_as_long_as_usual():
    assert slow_after_s(StepTimes(), 10) == 10
    assert slow_after_s(learned(0.001), 10) == 1
    assert 5 <= slow_after_s(learned(0.5), 10) <= 10


@pytest.mark.parametrize(
    ("before", "after", "sign"),
    [
        (None, state("stopped"), "stopped"),
        (None, state("locked"), None),  # one look is not enough
        (state("locked"), state("locked"), "locked"),
        (state("locked"), state("locked", user_s=0.5), None),  # it ran in between
        (state("active"), state("locked"), None),
        (state("active"), state("active"), None),
        (state("computing"), state("computing", user_s=1.0), "computing"),
        (state("computing"), state("computing", user_s=0.0), "computing"),  # the machine is busy
        (state("computing"), state("computing", user_s=1.0, num_events=50), None),  # it allocates, or reads
        (state("computing"), state("computing", user_s=1.0, system_s=0.5), None),  # it makes system calls
        (state("computing"), state("locked"), None),
        (state("locked"), state("gone"), None),
    ],
)
def test_signs_of_a_hang(before, after, sign):
    assert sign_of_hang(before, after) == sign


def test_time_counts_from_the_first_look_that_shows_the_sign():
    watch = WorkerWatch()
    watch.see(state("active"), 0.0)
    watch.see(state("locked"), 1.0)
    watch.see(state("locked"), 2.0)
    watch.see(state("locked"), 5.0)
    assert (watch.hang, watch.held_s(100.0, 5.0)) == ("locked", 3.0)
    assert watch.held_s(0.5, 5.0) == 0.5  # it made progress after that look
    watch.see(state("active"), 6.0)
    watch.see(state("locked"), 7.0)
    watch.see(state("locked"), 8.0)
    assert watch.held_s(100.0, 9.0) == 1.0


def test_computing_time_counts_and_not_the_time_that_passes():
    watch = WorkerWatch()
    for i in range(5):
        watch.see(state("computing", user_s=0.1 * i), float(i))
    assert watch.held_s(100.0, 4.0) == pytest.approx(0.3)


def test_stopped_worker_hangs_also_without_a_job():
    watch = WorkerWatch()
    watch.see(state("stopped"), 1.0)
    assert watch.held_s(0.0, 12.0) == 11.0
    watch.clear()
    assert watch.hang is None


def test_sign_must_be_seen_often_and_for_long_enough():
    watch = WorkerWatch()
    seen = []
    for second in range(6):
        watch.see(state("locked"), float(second))
        seen.append(watch.has_lasted(100.0, float(second), StepTimes(), 3))
    assert seen == [False, False, False, False, True, True]  # it counts from the second look on
    late = WorkerWatch()
    late.see(state("stopped"), 0.0)
    assert not late.has_lasted(0.0, 60.0, StepTimes(), 3)  # the server itself was held up
    assert not WorkerWatch().has_lasted(100.0, 100.0, StepTimes(), 3)


def test_words_name_the_cause():
    assert "SIGSTOP" in hang_in_words("stopped", 10, "", StepTimes())
    assert "lock" in hang_in_words("locked", 10, "handle, line 3 of handler.py", StepTimes())
    assert "handle, line 3" in hang_in_words("computing", 10, "handle, line 3 of handler.py", learned(0.1))
    assert slowness_in_words(12, "computing", learned(0.1)).startswith(
        "slow: no progress for 12 s, it computes; usually"
    )
    assert slowness_in_words(12, None, StepTimes()) == "slow: no progress for 12 s"


def test_a_computation_whose_source_does_not_show_a_loop_without_an_end_gets_longer():
    times = StepTimes()
    for _ in range(MIN_BATCHES):
        times.add(0.001)
    assert hung_after_s("computing", times, 1.0) == LOOP_FACTOR
    assert hung_after_s("computing", times, 1.0, is_unproven=True) == UNPROVEN_FACTOR > 10
    watch = WorkerWatch(is_unproven=True)
    watch.clear()
    assert not watch.is_unproven
