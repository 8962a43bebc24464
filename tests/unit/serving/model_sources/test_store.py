from __future__ import annotations

import os
import shutil
import stat
import tempfile

import pytest

from flambeau.errors import ConfigError, ModelNotFound
from flambeau.serving.model_sources.downloader import Downloader
from flambeau.serving.model_sources.store import PREFIX, Store, claim, hub_files, make_private, models_in, sweep
from flambeau.serving.model_sources.urls import compile_patterns
from flambeau.wire.cluster_messages import RemoteFiles
from support.archives import pack_handler
from support.file_server import serving_files


def test_folder_that_cannot_be_unpacked_into_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="set TMPDIR to a writable folder"):
        Store(None).open_path(pack_handler(tmp_path, "echo"))


def test_what_is_unpacked_is_discarded(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = Store(None)
    sources = [store.open_path(pack_handler(tmp_path, "echo")) for _ in range(2)]
    assert sources[0].folder != sources[1].folder
    store.discard(sources[0])
    assert not sources[0].folder.exists()
    assert sources[1].folder.exists()
    store.close()
    assert not [*tmp_path.glob(f"{PREFIX}*")]


def test_only_folders_without_a_lock_are_deleted(tmp_path):
    dead, alive = tmp_path / f"{PREFIX}dead", tmp_path / f"{PREFIX}alive"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "in-use").touch()
    held = claim(alive)
    assert held is not None
    sweep(tmp_path)
    assert not dead.exists()
    assert alive.exists()


@pytest.mark.parametrize("url", ["", "/", ".", "..", "a/../b", "nothing.mar", "http://example.com/x.mar"])
async def test_urls_lead_nowhere_but_into_the_store(tmp_path, url):
    with pytest.raises(ModelNotFound):
        await Store(tmp_path).open(url)


def test_store_lists_archives_and_model_folders(tmp_path):
    pack_handler(tmp_path, "echo")
    pack_handler(tmp_path, "echo", name="folder", format="no-archive")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "other").mkdir()
    assert [path.name for path in models_in(tmp_path)] == ["echo.mar", "folder"]


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A store, an archive in it, and its source, with two files at least."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("tmp", "store"):
        (tmp_path / name).mkdir()
    store = Store(tmp_path / "store")
    archive = pack_handler(tmp_path / "store", "echo")
    yield store, archive, store.open_path(archive)
    store.close()


def files_in(folder):
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_deleted_files_are_unpacked_again_and_the_others_stay(unpacked):
    _, _, source = unpacked
    before = files_in(source.folder)
    source.restore()
    assert files_in(source.folder) == before
    (source.folder / "echo.py").unlink()
    source.restore()
    after = files_in(source.folder)
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] == before[name]} == before.keys() - {"echo.py"}


def test_emptied_temporary_folder_is_filled_again_for_this_user_alone(unpacked, tmp_path):
    store, archive, source = unpacked
    names = files_in(source.folder).keys()
    [scratch] = (tmp_path / "tmp").iterdir()
    shutil.rmtree(scratch)
    source.restore()
    assert files_in(source.folder).keys() == names
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    assert [path.name for path in scratch.joinpath("models").iterdir()] == [source.folder.name], "no draft stays"
    store.open_path(archive)
    sweep(tmp_path / "tmp")
    assert scratch.exists(), "it is held again"


def test_changed_or_missing_archive_is_not_unpacked_in_place_of_the_registered_one(unpacked):
    _, archive, source = unpacked
    (source.folder / "echo.py").unlink()
    state = archive.stat()
    os.utime(archive, ns=(state.st_mtime_ns + 1, state.st_mtime_ns + 1))
    with pytest.raises(ModelNotFound, match=r"echo.mar has changed since; register the model again"):
        source.restore()
    archive.unlink()
    with pytest.raises(ModelNotFound, match=r"echo.mar is gone too; register the model again"):
        source.restore()


def test_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        make_private(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError):
        make_private(tmp_path)


@pytest.mark.parametrize("has_store", [True, False])
async def test_model_of_the_hub_is_not_registered_and_the_remedy_is_named(tmp_path, has_store):
    with pytest.raises(ModelNotFound, match="Model not found at: acme/mood@v1") as caught:
        await Store(tmp_path if has_store else None, exact_paths=True).open("acme/mood@v1")
    assert "flambeau serve acme/mood@v1" in caught.value.cause
    assert "hf download acme/mood --local-dir" in caught.value.cause
    with pytest.raises(ModelNotFound, match="not been configured"):  # TorchServe's words
        await Store(None).open("acme/mood")


async def test_other_machines_may_download_what_this_one_has_downloaded(tmp_path):
    archive = pack_handler(tmp_path, "echo")
    (tmp_path / "store").mkdir()
    with serving_files() as web:
        web.files["/echo.mar"] = archive.read_bytes()
        downloader = Downloader(compile_patterns(["http://127.*", "file://.*"]), allow_private=True)
        store = Store(tmp_path / "store", downloader)
        source = await store.open(f"{web.url}/echo.mar")
        expected = RemoteFiles(url=f"{web.url}/echo.mar", allowed=["http://127.*", "file://.*"], allow_private=True)
        assert source.remote == (expected,)
        store.discard(source)
        assert (await store.open(f"file://{archive}")).remote == ()
        store.close()


def test_links_into_the_cache_of_the_hub_are_known(tmp_path):
    commit = "0123456789" * 4
    snapshot = tmp_path / "hub" / "models--acme--tiny--llama" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "checkpoint").symlink_to(snapshot)
    (tmp_path / "model" / "other").symlink_to(tmp_path)
    hub = f"acme/tiny--llama@{commit}"
    assert hub_files(snapshot) == (RemoteFiles(hub=hub),)
    assert hub_files(tmp_path / "model") == (RemoteFiles(folder="checkpoint", hub=hub),)
    assert hub_files(tmp_path / "hub") == ()
