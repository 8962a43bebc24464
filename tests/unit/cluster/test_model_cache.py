"""The files of models on a machine of the cluster."""

from __future__ import annotations

import pytest

from flambeau.cluster.model_cache import ModelCache, ModelTransfer, append
from flambeau.wire.model_files import digest_of, list_files


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "weights").mkdir(parents=True)
    (folder / "handler.py").write_text("def handle(data, context): ...\n")
    (folder / "weights" / "w.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "empty").write_bytes(b"")
    return folder


@pytest.fixture
def cache(tmp_path):
    return ModelCache(tmp_path / "cache")


def test_same_files_at_the_same_path_are_used_in_place(cache, model):
    assert cache.find(str(model), list_files(model), "") == str(model)


def test_other_files_at_the_same_path_are_not(cache, model):
    files = list_files(model)
    (model / "handler.py").write_text("def handle(data, context): ... # another\n")
    assert cache.find(str(model), files, "") == ""
    assert cache.find(str(model), files, "0" * 64) == ""


def test_copy_with_times_of_its_own_is_used_in_place(cache, model):
    files = [type(file)(file.path, file.size, 1) for file in list_files(model)]
    assert cache.find(str(model), files, "") == ""
    assert cache.find(str(model), files, digest_of(model)) == str(model)


def test_bytecode_does_not_count(model):
    before = digest_of(model)
    (model / "__pycache__").mkdir()
    (model / "__pycache__" / "handler.pyc").write_bytes(b"x")
    assert digest_of(model) == before


async def received(cache, model, digest, size=1000):
    transfer = ModelTransfer(cache, digest)
    for file in list_files(model):
        data = (model / file.path).read_bytes()
        for start in range(0, max(1, len(data)), size):
            transfer.add(file.path, data[start : start + size])
    transfer.add("", b"")
    return await transfer.run()


async def test_pieces_become_a_folder_that_is_found_by_its_digest(cache, model):
    digest = digest_of(model)
    folder = await received(cache, model, digest)
    assert digest_of(type(model)(folder)) == digest
    assert cache.find("/nowhere", [], digest) == folder
    assert await received(cache, model, digest) == folder  # again, by another agent


async def test_damaged_pieces_are_refused_and_leave_nothing(cache, model, tmp_path):
    with pytest.raises(ValueError, match="damaged"):
        await received(cache, model, "0" * 64)
    assert [*(tmp_path / "cache").iterdir()] == []


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "a\0b"])
def test_path_outside_of_the_folder_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match="not a path inside"):
        append(tmp_path / "root", path, b"x")
    assert [*tmp_path.iterdir()] == []
