"""A guarded call can neither hang nor exit this process."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from flambeau.handler_checks.guarded_call import JSON, Sample, guarded, guarded_call, malformed_samples


def hang() -> None:
    while True:
        time.sleep(0.01)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_call_that_hangs_is_interrupted_and_the_next_one_runs():
    _, outcome = guarded_call(hang, 0.05)
    assert "no answer within 0.05 s" in outcome.reason
    assert "test_guarded_call.py:" in outcome.reason
    result, outcome = guarded_call(lambda: 5, 0.05)
    assert (result, outcome.error) == (5, None)


def test_exit_of_the_process_becomes_an_outcome():
    _, outcome = guarded_call(lambda: os._exit(1), 1)
    assert outcome.ends_worker
    assert "os._exit(1)" in outcome.reason


def test_keyboard_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        guarded_call(interrupt, 1)


def test_guard_restores_what_it_replaced():
    before = os._exit, signal.getsignal(signal.SIGALRM)
    with guarded(1):
        assert os._exit is not before[0]
    assert (os._exit, signal.getsignal(signal.SIGALRM)) == before


def test_malformed_requests_are_of_every_kind():
    bad = {sample.name: sample for sample in malformed_samples(Sample("x.png", "image/png", b"12345678"))}
    assert bad["truncated sample"].body == b"1234"
    assert bad["a good body as application/json"].content_type == JSON
    assert bad["random bytes as image/png"].body == bad["random bytes"].body
    assert json.loads(bad["huge string"].body)
    assert len(bad) == 11


def test_one_byte_cannot_be_truncated():
    assert "truncated sample" not in {sample.name for sample in malformed_samples(Sample("x", JSON, b"1"))}
