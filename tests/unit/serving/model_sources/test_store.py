from __future__ import annotations

import tempfile

import pytest

from flambeau.errors import ConfigError, ModelNotFound
from flambeau.serving.model_sources.store import PREFIX, Store, claim, models_in, sweep
from support.archives import pack_handler


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


def test_only_folders_that_nobody_holds_are_swept(tmp_path):
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
