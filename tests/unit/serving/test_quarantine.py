"""Requests that end workers are refused; others, and those that were answered since, are not."""

from __future__ import annotations

import signal

import pytest

from flambeau.errors import JobFailed, RequestQuarantined
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.job import RequestBody
from flambeau.serving.quarantine import MAX_SUSPECTS, QUARANTINE_S, Quarantine
from flambeau.wire.messages import Part
from support.jobs import new_job

CRASH = WorkerExit(reason="exited with code 3", exit_code=3)
KILLED = WorkerExit(reason="killed by SIGKILL (signal 9)", signal=signal.SIGKILL)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def quarantine(clock):
    return Quarantine("m", 2, clock)


def job_of(content, **headers):
    job = new_job()
    job.body, job.headers = RequestBody(content), [*headers.items()]
    return job


def is_refused(quarantine, content):
    try:
        quarantine.check(job_of(content))
    except RequestQuarantined:
        return True
    return False


def test_request_that_ended_two_workers_is_refused_with_the_cause(quarantine):
    for attempt in ("1", "2"):
        assert not is_refused(quarantine, b"poison")
        quarantine.blame(job_of(b"poison", attempt=attempt), CRASH)
    with pytest.raises(RequestQuarantined, match=r"has ended 2 workers of model 'm'.* 10 minutes") as refused:
        quarantine.check(job_of(b"poison", attempt="3"))
    assert refused.value.cause == "exited with code 3"
    assert not is_refused(quarantine, b"water")


def test_refusal_ends_after_a_time(quarantine, clock):
    for _ in range(2):
        quarantine.blame(job_of(b"poison"), CRASH)
    clock.now += QUARANTINE_S
    assert is_refused(quarantine, b"poison")
    clock.now += 1
    assert not is_refused(quarantine, b"poison")
    quarantine.blame(job_of(b"poison"), CRASH)
    assert not is_refused(quarantine, b"poison")


@pytest.mark.parametrize(
    "answer",
    [
        lambda job: job.deliver([Part(job.id, b"fine")]),
        lambda job: job.deliver([Part(job.id, b"it begins", last=False)]),
        lambda job: job.fail(JobFailed("The handler refuses it.", status=400)),
    ],
)
def test_answer_to_the_same_request_clears_it(quarantine, answer):
    quarantine.blame(job_of(b"water"), CRASH)
    again = job_of(b"water")
    quarantine.check(again)
    answer(again)
    quarantine.blame(job_of(b"water"), CRASH)
    assert not is_refused(quarantine, b"water")


def test_worker_that_was_killed_from_outside_blames_nobody(quarantine):
    for _ in range(3):
        quarantine.blame(job_of(b"water"), KILLED)
        quarantine.blame(job_of(b"water"), WorkerExit(reason="the server stops", spares_jobs=True))
    assert not is_refused(quarantine, b"water")


def test_number_of_suspects_is_bounded(quarantine):
    for number in range(MAX_SUSPECTS + 1):
        for _ in range(2):
            quarantine.blame(job_of(b"%d" % number), CRASH)
    assert not is_refused(quarantine, b"0")
    assert is_refused(quarantine, b"1")
