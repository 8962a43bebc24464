from __future__ import annotations

import json
import os
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from flambeau.config.model import ModelConfig
from flambeau.errors import ConfigError
from flambeau.serving.model_sources.store import Source
from flambeau.serving.registry import Registry
from flambeau.torchserve.java_properties import parse
from flambeau.torchserve.snapshot import (
    KEPT,
    SnapshotWriter,
    archive_name,
    moment_of,
    name_for,
    newest_whole,
    read_snapshot,
    snapshots_in,
    to_documents,
    to_text,
)

NOW = datetime(2026, 11, 15, 10, 21, 49, 533_999)
SAVED = {
    "defaultVersion": True,
    "marName": "x.mar",
    "minWorkers": 1,
    "maxWorkers": 2,
    "batchSize": 3,
    "maxBatchDelay": 40,
    "responseTimeout": 9,
}


def text_of(**changes):
    return json.dumps({"models": {"m": {"1.0": {**SAVED, **changes}}}})


def test_names_sort_by_time_however_quickly_they_follow():
    first = name_for("startup", NOW)
    assert first == "20261115102149533-startup.cfg"
    second = name_for("snapshot", NOW, first)
    assert second == "20261115102149534-snapshot.cfg"
    assert name_for("shutdown", datetime(2020, 1, 1), second) == "20261115102149535-shutdown.cfg"


def test_only_time_stamped_files_are_snapshots(tmp_path):
    assert newest_whole(tmp_path / "none") is None
    assert newest_whole(tmp_path) is None
    names = (
        "20261115102149533-startup.cfg",
        "20251115102149533-shutdown.cfg",
        "notes.txt",
        "99999999999999999-startup.cfg",
    )
    for name in (*names, ".20271115102149533-startup.cfg.draft"):
        (tmp_path / name).touch()
    assert [path.name for path in snapshots_in(tmp_path)] == [*names[:2]]
    assert moment_of("99999999999999999-startup.cfg") is None


def registered(name, *, url, workflow="", downloaded=None):
    source = Source(url=url, folder=Path(), manifest=None, downloaded=downloaded)
    pool = SimpleNamespace(min_workers=1, max_workers=1)
    mirror = SimpleNamespace(percent=0)
    known = {"workflow": workflow, "source": source, "config": ModelConfig(), "pool": pool, "mirror": mirror}
    return SimpleNamespace(name=name, version="1.0", **known)


def test_downloaded_models_are_saved_by_their_file_and_nodes_of_workflows_not_at_all():
    registry = Registry()
    registry.add(registered("plain", url="a.mar"))
    registry.add(registered("fetched", url="https://h/b.mar?signature=x", downloaded=Path("/store/b.mar")))
    registry.add(registered("flow__node", url="a.mar", workflow="flow"))
    registry.add(registered("flow__function", url="", workflow="flow"))
    documents = to_documents(registry)
    assert {name: versions["1.0"]["marName"] for name, versions in documents.items()} == {
        "plain": "a.mar",
        "fetched": "b.mar",
    }


def test_models_are_read_with_their_settings():
    [saved] = read_snapshot(text_of())
    assert (saved.name, saved.version, saved.archive, saved.is_default) == ("m", "1.0", "x.mar", True)
    assert saved.settings == {
        "min_workers": 1,
        "max_workers": 2,
        "batch_size": 3,
        "batch_delay_s": 0.04,
        "response_timeout_s": 9,
    }


def test_default_delay_leaves_the_choice_to_the_model():
    [saved] = read_snapshot(text_of(maxBatchDelay=100))
    assert "batch_delay_s" not in saved.settings


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", 'must be a JSON object with "models"'),
        ('{"models": {"m": 1}}', "model m must map versions"),
        ('{"models": {"m": {"1.0": 1}}}', "model m, version 1.0 must be an object"),
        ('{"models": {"m": {"1.0": {"marName": "x"}}}}', "has no defaultVersion, minWorkers"),
        (text_of(marName=""), "marName must name an archive"),
        (text_of(batchSize=0), "batchSize must be a whole number of at least 1, not 0"),
        (text_of(minWorkers="two"), "minWorkers must be a whole number of at least 0, not 'two'"),
    ],
)
def test_errors_are_named(text, problem):
    with pytest.raises(ConfigError) as error:
        read_snapshot(text)
    assert problem in str(error.value)


def test_written_snapshot_holds_settings_and_models(tmp_path):
    (tmp_path / "x.mar").touch()
    models = {"m": {"1.0": {**SAVED, "marName": "https://host/x.mar"}}}
    text = to_text("n.cfg", NOW, {"mine": "ä=1", "model_snapshot": "old"}, models, tmp_path)
    properties = parse(text, {})
    assert properties["mine"] == "ä=1"
    document = json.loads(properties["model_snapshot"])
    assert (document["name"], document["modelCount"]) == ("n.cfg", 1)
    assert document["models"]["m"]["1.0"] == SAVED
    assert read_snapshot(properties["model_snapshot"])


def test_folder_outside_the_store_keeps_its_path(tmp_path):
    assert archive_name("/elsewhere/loose", tmp_path) == "/elsewhere/loose"
    assert archive_name("gone.mar", None) == "gone.mar"


async def test_snapshot_is_private_and_keeps_what_a_start_needs(tmp_path):
    server = SimpleNamespace(registry=[], config=SimpleNamespace(model_store=None))
    mask = os.umask(0)
    try:
        writer = SnapshotWriter(tmp_path / "config", {"keystore_pass": "changed"}, server)
        writer.save("startup")
        await writer.close()
    finally:
        os.umask(mask)
    [file] = (tmp_path / "config").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "keystore_pass=changed" in file.read_text()


async def test_waiting_for_a_snapshot_ends_although_the_disk_hangs(tmp_path, monkeypatch):
    server = SimpleNamespace(registry=[], config=SimpleNamespace(model_store=None))
    hangs = threading.Event()
    monkeypatch.setattr("flambeau.serving.change_writer.WRITE_S", 0.05)
    monkeypatch.setattr(SnapshotWriter, "_write", lambda *_: hangs.wait(30))
    writer = SnapshotWriter(tmp_path, {}, server)
    writer.save("snapshot")
    await writer.written()
    hangs.set()
    await writer.close()


async def write_snapshots(folder, number=1):
    server = SimpleNamespace(registry=[], config=SimpleNamespace(model_store=None))
    writer = SnapshotWriter(folder, {"job_queue_size": "7", "version": "1", "workflow_store": "w"}, server)
    for _ in range(number):
        writer.save("snapshot")
    await writer.close()


async def test_torn_snapshots_are_skipped_for_the_one_before_wherever_they_are_cut(tmp_path):
    await write_snapshots(tmp_path, 2)
    last, before = snapshots_in(tmp_path)
    assert newest_whole(tmp_path) == last
    whole = last.read_bytes()
    for length in range(len(whole) - 1):
        last.write_bytes(whole[:length])
        skipped = []
        assert newest_whole(tmp_path, lambda *words, to=skipped: to.append(words)) == before, length
        assert [path for path, _ in skipped] == [last]


def test_snapshots_of_torchserve_and_by_hand_need_no_last_line(tmp_path):
    file = tmp_path / "20261115102149533-startup.cfg"
    for text in ('#Saving snapshot\nmodel_snapshot={"models": {}}', "model_snapshot={}\nmodel_store=$$NOT_SET$$\n"):
        file.write_text(text)
        assert newest_whole(tmp_path) == file


async def test_only_the_latest_snapshots_are_kept_and_drafts_are_removed(tmp_path):
    others = [tmp_path / "notes.txt", tmp_path / ".20261115102149533-startup.cfg.draft"]
    old = tmp_path / ".20251115102149533-startup.cfg.draft"
    for path in (*others, old):
        path.touch()
    os.utime(old, (0, 0))
    await write_snapshots(tmp_path, KEPT + 5)
    assert len(snapshots_in(tmp_path)) == KEPT
    assert all(path.exists() for path in others)
    assert not old.exists()


async def test_snapshot_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    steps = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def note_replace(draft, path):
        steps.append("replace")
        replace(draft, path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    await write_snapshots(tmp_path)
    [name] = [path.name for path in tmp_path.iterdir()]
    assert steps == [f".{name}.draft", "replace", tmp_path.name]


async def test_full_disk_leaves_no_draft(tmp_path, monkeypatch, caplog):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    await write_snapshots(tmp_path)
    assert [*tmp_path.iterdir()] == []
    assert f"could not be saved in {tmp_path}" in caplog.text
    assert "No space left on device" in caplog.text
