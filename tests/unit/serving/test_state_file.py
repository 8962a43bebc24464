"""The file that keeps a server's models: one server at a time, and never half of it."""

from __future__ import annotations

import os
from functools import partial

import pytest

from flambeau.errors import ConfigError
from flambeau.serving.saved_models import SavedModel, read_document
from flambeau.serving.server import nothing_to_save
from flambeau.serving.state_file import StateFile


class FakeServer:
    def __init__(self):
        self.registry = ()
        self.not_restored = {}
        self.on_change = None
        self.change_saved = nothing_to_save

    def lose(self, name):
        """A change: a model that is saved, and cannot be restored."""
        saved = SavedModel(name=name, version="1.0", url=f"{name}.mar", min_workers=1, max_workers=1)
        self.not_restored[saved.key] = saved
        self.on_change()


def names_in(path):
    return [saved.name for saved in read_document(path.read_bytes())]


async def test_a_change_is_on_disk_once_it_was_waited_for(tmp_path):
    file, server = StateFile(tmp_path / "state.json"), FakeServer()
    file.follow(server, file.models)
    file.start_saving()
    server.lose("a")
    await server.change_saved()
    assert names_in(file.path) == ["a"]
    assert file.path.stat().st_mode & 0o777 == 0o600
    server.lose("b")
    await file.close()
    assert names_in(file.path) == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "state.json.lock"]
    again = StateFile(tmp_path / "state.json")
    assert [saved.name for saved in again.models] == ["a", "b"]
    await again.close()


async def test_a_start_that_is_cut_short_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"format": 1, "models": []}')
    file, server = StateFile(path), FakeServer()
    file.follow(server, file.models)
    server.lose("a")
    await file.close()
    assert path.read_text() == '{"format": 1, "models": []}'


async def test_a_second_server_is_refused_while_the_first_runs(tmp_path):
    first = StateFile(tmp_path / "state.json")
    with pytest.raises(ConfigError, match="another server uses the state file"):
        StateFile(tmp_path / "state.json")
    await first.close()
    await StateFile(tmp_path / "state.json").close()


async def test_a_refused_file_stays_as_it_is(tmp_path):
    path = tmp_path / "state.json"
    for _ in range(2):  # it is not locked by the first try
        path.write_text("{")
        with pytest.raises(ConfigError, match="damaged"):
            StateFile(path)
    assert path.read_text() == "{"


@pytest.mark.parametrize("name", ["", "none/state.json"])
def test_folders_are_no_state_files_and_are_not_created(tmp_path, name):
    with pytest.raises(ConfigError, match="name a file in an existing folder"):
        StateFile(tmp_path / name)


async def test_what_a_full_disk_refused_is_written_with_the_next_change(tmp_path, monkeypatch, caplog):
    (tmp_path / ".state.json.draft").touch()  # of a server that was killed
    file, server = StateFile(tmp_path / "state.json"), FakeServer()
    file.follow(server, file.models)
    file.start_saving()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", partial(refuse, "No space left on device"))
        server.lose("a")
        await server.change_saved()
    assert not file.path.exists()
    assert "No space left on device" in caplog.text
    await file.close()
    assert names_in(file.path) == ["a"]


def refuse(text, descriptor):
    raise OSError(28, text)
