"""The watch over a model's workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.config.model import ModelConfig
from flambeau.serving.workers import watch as watch_module
from flambeau.serving.workers.watch import Watch


class Worker:
    def __init__(self, silent_s=0.0):
        self.spec = SimpleNamespace(id=1)
        self.pids = [1]
        self.has_answered = True
        self.silent_s = silent_s
        self.fates = []

    def seconds_without_progress(self):
        if self.silent_s < 0:
            raise RuntimeError("a mistake of ours")
        return self.silent_s

    def blame_silent(self, limit_s):
        pass

    def kill(self, fate):
        self.fates.append(fate.reason)


def new_watch(*workers, others=(), **settings):
    config = ModelConfig(response_timeout_s=5, **settings)
    return Watch("m 1.0", config, SimpleNamespace(slots=[]), [*workers], tuple(others))


def test_silent_worker_is_ended():
    silent, busy = Worker(6.0), Worker(4.0)
    new_watch(silent, busy).look()
    assert silent.fates == ["no answer within responseTimeout, 5 s"]
    assert busy.fates == []


def test_worker_that_takes_too_much_memory_is_ended(monkeypatch):
    monkeypatch.setattr(watch_module, "resident_bytes_of", lambda pids: 300 << 20)
    worker = Worker()
    new_watch(worker, memory_limit_mb=200).look()
    assert worker.fates == ["it used 300 MB of memory; workerMemoryLimitMb is 200"]


def test_mistake_in_one_look_costs_neither_the_others_nor_the_next(caplog):
    looked = []
    watch = new_watch(Worker(-1), others=[lambda: 1 / 0, lambda: looked.append(True)])
    watch.look()
    watch.look()
    assert len(looked) == 2
    assert len(caplog.records) == 2  # each is said once


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch_module, "CHECK_S", 0.005)


def test_watch_goes_on_after_a_mistake_and_begins_again_after_its_end(quick):
    async def watch():
        looked = []

        def look():
            looked.append(True)
            raise RuntimeError("a mistake of ours")

        over = new_watch(others=[look])
        over.start()
        async with asyncio.timeout(30):
            while len(looked) < 3:
                await asyncio.sleep(0.005)
        over._task.cancel()
        await asyncio.wait([over._task])
        over.start()
        before = len(looked)
        async with asyncio.timeout(30):
            while len(looked) == before:
                await asyncio.sleep(0.005)
        over.stop()

    asyncio.run(watch())
