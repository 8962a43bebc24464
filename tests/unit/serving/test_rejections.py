"""The words of refusals, which clients match."""

from __future__ import annotations

from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.rejections import REMEDY, no_worker, not_loaded, queue_full, rejected

CRASH = WorkerExit(reason="exited with code 1")


def test_text_is_torchserves_quotes_and_all():
    assert str(rejected("m", None)) == f'Model "m" has no worker to serve inference request. {REMEDY}'
    assert str(rejected("m", "2")) == f'Model "m" Version 2" has no worker to serve inference request. {REMEDY}'


def test_what_is_ours_follows():
    assert str(no_worker("m", None, CRASH)).endswith(f"{REMEDY}. The last worker: exited with code 1")
    assert str(no_worker("m", None, None)).endswith(REMEDY)
    assert str(not_loaded("m", CRASH)) == 'Model "m" has no worker yet and is tried again: exited with code 1'


def test_full_queue_says_when_to_come_again():
    assert queue_full("m", None, 10, drained_in_s=0.1).retry_after_s == 1
    error = queue_full("m", "1", 10, drained_in_s=7.6)
    assert error.retry_after_s == 8
    assert "All 10 places" in str(error)
