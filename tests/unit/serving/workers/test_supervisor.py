"""What the supervisor does with a worker, and which events it reports."""

from __future__ import annotations

import asyncio

from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import WorkerRef
from flambeau.serving.workers.supervisor import Slot, Supervisor
from support.fake_workers import CRASH, FakeWorker, ScriptedWorker, until


class Events:
    """Keeps the names of events."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        return lambda *_, **__: self.names.append(name)


def new_supervisor(new_worker=lambda slot: ScriptedWorker(), *, max_retry_s=300, startup_timeout_s=10):
    workers = []
    supervisor = Supervisor(
        new_worker=new_worker,
        on_started=workers.append,
        on_exited=workers.remove,
        on_change=lambda: None,
        events=Events(),
        startup_timeout_s=startup_timeout_s,
        max_retry_s=max_retry_s,
    )
    return supervisor, workers


def new_slot():
    return Slot(WorkerRef(9000, "m", "1.0"))


async def test_worker_that_crashes_is_replaced_and_the_last_one_is_retired():
    supervisor, workers = new_supervisor()
    slot = new_slot()
    slot.task = asyncio.create_task(supervisor.keep_alive(slot))
    await until(lambda: slot.is_ready)
    first = slot.worker
    first.kill(CRASH)
    await until(lambda: slot.is_ready and slot.worker is not first)
    await supervisor.retire(slot, 1)
    assert slot.task.result() is None
    assert workers == []
    assert supervisor.num_restarts == slot.restarts == 1
    assert supervisor._events.names == [
        "worker_starting",
        "worker_loaded",
        "worker_exited",
        "worker_retried",
        "worker_starting",
        "worker_loaded",
        "worker_retired",
    ]


async def test_worker_that_cannot_load_is_tried_until_the_time_for_retries_is_over():
    supervisor, _ = new_supervisor(lambda slot: ScriptedWorker(CRASH), max_retry_s=0.0)
    slot = new_slot()
    assert await supervisor.keep_alive(slot) == CRASH
    assert slot.failures == 2  # the first restart comes at once
    assert supervisor._events.names[-2:] == ["worker_starting", "worker_exited"]


async def test_worker_that_takes_too_long_to_load_is_killed():
    supervisor, _ = new_supervisor(lambda slot: FakeWorker(), max_retry_s=-1, startup_timeout_s=0.01)
    worker_exit = await supervisor.keep_alive(new_slot())
    assert worker_exit.reason == "the model was not loaded within startupTimeout, 0.01 s"
    assert worker_exit.while_loading
    assert "worker_load_timed_out" in supervisor._events.names


async def test_slot_that_waits_for_a_restart_can_be_retired():
    supervisor, _ = new_supervisor(lambda slot: ScriptedWorker(CRASH))
    slot = new_slot()
    slot.task = asyncio.create_task(supervisor.keep_alive(slot))
    await until(lambda: slot.failures == 2)
    await supervisor.retire(slot, 1)
    assert slot.task.cancelled()


def test_model_that_could_be_loaded_is_not_abandoned_for_later_crashes():
    slot = new_slot()
    slot.note_exit(CRASH, was_ready=False, was_useful=False)
    slot.waited_s = 1000
    slot.note_exit(CRASH, was_ready=True, was_useful=False)
    assert slot.waited_s == 0
    assert slot.failures == 2  # back-off goes on


def test_worker_that_answered_anything_ends_the_back_off():
    slot = new_slot()
    for _ in range(5):
        slot.note_exit(CRASH, was_ready=True, was_useful=False)
    slot.note_exit(CRASH, was_ready=True, was_useful=True)
    assert slot.failures == 1


def test_slot_fails_for_good_only_after_a_final_exit():
    slot = new_slot()
    slot.is_abandoned = True
    slot.last_exit = CRASH
    assert not slot.has_failed_for_good
    slot.last_exit = WorkerExit(reason="", is_final=True)
    assert slot.has_failed_for_good
