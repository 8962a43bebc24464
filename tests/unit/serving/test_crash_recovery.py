"""What follows the exit of a worker: for its jobs and for the worker."""

from __future__ import annotations

import signal

import pytest

from flambeau.serving.crash_recovery import (
    WorkerExit,
    backoff_s,
    describe_exit,
    is_same_failure,
    should_abandon,
    should_retry,
)


def test_first_restart_comes_at_once_and_the_next_ones_later():
    assert [backoff_s(n) for n in range(1, 8)] == [0, 1, 1, 2, 3, 5, 8]
    assert backoff_s(1000) == 1597


def test_worker_is_given_up_when_the_next_try_lies_beyond_the_time_for_trying():
    assert not should_abandon(1, 0.0, 0.0)  # the first restart comes at once
    assert should_abandon(2, 0.0, 0.5)
    assert not should_abandon(12, 143.0, 300)
    assert should_abandon(13, 232.0, 300)


def retry(worker_exit, batch_size=1, crashes=1, started=False, can_resume=False):
    return should_retry(
        worker_exit, batch_size=batch_size, crashes=crashes, reply_started=started, can_resume=can_resume
    )


def test_lone_job_whose_worker_ended_by_its_own_doing_is_the_culprit():
    assert not retry(WorkerExit(reason="", exit_code=3))
    assert not retry(WorkerExit(reason="", signal=signal.SIGSEGV))


def test_job_of_a_batch_may_be_innocent_once():
    assert retry(WorkerExit(reason="", exit_code=3), batch_size=4)
    assert not retry(WorkerExit(reason="", exit_code=3), batch_size=4, crashes=2)


def test_job_whose_worker_was_killed_from_outside_is_retried_three_times():
    killed = WorkerExit(reason="", signal=signal.SIGKILL)
    assert [retry(killed, crashes=n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not retry(WorkerExit(reason="", signal=signal.SIGKILL, by_server=True))
    assert not retry(WorkerExit(reason="", signal=signal.SIGKILL, out_of_memory=True))


def test_job_of_a_worker_that_had_to_go_is_innocent():
    worker_exit = WorkerExit(reason="", signal=signal.SIGKILL, by_server=True, spares_jobs=True)
    assert retry(worker_exit)
    assert not retry(worker_exit, crashes=2)
    assert not retry(worker_exit, started=True)


def test_reply_that_has_begun_and_can_resume_survives_three_crashes():
    killed = WorkerExit(reason="", signal=signal.SIGKILL)
    assert [retry(killed, crashes=n, started=True, can_resume=True) for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not retry(WorkerExit(reason="", exit_code=3), started=True, can_resume=True)  # alone: it is the culprit
    assert retry(WorkerExit(reason="", exit_code=3), batch_size=2, started=True, can_resume=True)


def test_reply_that_has_begun_is_never_repeated():
    assert not retry(WorkerExit(reason="", signal=signal.SIGKILL), batch_size=4, started=True)


def test_exit_statuses_in_words():
    assert describe_exit(3) == ("exited with code 3", None)
    assert describe_exit(-11) == ("killed by SIGSEGV (signal 11)", 11)
    assert describe_exit(-64)[1] == 64


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (WorkerExit(reason="exited with code 3", exit_code=3, last_lines=("Thread 0x00007f2e: pid 918",)), True),
        (WorkerExit(reason="exited with code 4", exit_code=4, last_lines=("Thread 0x00007f1a: pid 917",)), False),
        (WorkerExit(reason="exited with code 3", exit_code=3, last_lines=("KeyError: 'x'",)), False),
    ],
)
def test_failures_are_the_same_but_for_addresses_and_process_ids(other, same):
    one = WorkerExit(reason="exited with code 3", exit_code=3, last_lines=("Thread 0x00007f1a: pid 917",))
    assert is_same_failure(one, other) is same


def test_job_that_hangs_two_workers_is_the_culprit():
    hung = WorkerExit(reason="", signal=signal.SIGKILL, by_server=True, is_hung=True)
    assert retry(hung)
    assert not retry(hung, crashes=2)
    assert not retry(hung, started=True)
