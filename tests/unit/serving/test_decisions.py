"""Batching, placement and recovery: decisions without effects."""

from __future__ import annotations

import signal

import pytest

from flambeau.serving.scheduling.batching import AHEAD_OF_QUICK, BatchLimits, may_send_ahead, smoothed, wait_s
from flambeau.serving.workers.placement import next_device, threads_per_worker
from flambeau.serving.workers.recovery import Death, backoff_s, describe_exit, is_hopeless, should_retry

QUICK, SLOW = 0.0001, 0.5


def test_idle_worker_never_waits_unless_the_model_asks_for_it():
    assert wait_s(1, 0.0, BatchLimits(size=8)) == 0


def test_batch_leaves_when_it_is_full_or_its_oldest_job_has_waited_long_enough():
    limits = BatchLimits(size=8, delay_s=0.1)
    assert wait_s(7, 0.04, limits) == pytest.approx(0.06)
    assert wait_s(8, 0.0, limits) == 0
    assert wait_s(1, 0.1, limits) <= 0


def ahead(waiting, in_flight, service_s, size=1, only=False):
    return may_send_ahead(waiting, in_flight, service_s, BatchLimits(size=size), is_only_worker=only)


def test_quick_worker_is_fed_ahead_and_a_slow_one_is_not():
    assert ahead(1, 1, QUICK)
    assert not ahead(1, AHEAD_OF_QUICK, QUICK)
    assert not ahead(1, 1, SLOW)
    assert not ahead(1, 1, None)


def test_only_worker_is_fed_one_batch_ahead():
    assert ahead(1, 1, SLOW, only=True)
    assert not ahead(1, 2, SLOW, only=True)


def test_only_full_batches_are_sent_ahead():
    assert not ahead(3, 1, QUICK, size=4)
    assert ahead(4, 1, QUICK, size=4)


def test_service_time_follows_a_slow_down_at_once():
    assert smoothed(None, 0.5) == 0.5
    assert smoothed(0.001, 1.0) == 1.0
    assert 0.9 < smoothed(1.0, 0.001) < 1.0


def test_device_with_the_fewest_workers_comes_next():
    taken = []
    for _ in range(5):
        taken.append(next_device(range(3), taken))
    assert taken == [0, 1, 2, 0, 1]
    assert next_device([2, 0], []) == 2
    assert next_device([], []) is None


def test_workers_share_the_cores():
    assert threads_per_worker(8, 2) == 4
    assert threads_per_worker(2, 4) == 1
    assert threads_per_worker(4, 0) == 4
    assert threads_per_worker(8, 2, is_pipelined=True) == 3
    assert threads_per_worker(1, 1, is_pipelined=True) == 1


def test_first_restart_comes_at_once_and_the_next_ones_later():
    assert [backoff_s(n) for n in range(1, 8)] == [0, 1, 1, 2, 3, 5, 8]
    assert backoff_s(1000) == 1597


def test_worker_is_given_up_when_the_next_try_lies_beyond_the_time_for_trying():
    assert not is_hopeless(1, 0.0, 0.0)  # the first restart comes at once
    assert is_hopeless(2, 0.0, 0.5)
    assert not is_hopeless(12, 143.0, 300)
    assert is_hopeless(13, 232.0, 300)


def retry(death, batch_size=1, crashes=1, started=False, can_go_on=False):
    return should_retry(death, batch_size=batch_size, crashes=crashes, reply_started=started, can_go_on=can_go_on)


def test_lone_job_whose_worker_ended_by_its_own_doing_is_the_culprit():
    assert not retry(Death(reason="", exit_code=3))
    assert not retry(Death(reason="", signal=signal.SIGSEGV))


def test_job_of_a_batch_or_of_a_worker_killed_from_outside_may_be_innocent_once():
    assert retry(Death(reason="", exit_code=3), batch_size=4)
    assert retry(Death(reason="", signal=signal.SIGKILL))
    assert not retry(Death(reason="", signal=signal.SIGKILL), crashes=2)
    assert not retry(Death(reason="", signal=signal.SIGKILL, by_server=True))
    assert not retry(Death(reason="", signal=signal.SIGKILL, out_of_memory=True))


def test_job_of_a_worker_that_had_to_go_is_innocent():
    death = Death(reason="", signal=signal.SIGKILL, by_server=True, spares_jobs=True)
    assert retry(death)
    assert not retry(death, crashes=2)
    assert not retry(death, started=True)


def test_reply_that_has_begun_and_can_go_on_survives_three_deaths():
    killed = Death(reason="", signal=signal.SIGKILL)
    assert [retry(killed, crashes=n, started=True, can_go_on=True) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not retry(Death(reason="", exit_code=3), started=True, can_go_on=True)  # alone: it is the culprit
    assert retry(Death(reason="", exit_code=3), batch_size=2, started=True, can_go_on=True)


def test_reply_that_has_begun_is_never_repeated():
    assert not retry(Death(reason="", signal=signal.SIGKILL), batch_size=4, started=True)


def test_exit_statuses_in_words():
    assert describe_exit(3) == ("exited with code 3", None)
    assert describe_exit(-11) == ("killed by SIGSEGV (signal 11)", 11)
    assert describe_exit(-64)[1] == 64
