"""Files of clients."""

from __future__ import annotations

import pytest

from flambeau.errors import BadRequest
from flambeau.frontend.openai_batches import file_store
from flambeau.frontend.openai_batches.file_store import FileStore


def add(store, content=b"abc", owner=""):
    return store.add(content, filename="a.jsonl", purpose="batch", owner=owner, now=1.5)


def test_file_survives_a_restart(tmp_path):
    store = FileStore(tmp_path / "files")
    stored = add(store)
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    again = FileStore(tmp_path / "files")
    assert again.get(stored.id, "") == stored
    assert again.read(stored) == b"abc"
    assert stored.document()["bytes"] == 3
    again.delete(stored)
    assert FileStore(tmp_path / "files").of("") == []


def test_file_belongs_to_the_key_that_made_it(tmp_path):
    store = FileStore(tmp_path)
    stored = add(store, owner="ann")
    assert store.get(stored.id, "bob") is None
    assert store.of("bob") == []
    assert store.of("ann") == [stored]


def test_file_of_the_same_folder_is_moved(tmp_path):
    store = FileStore(tmp_path)
    (tmp_path / "made").write_bytes(b"ab")
    stored = add(store, tmp_path / "made")
    assert store.read(stored) == b"ab"
    assert not (tmp_path / "made").exists()


def test_files_have_a_limit_together(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_TOTAL_BYTES", 5)
    store = FileStore(tmp_path)
    add(store)
    with pytest.raises(BadRequest, match="delete some"):
        add(store)


def test_broken_description_is_left_out(tmp_path, caplog):
    store = FileStore(tmp_path)
    stored = add(store)
    (tmp_path / f"{stored.id}.json").write_text("{")
    assert FileStore(tmp_path).of("") == []
    assert stored.id in caplog.text
