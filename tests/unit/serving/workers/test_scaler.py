"""What follows a decision of the scaling policy, also when memory is short."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.config.server import ServerConfig
from flambeau.serving.server import Server
from flambeau.serving.workers import scaler as scaler_module
from flambeau.serving.workers.scaler import Scaler
from flambeau.serving.workers.scaling_policy import ScalingLimits


class Pool:
    """One worker that is busy; keeps the calls of `scale`."""

    def __init__(self) -> None:
        self.num_present = 1
        self.num_ready = 1
        self.load_s = 0.1
        self.has_failed_for_good = False
        self.limits = ScalingLimits(minimum=1, maximum=3)
        self.workers = [SimpleNamespace(batches=[1], is_retiring=False, is_ready=True, local_pids=[1])]
        self.calls = []

    def scale(self, minimum, maximum):
        self.calls.append((minimum, maximum))


class Queue:
    def __init__(self, arrived):
        self.oldest = SimpleNamespace(arrived=arrived)


def tick_for_3_s(pool, free_memory, ticks=30):
    """A job waits too long at every tick."""
    loop = asyncio.get_running_loop()
    scaler = Scaler("m", pool, Queue(loop.time() - 10), free_memory)
    began = loop.time() + 2
    for i in range(ticks):
        loop.time = lambda i=i: began + 0.1 * i
        scaler.tick()


@pytest.fixture
def memory(monkeypatch):
    def set_memory(left, used):
        monkeypatch.setattr(scaler_module, "available_bytes", lambda: left)
        monkeypatch.setattr(scaler_module, "resident_bytes_of", lambda pids: used)

    return set_memory


async def test_model_grows_if_there_is_memory(memory):
    memory(left=900 << 20, used=500 << 20)
    pool = Pool()
    tick_for_3_s(pool, lambda: False, ticks=5)
    assert pool.calls == [(2, 2)]


async def test_model_does_not_grow_beyond_memory_and_warns_once(memory, caplog):
    memory(left=500 << 20, used=500 << 20)
    pool = Pool()
    tick_for_3_s(pool, lambda: False)
    assert pool.calls == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_another_model_frees_memory_first(memory, caplog):
    memory(left=500 << 20, used=500 << 20)
    calls = []
    tick_for_3_s(pool := Pool(), lambda: calls.append(1) or True)
    assert calls
    assert pool.calls == []  # the freed memory is used at a later tick
    assert not caplog.records


async def test_model_that_cannot_be_loaded_any_more_does_not_grow():
    pool = Pool()
    pool.has_failed_for_good = True
    tick_for_3_s(pool, lambda: True)
    assert pool.calls == []


async def test_sleeping_model_starts_its_workers_and_stops_them(memory):
    memory(left=900 << 20, used=0)
    pool = Pool()
    pool.limits = ScalingLimits(minimum=0, maximum=3)
    scaler = Scaler("m", pool, Queue(0.0), lambda: False)
    scaler.wake()
    scaler.sleep()
    assert pool.calls == [(1, 3), (0, 0)]


def new_model(arrived, *, sleeps=True, jobs=0, ready=True):
    calls = []
    limits = ScalingLimits(minimum=1, maximum=1, scales_to_zero=sleeps)
    scaler = SimpleNamespace(last_arrival=arrived, sleep=lambda: calls.append("sleep"))
    pool = SimpleNamespace(has_ready=ready, limits=limits)
    return SimpleNamespace(scaler=scaler, pool=pool, num_in_flight=jobs, calls=calls)


def test_model_that_was_idle_longest_frees_memory():
    models = [
        new_model(1.0, sleeps=False),
        new_model(2.0, jobs=1),
        new_model(3.0, ready=False),
        new_model(5.0),
        new_model(4.0),
    ]
    server = Server(ServerConfig())
    server.registry = models
    assert server._free_memory()
    assert [model.calls for model in models] == [[], [], [], [], ["sleep"]]
    server.registry = models[:3]
    assert not server._free_memory()
