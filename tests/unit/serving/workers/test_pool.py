"""The workers of one model: how many run, which failed, and what the model's state is."""

from __future__ import annotations

import asyncio

import pytest

from flambeau.config.model import ModelConfig
from flambeau.errors import WorkersFailed
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents, WorkerRef
from flambeau.serving.workers.device_allocator import next_device
from flambeau.serving.workers.pool import WorkerPool, surplus
from flambeau.serving.workers.supervisor import Slot
from support.fake_workers import CRASH, FakeWorker, ScriptedWorker, until

FINAL = WorkerExit(reason="the model could not be loaded: there is no tokenizer", while_loading=True, is_final=True)
LOADS = None


@pytest.fixture
def short_backoff(monkeypatch):
    """Restarts follow each other at once; how long a real one waits is tested in test_crash_recovery.py."""
    monkeypatch.setattr("flambeau.serving.workers.supervisor.backoff_s", lambda failures: 0.001 * (failures > 1))


class Workers:
    """Creates workers that load or fail as listed, the last entry again and again."""

    def __init__(self, *outcomes):
        self.outcomes = outcomes
        self.made = []

    def __call__(self, slot):
        outcome = self.outcomes[min(len(self.made), len(self.outcomes) - 1)]
        self.made.append(slot)
        return ScriptedWorker(outcome)


def new_pool(*outcomes, new_worker=None, events=None, **settings):
    ids = iter(range(100))

    def new_slot():
        return Slot(WorkerRef(next(ids), "m", "1.0"), (next_device(range(4), [s.device for s in pool.slots]),))

    pool = WorkerPool(
        "model m version: 1.0",
        ModelConfig(startup_timeout_s=10, **settings),
        new_worker=new_worker or Workers(*outcomes or [LOADS]),
        new_slot=new_slot,
        on_change=lambda: None,
        events=events or ServerEvents(),
        drain_timeout_s=1,
    )
    return pool


async def test_workers_of_one_call_are_spread_over_the_devices():
    pool = new_pool()
    pool.scale(4, 4)
    await pool.wait_started(4)
    assert [slot.device for slot in pool.slots] == [0, 1, 2, 3]
    assert pool.num_ready == len(pool.workers) == 4
    await pool.close()
    assert pool.workers == []


async def test_a_stop_does_not_wait_for_a_worker_that_computes_copies_only():
    pool = new_pool(new_worker=lambda slot: FakeWorker())
    owing, copying = pool.scale(2, 2)
    await until(lambda: len(pool.workers) == 2)
    owing, copying = owing.worker, copying.worker
    owing.load(), copying.load()
    owing.num_batches = copying.num_batches = owing.num_owed = 1
    closing = asyncio.ensure_future(pool.close())
    await until(copying.ended.done)
    assert not owing.ended.done()
    owing.kill(CRASH)
    await closing


async def test_scaling_down_retires_the_newest():
    pool = new_pool()
    pool.scale(3, 3)
    await pool.wait_started(3)
    first = pool.slots[0]
    pool.scale(1, 1)
    assert pool.slots == [first]
    await until(lambda: pool.workers == [first.worker])
    await pool.close()


async def test_scaling_down_keeps_ready_workers_before_loading_and_dead_ones():
    pool = new_pool(new_worker=lambda slot: FakeWorker())
    dead, loading, ready, newest = pool.scale(4, 4)
    await until(lambda: len(pool.workers) == 4)
    ready.worker.load()
    newest.worker.load()
    dead.failures = 5  # so its next start is seconds away
    dead.worker.kill(CRASH)
    await until(lambda: dead.worker is None)
    assert [[slot.id for slot in surplus(pool.slots, number)] for number in (4, 3, 2, 1, 0)] == [
        [],
        [dead.id],
        [loading.id, dead.id],
        [newest.id, loading.id, dead.id],
        [ready.id, newest.id, loading.id, dead.id],
    ]
    pool.scale(1, 1)
    assert pool.slots == [ready]
    await pool.close(now=True)


async def test_waiting_for_workers_includes_those_that_restart():
    workers = []

    def new_worker(slot):
        workers.append(FakeWorker())
        return workers[-1]

    pool = new_pool(new_worker=new_worker)
    pool.scale(1, 1)
    await until(lambda: workers)
    workers[0].load()
    await pool.wait_started(1)
    workers[0].kill(CRASH)
    await until(lambda: len(workers) == 2)
    waiting = asyncio.ensure_future(pool.wait_started(1))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    workers[1].load()
    await asyncio.wait_for(waiting, 30)
    await pool.close(now=True)


@pytest.mark.parametrize("end", ["scaling down", "closing"])
async def test_workers_that_are_not_needed_any_more_are_not_awaited(end):
    pool = new_pool(new_worker=lambda slot: FakeWorker())
    pool.scale(2, 2)
    await until(lambda: len(pool.workers) == 2)
    pool.workers[0].load()
    waiting = asyncio.ensure_future(pool.wait_started(2))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    if end == "scaling down":
        pool.scale(1, 1)
    closing = asyncio.ensure_future(pool.close(now=True))
    await asyncio.wait_for(waiting, 30)
    await closing


async def test_slot_that_cannot_load_is_abandoned_in_time_and_replaced_by_scaling():
    pool = new_pool(CRASH, max_retry_s=0.0)
    pool.scale(1, 1)
    await until(lambda: not pool.may_recover)
    assert pool.last_exit == CRASH
    assert pool.state == "failed"
    pool.scale(1, 1)
    assert pool.may_recover
    await pool.close()


@pytest.mark.parametrize("kind", [OSError, RuntimeError, KeyError])
async def test_worker_that_cannot_be_created_is_a_failure_like_others(kind):
    def fail(slot):
        raise kind("no port is free")

    pool = new_pool(new_worker=fail)
    pool.scale(1, 1)
    with pytest.raises(WorkersFailed) as caught:
        await pool.wait_started(1)
    await pool.close()
    assert caught.value.cause == f"it could not be started: {kind('no port is free')}"


async def fail():
    raise RuntimeError("an error in our code")


async def test_exception_in_the_supervision_is_logged(caplog):
    pool = new_pool()
    pool._own(fail())
    await pool.close()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("flambeau.serving.workers.pool", "ERROR")
    assert record.exc_info[0] is RuntimeError


async def test_restarts_are_counted_beyond_the_life_of_their_slots():
    pool = new_pool()
    pool.scale(1, 1)
    await pool.wait_started(1)
    worker = pool.slots[0].worker
    worker.kill(CRASH)
    await until(lambda: pool.has_ready and pool.slots[0].worker is not worker)
    pool.scale(0, 0)
    await pool.close()
    assert pool.num_restarts == 1


async def test_load_that_cannot_succeed_is_tried_once_and_reported_once(caplog):
    caplog.set_level("INFO")
    workers = Workers(FINAL)
    pool = new_pool(new_worker=workers)
    fresh = pool.scale(3, 3)
    with pytest.raises(WorkersFailed) as caught:
        await pool.wait_started(3)
    await asyncio.gather(*(slot.task for slot in fresh))
    assert (caught.value.cause, caught.value.is_final) == (FINAL.reason, True)
    assert pool.has_failed_for_good
    assert not pool.may_recover
    assert len(workers.made) == 3
    await asyncio.gather(*(slot.task for slot in pool.scale(1, 1)))  # the cause may have been removed
    await pool.close()
    assert len(workers.made) == 4
    reported = [(r.event, r.worker) for r in caplog.records if r.levelname == "ERROR"]
    assert reported == [("worker_abandoned", "W-0-m_1.0"), ("worker_abandoned", "W-3-m_1.0")]  # once for each scaling
    assert "worker_retried" not in [record.event for record in caplog.records]


async def test_model_that_was_loaded_before_is_tried_again_whatever_the_cause(short_backoff):
    pool = new_pool(LOADS, FINAL, LOADS)
    pool.scale(1, 1)
    await pool.wait_started(1)
    [slot] = pool.slots
    slot.worker.kill(CRASH)
    await until(lambda: slot.restarts == 2 and slot.is_ready)
    assert slot.last_exit.reason == FINAL.reason
    assert not pool.has_failed_for_good
    await pool.close()


async def test_waiting_for_a_decision_goes_on_until_all_are_abandoned(short_backoff):
    pool = new_pool(CRASH, CRASH, FINAL)
    pool.scale(1, 1)
    with pytest.raises(WorkersFailed) as caught:
        await asyncio.wait_for(pool.wait_decided(), 30)
    await pool.close()
    assert (caught.value.cause, caught.value.is_final) == (FINAL.reason, True)


@pytest.mark.parametrize("outcomes", [[LOADS], [CRASH, LOADS]])
async def test_waiting_for_a_decision_ends_when_a_worker_has_loaded(outcomes):
    pool = new_pool(*outcomes)
    pool.scale(1, 1)
    await asyncio.wait_for(pool.wait_decided(), 30)
    assert pool.has_loaded
    await pool.close()


async def test_state_of_a_model_that_may_sleep():
    pool = new_pool(LOADS, min_workers=0, max_workers=2)
    assert (pool.state, pool.can_answer, pool.is_healthy, pool.num_wanted) == ("sleeping", True, True, 0)
    pool.scale(1, 2)
    await pool.wait_started(1)
    assert (pool.state, pool.is_ready, pool.num_wanted) == ("ready", True, 1)
    await pool.close()
    assert not pool.is_sleeping  # a closed one does not wake


async def test_state_of_a_model_that_needs_its_workers():
    pool = new_pool(new_worker=lambda slot: FakeWorker(), min_workers=2, max_workers=2)
    assert (pool.state, pool.is_healthy, pool.is_ready) == ("without workers", False, False)
    pool.set_bounds(2, 2)
    await until(lambda: len(pool.workers) == 2)
    assert (pool.state, pool.is_healthy, pool.is_ready) == ("loading", True, False)
    pool.workers[0].load()
    assert (pool.state, pool.can_answer, pool.is_ready) == ("ready", True, False)
    pool.workers[1].load()
    await pool.wait_started(2)
    assert pool.is_ready
    await pool.close(now=True)


async def test_model_that_fails_to_load_is_tried_again_and_not_ready():
    pool = new_pool(WorkerExit(reason="no memory", while_loading=True))
    pool.scale(1, 1)
    with pytest.raises(WorkersFailed, match=r"model m version: 1\.0"):
        await pool.wait_started(1)
    assert pool.is_failing_to_load
    assert pool.may_recover
    await pool.close()


async def test_drain_time_follows_the_speed_of_the_workers():
    pool = new_pool()
    assert pool.drain_time_s(8) == 1.0  # nothing is known yet
    pool.scale(2, 2)
    await pool.wait_started(2)
    for worker in pool.workers:
        worker.service_s = 0.5
    assert pool.drain_time_s(8) == 2.0
    await pool.close()
