"""The models of a state file are registered again, beside those of the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flambeau.cli.restored_models import restore, wait_for
from flambeau.cli.serve import InitialModel, divide
from flambeau.cli.startup_progress import StartupProgress
from flambeau.config.model import ModelConfig
from flambeau.config.server import MetricsConfig, ServerConfig
from flambeau.serving.saved_models import SavedModel, read_document, to_document
from flambeau.serving.server import Server
from support.fake_workers import FakeWorker, until

ECHO = "def handle(data, context):\n    return data\n"
FILE = Path("/state.json")


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    monkeypatch.setattr("flambeau.serving.workers.worker_factory.RemoteWorker", FakeWorker)
    FakeWorker.all = []
    return FakeWorker.all


@pytest.fixture
def store(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "handler.py").write_text(ECHO)
    return tmp_path


def new_server(store):
    server = Server(
        ServerConfig(model_store=store, exact_paths=True, drain_timeout_s=0.1, measure=MetricsConfig(system=False))
    )
    server.seen = []
    server.on_change = lambda: server.seen.append(1)
    return server


def saved(name, **changes):
    given = {"version": "1.0", "url": name, "handler": "handler.py", "min_workers": 0, "max_workers": 0}
    return SavedModel(name=name, **{**given, **changes})


async def restore_into(server, *models):
    server.not_restored = {one.key: one for one in models}
    for model in await restore(server, models, FILE):
        await wait_for(model, StartupProgress(None))


async def test_models_come_back_with_their_settings(store, workers):
    async with new_server(store) as server:
        model = saved("a", min_workers=1, max_workers=3, batch_size=4, batch_delay_s=0.05)
        restoring = asyncio.create_task(restore_into(server, model))
        await until(lambda: workers)
        workers[0].load()
        await restoring
        found = server.registry.find("a")
        assert (found.pool.min_workers, found.pool.max_workers) == (1, 3)
        assert (found.config.batch_size, found.config.batch_delay_s) == (4, 0.05)
        [again] = read_document(to_document(server.registry, [*server.not_restored.values()]))
        assert again.overrides == model.overrides


async def test_one_that_is_gone_is_missing_and_kept_until_it_is_unregistered(store, caplog):
    async with new_server(store) as server:
        gone = saved("gone", is_default=True)
        await restore_into(server, saved("a", is_default=True), gone)
        server.has_started = True
        assert [model.name for model in server.registry] == ["a"]
        assert [*server.missing] == ["gone 1.0"]
        assert not server.is_ready
        assert [record.levelname for record in caplog.records if "gone 1.0" in record.message] == ["ERROR"]
        assert gone in read_document(to_document(server.registry, [*server.not_restored.values()]))
        before = len(server.seen)
        await server.unregister("gone", "1.0")
        assert len(server.seen) == before + 1
        assert (server.missing, server.not_restored) == ({}, {})
        assert server.is_ready


async def test_a_missing_version_beside_another_is_unregistered_by_its_version(store):
    async with new_server(store) as server:
        await restore_into(server, saved("a"), saved("a", version="2.0", url="gone", is_default=True))
        server.set_default("a", "1.0")  # this choice holds when the other one comes back
        assert [one.is_default for one in server.not_restored.values()] == [False]
        await server.unregister("a", "2.0")
        assert [model.version for model in server.registry] == ["1.0"]
        assert (server.missing, server.not_restored) == ({}, {})


async def test_one_that_is_registered_again_is_no_longer_missing(store):
    async with new_server(store) as server:
        await restore_into(server, saved("c"))
        assert [*server.missing] == ["c 1.0"]
        config = ModelConfig(min_workers=0, max_workers=0)
        await server.register("a", name="c", handler="handler.py", config=config)
        assert (server.missing, server.not_restored) == ({}, {})


async def test_the_command_line_takes_precedence(store, caplog):
    caplog.set_level("INFO")
    async with new_server(store) as server:
        config = ModelConfig(min_workers=0, max_workers=0)
        file = saved("a", batch_size=9)
        server.not_restored = {file.key: file}
        path = store / "a"
        await server.register("a", path=path, name="a", handler="handler.py", config=config, at_startup=True)
        await restore(server, [file], FILE)
        assert server.registry.find("a").config.batch_size == 1
        assert any(
            record.levelname == "INFO" and "a 1.0" in record.message and str(FILE) in record.message
            for record in caplog.records
        )


async def test_a_downloaded_file_is_deleted_with_its_model_as_before(store):
    archive = store / "a" / "handler.py"
    async with new_server(store) as server:
        await restore_into(server, saved("d", url="https://h/d.py", path=str(archive), is_downloaded=True))
        assert server.registry.find("d").source.downloaded == archive
        await server.unregister("d")
        assert not archive.exists()


async def test_a_downloaded_file_stays_if_its_model_cannot_be_restored(store):
    archive = store / "a" / "handler.py"
    async with new_server(store) as server:
        await restore_into(server, saved("d", path=str(archive), is_downloaded=True, max_workers=100_000))
        assert [*server.missing] == ["d 1.0"]
        assert archive.exists()


def test_what_the_command_line_names_is_loaded_and_what_it_only_finds_is_as_in_the_file(tmp_path):
    found, new = (InitialModel(path=tmp_path / name, is_required=False) for name in ("a.mar", "new.mar"))
    named = InitialModel(path=tmp_path / "b.mar")
    registered = [saved("a", url="a.mar"), saved("c", url="https://h/b.mar")]
    assert divide([found, new, named], registered, tmp_path) == ([new, named], registered)
    initial = [saved("a", url="a.mar", path=str(tmp_path / "a.mar")), saved("b", path=str(tmp_path / "b.mar"))]
    assert divide([found, new, named], initial, tmp_path) == ([new, named], initial[:1])


def test_options_of_the_command_line_hold_for_what_is_restored_from_a_folder_there(tmp_path):
    options = {"min_workers": 4, "max_workers": 4, "origins": {"min_workers": "the flag --workers"}}
    found = InitialModel(path=tmp_path / "a.mar", is_required=False, settings=options)
    _, [wanted] = divide([found], [saved("a", url="a.mar", batch_size=8)], tmp_path)
    assert (wanted.min_workers, wanted.max_workers, wanted.batch_size, wanted.handler) == (4, 4, 8, "handler.py")


def test_what_an_earlier_command_line_named_is_not_restored(tmp_path):
    earlier = saved("m", url="m-1.0.mar", path="/srv/m-1.0.mar")
    now = InitialModel(path=Path("/srv/m-2.0.mar"))
    assert divide([now], [earlier], tmp_path) == ([now], [])
