"""A server and its models, with workers that are no processes."""

from __future__ import annotations

import asyncio
import time

import pytest

from flambeau.config.model import ModelConfig
from flambeau.config.server import MetricsConfig, ServerConfig
from flambeau.errors import DeadlinePassed, ModelNotFound, Unavailable, WorkersFailed
from flambeau.serving.server import Server
from flambeau.serving.workers.recovery import Death
from support.fake_workers import FakeWorker
from support.jobs import new_job

CRASH = Death(reason="it crashed", while_loading=True)


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    monkeypatch.setattr("flambeau.serving.workers.making.RemoteWorker", FakeWorker)
    FakeWorker.all = []
    return FakeWorker.all


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "handler.py").write_text("def handle(data, context):\n    return data\n")
    return tmp_path


def new_server(**settings):
    # Its workers stop only when they are killed, so that each stop takes as long as it may.
    return Server(ServerConfig(measure=MetricsConfig(system=False), **{"drain_timeout_s": 0.1, **settings}))


def register(server, folder, **options):
    config = ModelConfig(min_workers=1, max_workers=1)
    return server.register("m", path=folder, name="m", handler="handler.py", config=config, **options)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_failed_registration_is_not_in_the_newest_snapshot(folder, workers):
    async def fail():
        async with new_server() as server:
            seen = []
            server.on_change = lambda: seen.append([model.name for model in server.registry])
            registering = asyncio.create_task(register(server, folder))
            await until(lambda: workers)
            server.on_change()  # another call, meanwhile
            workers[0].kill(CRASH)
            with pytest.raises(WorkersFailed):
                await registering
            return seen

    assert asyncio.run(fail()) == [["m"], []]


def test_a_failed_registration_does_not_remove_its_successor(folder, workers):
    async def fail():
        async with new_server() as server:
            registering = asyncio.create_task(register(server, folder))
            await until(lambda: workers)
            server.registry.remove("m")
            successor = await register(server, folder, wait=False)
            workers[0].kill(CRASH)
            with pytest.raises(WorkersFailed):
                await registering
            return server.registry.find("m") is successor

    assert asyncio.run(fail())


def test_registration_that_was_undone_while_it_loaded_says_so(folder, workers):
    async def undo():
        async with new_server(unregister_timeout_s=5) as server:
            registering = asyncio.create_task(register(server, folder))
            await until(lambda: workers)
            unregistering = asyncio.create_task(server.unregister("m"))
            with pytest.raises(Unavailable, match="unregistered"):
                await registering
            workers[0].kill(CRASH)
            await unregistering
            with pytest.raises(ModelNotFound):
                server.registry.find("m")

    asyncio.run(undo())


def test_unregister_timeout_holds_once_stopping_has_begun(folder, workers):
    async def unregister():
        async with new_server(unregister_timeout_s=0.2, drain_timeout_s=60) as server:
            await register(server, folder, wait=False)
            await until(lambda: workers)
            workers[0].load()
            began = time.monotonic()
            with pytest.raises(DeadlinePassed):
                await server.unregister("m")
            workers[0].kill(CRASH)
            return time.monotonic() - began

    assert asyncio.run(unregister()) < 30


def test_files_are_removed_even_if_a_model_cannot_be_closed(folder, workers, caplog, monkeypatch):
    closed = []

    async def close():
        async with new_server() as server:
            model = await register(server, folder, wait=False)
            monkeypatch.setattr(server.store, "close", lambda: closed.append(True))
            await until(lambda: workers)
            workers[0].kill(CRASH)
            await model.close("early")

            async def stumble(*_, **__):
                raise RuntimeError("a mistake of ours")

            monkeypatch.setattr(model, "close", stumble)

    asyncio.run(close())
    assert closed
    assert "a mistake of ours" in caplog.text


def test_question_of_the_management_api_is_no_inference(folder, workers):
    async def ask():
        async with new_server() as server:
            model = await register(server, folder, wait=False)
            await until(lambda: workers)
            described, asked = new_job(kind="describe"), new_job()
            model.add(described)
            model.add(asked)
            return described.usage, asked.usage.num_requests

    assert asyncio.run(ask()) == (None, 1)


def test_queue_is_full_when_what_waits_and_what_was_sent_ahead_fill_it(folder, workers):
    async def fill():
        async with new_server() as server:
            model = await register(server, folder, wait=False, wishes={"queue_size": 3})
            await until(lambda: workers)
            model.traffic.num_ahead = 2
            model.add(new_job())
            with pytest.raises(Unavailable, match="All 3 places"):
                model.add(new_job())
            return model.num_waiting

    assert asyncio.run(fill()) == 3


def test_model_that_is_gone_gets_no_workers(folder, workers):
    async def scale():
        async with new_server() as server:
            model = await register(server, folder, wait=False)
            await until(lambda: workers)
            await model.close("gone", now=True)
            with pytest.raises(Unavailable):
                await model.scale(2, 2, wait=False)
            return len(workers)

    assert asyncio.run(scale()) == 1
