"""A server and its models, with workers that are no processes."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from flambeau.archive.manifest import MANIFEST
from flambeau.config.model import ModelConfig
from flambeau.config.server import MetricsConfig, ServerConfig
from flambeau.errors import ConfigError, DeadlinePassed, ModelNotFound, ModelRemoved, WorkersFailed
from flambeau.serving import registry as registration
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.server import Server
from support.fake_workers import FakeWorker, until

CRASH = WorkerExit(reason="it crashed", while_loading=True)


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    monkeypatch.setattr("flambeau.serving.workers.worker_factory.RemoteWorker", FakeWorker)
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


async def test_failed_registration_is_not_in_the_newest_snapshot(folder, workers):
    async with new_server() as server:
        seen = []
        server.on_change = lambda: seen.append([model.name for model in server.registry])
        registering = asyncio.create_task(register(server, folder))
        await until(lambda: workers)
        server.on_change()  # another call, meanwhile
        workers[0].kill(CRASH)
        with pytest.raises(WorkersFailed):
            await registering
        assert seen == [["m"], []]


async def test_a_failed_registration_does_not_remove_its_successor(folder, workers):
    async with new_server() as server:
        registering = asyncio.create_task(register(server, folder))
        await until(lambda: workers)
        server.registry.remove("m")
        successor = await register(server, folder, wait=False)
        workers[0].kill(CRASH)
        with pytest.raises(WorkersFailed):
            await registering
        assert server.registry.find("m") is successor


async def test_registration_that_was_undone_while_it_loaded_says_so(folder, workers):
    async with new_server(unregister_timeout_s=5) as server:
        registering = asyncio.create_task(register(server, folder))
        await until(lambda: workers)
        unregistering = asyncio.create_task(server.unregister("m"))
        with pytest.raises(ModelRemoved, match="unregistered"):
            await registering
        workers[0].kill(CRASH)
        await unregistering
        with pytest.raises(ModelNotFound):
            server.registry.find("m")


async def test_unregister_timeout_holds_once_stopping_has_begun(folder, workers):
    async with new_server(unregister_timeout_s=0.2, drain_timeout_s=60) as server:
        await register(server, folder, wait=False)
        await until(lambda: workers)
        workers[0].load()
        async with asyncio.timeout(30):
            with pytest.raises(DeadlinePassed):
                await server.unregister("m")
        workers[0].kill(CRASH)


async def fail(*_, **__):
    raise RuntimeError("a mistake of ours")


async def test_files_are_removed_even_if_a_model_cannot_be_closed(folder, workers, caplog, monkeypatch):
    closed = []
    async with new_server() as server:
        model = await register(server, folder, wait=False)
        monkeypatch.setattr(server.store, "close", lambda: closed.append(True))
        await until(lambda: workers)
        workers[0].kill(CRASH)
        await model.close("early")
        monkeypatch.setattr(model, "close", fail)
    assert closed
    [record] = [record for record in caplog.records if record.name == "flambeau.serving.server" and record.exc_info]
    assert (record.levelname, record.exc_info[0]) == ("ERROR", RuntimeError)


async def test_yaml_of_a_model_is_read_in_a_thread(tmp_path, monkeypatch):
    (tmp_path / MANIFEST).parent.mkdir()
    (tmp_path / MANIFEST).write_text(json.dumps({"model": {"modelName": "m", "handler": "h", "configFile": "c.yaml"}}))
    readers = []

    def read_options(path):
        readers.append(threading.current_thread())
        raise ConfigError("that is enough")

    monkeypatch.setattr(registration, "read_options", read_options)
    with pytest.raises(ConfigError, match="enough"):
        await Server(ServerConfig()).register("m", path=tmp_path, config=ModelConfig())
    assert readers
    assert threading.main_thread() not in readers
