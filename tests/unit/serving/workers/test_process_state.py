"""What the kernel shows of a process."""

from __future__ import annotations

import os

import pytest

from flambeau.serving.workers.process_state import (
    FUTEX,
    GONE,
    ThreadState,
    activity_of,
    is_endless_lock,
    is_stopped,
    read_process,
)
from flambeau.wire.stack_dumps import WATCHER

LOCK = f"{FUTEX} 0x55 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7e"
TIMED = f"{FUTEX} 0x55 0x89 0x0 0x7ffd90e21200 0x0 0xffffffff 0x7f 0x7e"
SLEEP = "230 0x1 0x1 0x7ffc2757c170 0x0 0x0 0x0 0x7f 0x7e"


def thread(call, state="S", name="python3"):
    return ThreadState(name, state, call, 0)


WATCH = thread("7 0x55 0x0 0xffffffff", name=WATCHER)


@pytest.mark.parametrize(("call", "is_lock"), [(LOCK, True), (TIMED, False), (SLEEP, False), ("running", False)])
def test_lock_without_a_time_limit_is_recognized(call, is_lock):
    assert is_endless_lock(call) is is_lock


@pytest.mark.parametrize(
    ("threads", "activity"),
    [
        ([thread(LOCK), WATCH], "locked"),
        ([thread(LOCK), thread(LOCK), WATCH], "locked"),
        ([thread(LOCK), thread(SLEEP), WATCH], "active"),  # that thread may release it
        ([thread(LOCK), thread(TIMED), WATCH], "active"),
        ([thread(SLEEP), WATCH], "active"),
        ([thread("", state="S"), WATCH], "active"),  # the kernel hides the call
        ([thread("running", state="R"), WATCH], "computing"),
        ([thread("running", state="R"), thread(LOCK), WATCH], "computing"),
        ([thread("running", state="R"), thread("running", state="R")], "active"),
        ([thread(LOCK, state="T"), thread("", state="T", name=WATCHER)], "stopped"),
        ([thread(LOCK, state="t"), thread("", state="t", name=WATCHER)], "active"),  # somebody debugs it
        ([WATCH], "active"),
    ],
)
def test_activity_of_a_process(threads, activity):
    assert activity_of(threads, has_active_children=False) == activity


def test_child_may_end_the_wait_of_its_parent():
    assert activity_of([thread(LOCK)], has_active_children=True) == "active"


def test_process_that_is_gone_has_no_state():
    assert read_process(2**22 + 1) is GONE
    assert not is_stopped(2**22 + 1)


def test_own_process_is_read():
    state = read_process(os.getpid())
    assert state.activity in ("computing", "active")
    assert state.user_s > 0
    assert state.num_events > 0
    assert "running" in str(state)
    assert not is_stopped(os.getpid())
