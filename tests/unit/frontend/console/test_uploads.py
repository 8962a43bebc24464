"""Archives that arrive in pieces."""

from __future__ import annotations

import pytest

from flambeau.config.server import ServerConfig
from flambeau.errors import BadRequest, FileTaken, NotAllowed
from flambeau.frontend.console.uploads import add_piece, check_allowed, discard


def test_pieces_become_a_file_with_the_last_one(tmp_path):
    assert not add_piece(tmp_path, "a.mar", b"one ", offset=0, size=7)
    assert [path.name for path in tmp_path.iterdir()] == [".a.mar.part"]
    assert add_piece(tmp_path, "a.mar", b"two", offset=4, size=7)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.mar": b"one two"}


def test_upload_can_begin_anew_and_be_given_up(tmp_path):
    add_piece(tmp_path, "a.mar", b"half", offset=0, size=9)
    add_piece(tmp_path, "a.mar", b"again", offset=0, size=9)
    assert (tmp_path / ".a.mar.part").read_bytes() == b"again"
    discard(tmp_path, "a.mar")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("offset", "size"), [(3, 9), (-1, 9), (0, 0), (0, 2), (0, 1 << 60)])
def test_piece_that_does_not_fit_is_rejected(tmp_path, offset, size):
    with pytest.raises(BadRequest):
        add_piece(tmp_path, "a.mar", b"half", offset=offset, size=size)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["../a.mar", "a/b.mar", ".a.mar", "a.py", "a.mar\0", "", "-.mar", "ä.mar"])
def test_name_must_be_that_of_an_archive(tmp_path, name):
    with pytest.raises(BadRequest):
        add_piece(tmp_path, name, b"x", offset=0, size=1)
    with pytest.raises(BadRequest):
        discard(tmp_path, name)


def test_file_of_the_store_is_never_overwritten(tmp_path):
    (tmp_path / "a.mar").write_bytes(b"mine")
    with pytest.raises(FileTaken):
        add_piece(tmp_path, "a.mar", b"x", offset=0, size=1)
    assert (tmp_path / "a.mar").read_bytes() == b"mine"


def test_uploads_must_be_allowed_and_need_a_store(tmp_path):
    with pytest.raises(NotAllowed, match="--allow-uploads"):
        check_allowed(ServerConfig(model_store=tmp_path))
    with pytest.raises(NotAllowed):
        check_allowed(ServerConfig(model_store=tmp_path, allow_uploads=True, model_api=False))
    with pytest.raises(BadRequest, match="--model-store"):
        check_allowed(ServerConfig(allow_uploads=True))
    assert check_allowed(ServerConfig(model_store=tmp_path, allow_uploads=True)) == tmp_path
