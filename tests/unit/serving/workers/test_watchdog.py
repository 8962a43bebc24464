"""The periodic checks of a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.config.model import ModelConfig
from flambeau.serving.events import ServerEvents, WorkerRef
from flambeau.serving.workers import watchdog as watchdog_module
from flambeau.serving.workers.watchdog import LivenessCheck, Watchdog
from support.fake_workers import until


class Worker:
    def __init__(self, silent_s=0.0):
        self.spec = SimpleNamespace(ref=WorkerRef(1, "m", "1.0"))
        self.pids = self.local_pids = [1]
        self.resident_bytes = 0
        self.has_answered = True
        self.is_ending = False
        self.silent_s = silent_s
        self.causes = []

    def seconds_silent(self):
        return self.silent_s

    def blame_silent(self, limit_s):
        pass

    def kill(self, cause):
        self.causes.append(cause.reason)

    kill_with_stacks = kill


def check(*workers, **settings):
    pool = SimpleNamespace(workers=workers, slots=[])
    LivenessCheck(pool, ModelConfig(response_timeout_s=5, **settings), ServerEvents()).tick()


def test_stalled_worker_is_ended(caplog):
    silent, busy = Worker(6.0), Worker(4.0)
    check(silent, busy)
    assert silent.causes == ["no answer within responseTimeout, 5 s"]
    assert busy.causes == []
    assert [(record.event, record.levelname) for record in caplog.records] == [("worker_stalled", "ERROR")]


def test_worker_that_takes_too_much_memory_is_ended():
    worker = Worker()
    worker.resident_bytes = 300 << 20
    check(worker, memory_limit_mb=200)
    assert worker.causes == ["it used 300 MB of memory; workerMemoryLimitMb is 200"]


async def test_worker_whose_children_take_too_much_memory_is_ended(monkeypatch):
    sizes = iter([100, 300])
    monkeypatch.setattr(watchdog_module, "family_bytes", lambda pids, limit: next(sizes) << 20)
    small, large = Worker(), Worker()
    pool = SimpleNamespace(workers=[small, large], slots=[])
    await LivenessCheck(pool, ModelConfig(memory_limit_mb=200), ServerEvents()).check_families()
    assert small.causes == []
    assert large.causes == ["it used 300 MB of memory with its children; workerMemoryLimitMb is 200"]


def test_check_that_raises_stops_neither_the_others_nor_the_next_round(caplog):
    calls = []
    watchdog = Watchdog("m", [lambda: [].pop(), lambda: 1 / 0, lambda: calls.append(True)])
    watchdog.tick()
    watchdog.tick()
    assert len(calls) == 2
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]  # each is logged once


async def test_watchdog_goes_on_after_an_exception_and_can_be_started_again(monkeypatch):
    monkeypatch.setattr(watchdog_module, "INTERVAL_S", 0.005)
    calls = []
    watchdog = Watchdog("m", [lambda: calls.append(True), lambda: 1 / 0])
    watchdog.start()
    await until(lambda: len(calls) >= 3)
    watchdog.stop()
    await asyncio.wait([watchdog._task])
    watchdog.start()
    before = len(calls)
    await until(lambda: len(calls) > before)
    watchdog.stop()


async def test_slow_check_runs_beside_the_others_and_goes_on_after_an_exception(monkeypatch, caplog):
    monkeypatch.setattr(watchdog_module, "INTERVAL_S", 0.005)
    quick, slow = [], []

    async def check():
        slow.append(True)
        raise OSError("no such process")

    watchdog = Watchdog("m", [lambda: quick.append(True)], [(check, 0.005)])
    watchdog.start()
    await until(lambda: len(quick) >= 3 and len(slow) >= 3)
    watchdog.stop()
    await asyncio.wait([watchdog._task])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("has_answered", "count"), [(True, 1), (False, 3)])
def test_failures_in_a_row_are_reported_with_a_stalled_worker(has_answered, count):
    worker = Worker(6.0)
    worker.has_answered = has_answered
    reported = []
    pool = SimpleNamespace(workers=[worker], slots=[SimpleNamespace(worker=worker, failures=2)])
    events = SimpleNamespace(worker_stalled=lambda ref, timeout_s, failures: reported.append(failures))
    worker.has_shown_stack = True
    LivenessCheck(pool, ModelConfig(response_timeout_s=5), events).tick()
    assert reported == [count]
