"""Workers that are replaced before they do harm: when, and in which order the old and the new one end and start."""

from __future__ import annotations

import asyncio

import pytest

from flambeau.config.model import ModelConfig
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents, WorkerRef
from flambeau.serving.workers.pool import WorkerPool
from flambeau.serving.workers.renewal import RenewalCheck
from flambeau.serving.workers.supervisor import Slot
from support.fake_workers import FakeWorker, until

STOPPED = WorkerExit(reason="stopped")
NO_TOKENIZER = WorkerExit(reason="there is no tokenizer", while_loading=True, is_final=True)


class Served:
    """A pool of workers that load and end when a test says so, and the check of it."""

    def __init__(self, *, devices=(), has_room=True, number=1, **settings):
        ids = iter(range(100))
        self.made = []
        config = ModelConfig(startup_timeout_s=10, min_workers=number, max_workers=number, **settings)
        self.pool = WorkerPool(
            "model m version: 1.0",
            config,
            new_worker=self.new_worker,
            new_slot=lambda: Slot(WorkerRef(next(ids), "m", "1.0"), devices),
            on_change=lambda: None,
            events=ServerEvents(),
            drain_timeout_s=1,
        )
        self.check = RenewalCheck(self.pool, config, lambda: has_room)

    def new_worker(self, slot):
        self.made.append(FakeWorker())
        return self.made[-1]

    async def start(self, number=1):
        self.pool.scale(number, number)
        await until(lambda: len(self.made) == number)
        for worker in self.made:
            worker.load()
        return self.made[:]

    async def made_after(self, number):
        await until(lambda: len(self.made) == number)
        return self.made[-1]

    async def close(self):
        closing = asyncio.create_task(self.pool.close())
        await asyncio.sleep(0)
        for worker in self.made:
            worker.kill(STOPPED)
        await closing


@pytest.mark.parametrize(
    ("settings", "num_answered", "used_mb", "is_due"),
    [
        ({}, 10**9, 10**6, False),
        ({"renew_after": 100}, 99, 10**6, False),
        ({"renew_after": 100}, 100, 0, True),
        ({"renew_above_mb": 500}, 10**9, 500, False),
        ({"renew_above_mb": 500}, 0, 501, True),
    ],
)
async def test_worker_is_renewed_by_its_requests_or_its_memory(settings, num_answered, used_mb, is_due):
    served = Served(**settings)
    (worker,) = await served.start()
    worker.num_answered, worker.resident_bytes = num_answered, used_mb << 20
    served.check.tick()
    assert served.pool.is_renewing == is_due
    await served.close()


async def test_new_worker_loads_before_the_old_one_stops():
    served = Served(renew_after=1)
    (old,) = await served.start()
    old.num_answered = 1
    served.check.tick()
    fresh = await served.made_after(2)
    await asyncio.sleep(0.02)
    assert (old.is_retiring, served.pool.num_ready) == (False, 1)
    fresh.load()
    await until(lambda: old.is_retiring)
    assert served.pool.is_ready
    old.kill(STOPPED)
    await until(lambda: not served.pool.is_renewing)
    assert [slot.worker for slot in served.pool.slots] == [fresh]
    assert served.pool.num_restarts == 0
    await served.close()


@pytest.mark.parametrize("settings", [{"devices": (0,)}, {"has_room": False}])
async def test_without_room_for_two_the_old_worker_ends_first_and_the_model_still_takes_jobs(settings):
    served = Served(renew_after=1, **settings)
    (old,) = await served.start()
    old.num_answered = 1
    served.check.tick()
    await until(lambda: old.is_retiring)
    assert len(served.made) == 1
    assert served.pool.may_recover
    old.kill(STOPPED)
    fresh = await served.made_after(2)
    assert served.pool.may_recover
    fresh.load()
    await until(lambda: not served.pool.is_renewing and served.pool.is_ready)
    assert [slot.worker for slot in served.pool.slots] == [fresh]
    await served.close()


async def test_one_worker_is_renewed_at_a_time():
    served = Served(renew_after=1, number=2)
    workers = await served.start(2)
    for worker in workers:
        worker.num_answered = 1
    for _ in range(3):
        served.check.tick()
    (await served.made_after(3)).load()
    await until(lambda: any(worker.is_retiring for worker in workers))
    served.check.tick()
    assert sum(worker.is_retiring for worker in workers) == 1
    await served.close()


async def test_worker_stays_if_a_new_one_cannot_be_loaded_and_is_left_alone_for_a_while():
    served = Served(renew_after=1)
    (old,) = await served.start()
    old.num_answered = 1
    served.check.tick()
    fresh = await served.made_after(2)
    fresh.kill(NO_TOKENIZER)
    await until(lambda: not served.pool.is_renewing)
    assert [slot.worker for slot in served.pool.slots] == [old]
    assert not old.is_retiring
    served.check.tick()
    assert not served.pool.is_renewing
    await served.close()


async def test_model_that_is_scaled_down_meanwhile_keeps_the_worker_that_runs():
    served = Served(renew_after=1)
    (old,) = await served.start()
    old.num_answered = 1
    served.check.tick()
    fresh = await served.made_after(2)
    served.pool.set_bounds(1, 1)
    fresh.kill(STOPPED)
    await until(lambda: not served.pool.is_renewing)
    assert [slot.worker for slot in served.pool.slots] == [old]
    await served.close()


async def test_pool_that_closes_does_not_wait_for_a_worker_that_loads():
    served = Served(renew_after=1)
    (old,) = await served.start()
    old.num_answered = 1
    served.check.tick()
    await served.made_after(2)
    async with asyncio.timeout(5):
        await served.close()
    assert not served.pool.is_renewing
