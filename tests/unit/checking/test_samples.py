"""Bad requests, and what is made of the answers to them."""

from __future__ import annotations

import json
import time

import pytest

from flambeau.checking.calling import Ended, Outcome, TooSlow, attempt, guarded
from flambeau.checking.checks import judge_hostile
from flambeau.checking.samples import JSON, Sample, hostile_samples
from flambeau.errors import BadRequest, PredictionException


def test_bad_requests_are_of_every_kind():
    bad = {sample.name: sample for sample in hostile_samples(Sample("x.png", "image/png", b"12345678"))}
    assert bad["truncated sample"].body == b"1234"
    assert bad["a good body as application/json"].content_type == JSON
    assert bad["random bytes as image/png"].body == bad["random bytes"].body
    assert json.loads(bad["huge string"].body)
    assert len(bad) == 11
    assert "truncated sample" not in {s.name for s in hostile_samples(Sample("x", JSON, b"1"))}


@pytest.mark.parametrize(
    ("outcome", "level", "words"),
    [
        (Outcome(replies=[b"x"]), "ok", "answered"),
        (Outcome(replies=[b"x"], statuses=[422]), "ok", "answered"),
        (Outcome(replies=[b"x"], statuses=[500]), "note", "status 500"),
        (Outcome(error=PredictionException("no x", 422)), "ok", "refused with 422: no x"),
        (Outcome(error=BadRequest("a form")), "ok", "refused with 400"),
        (Outcome(error=PredictionException("no x")), "note", "answers 500"),
        (Outcome(error=KeyError("x")), "note", "answers 503 (KeyError: 'x'); raise PredictionException(…, 400)"),
        (Outcome(error=MemoryError()), "note", "answers 507"),
        (Outcome(error=TooSlow("no answer within 1 s")), "problem", "no answer within 1 s"),
        (Outcome(error=SystemExit(3)), "problem", "sys.exit(3) would end the worker"),
        (Outcome(error=Ended("os._exit(1)")), "problem", "os._exit(1) would end the worker"),
    ],
)
def test_answers_to_bad_requests_are_judged(outcome, level, words):
    judged, text = judge_hostile(outcome)
    assert judged == level
    assert words in text


def hang() -> None:
    while True:
        time.sleep(0.01)


def test_call_that_hangs_is_interrupted_and_the_next_one_runs():
    _, outcome = attempt(hang, 0.05)
    assert "no answer within 0.05 s" in outcome.reason
    assert "test_samples.py:" in outcome.reason
    result, outcome = attempt(lambda: 5, 0.05)
    assert (result, outcome.error) == (5, None)


def test_stopping_by_hand_is_no_finding():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt, 1)


def test_what_was_there_before_the_guard_is_there_after_it():
    import os
    import signal

    before = os._exit, signal.getsignal(signal.SIGALRM)
    with guarded(1):
        assert os._exit is not before[0]
    assert (os._exit, signal.getsignal(signal.SIGALRM)) == before
