"""Files of blocks: bounded, private, and only those that are whole are read."""

from __future__ import annotations

import stat

import numpy as np
import pytest

from flambeau.llm.errors import LLMError
from flambeau.llm.kv_store.disk_blocks import HEADER, DiskBlocks, key_of

SIZE = 1000
FILE = SIZE + HEADER.size


def key(number: int) -> bytes:
    return bytes([number]) * 32


def content(number: int) -> np.ndarray:
    return np.full(SIZE, number, np.uint8)


def read(blocks: DiskBlocks, number: int) -> np.ndarray | None:
    found = np.zeros(SIZE, np.uint8)
    return found if blocks.read_into(key(number), found) else None


def test_what_was_written_is_read_by_the_next_process(tmp_path):
    blocks = DiskBlocks(tmp_path, 10 * FILE)
    blocks.write(key(1), content(1))
    blocks.close()
    again = DiskBlocks(tmp_path, 10 * FILE)
    assert key(1) in again
    assert (read(again, 1) == content(1)).all()
    assert again.size_bytes == FILE


def test_only_the_owner_reads_the_files(tmp_path):
    blocks = DiskBlocks(tmp_path / "new", 10 * FILE)
    blocks.write(key(1), content(1))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in blocks.folder.iterdir()}
    assert {*modes.values()} == {0o600}
    assert stat.S_IMODE(blocks.folder.stat().st_mode) == 0o700


def test_the_file_used_least_recently_is_deleted_first(tmp_path):
    blocks = DiskBlocks(tmp_path, 3 * FILE)
    for number in (1, 2, 3):
        blocks.write(key(number), content(number))
    assert read(blocks, 1) is not None
    blocks.write(key(4), content(4))
    assert [number for number in range(6) if key(number) in blocks] == [1, 3, 4]
    assert len([*blocks.folder.glob("*.kv")]) == 3
    blocks.close()
    smaller = DiskBlocks(tmp_path, FILE)
    assert [number for number in range(6) if key(number) in smaller] == [4]


def test_a_block_larger_than_the_limit_is_not_written(tmp_path):
    blocks = DiskBlocks(tmp_path, SIZE)
    blocks.write(key(1), content(1))
    assert len(blocks) == 0


@pytest.mark.parametrize("damage", ["cut", "changed", "longer", "of another key", "gone"])
def test_a_damaged_file_is_deleted_with_a_line(tmp_path, caplog, damage):
    blocks = DiskBlocks(tmp_path, 10 * FILE)
    blocks.write(key(1), content(1))
    blocks.write(key(2), content(2))
    path, other = (blocks.folder / f"{key(number).hex()}.kv" for number in (1, 2))
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        changes = {"cut": data[:-1], "changed": data[:-1] + b"x", "longer": data + b"x"}
        path.write_bytes(changes.get(damage, other.read_bytes()))
    assert read(blocks, 1) is None
    assert key(1) not in blocks
    assert not path.exists()
    assert len(caplog.records) == 1
    assert path.name in caplog.text
    assert (read(blocks, 2) == content(2)).all()


def test_other_files_stay_and_are_named_once(tmp_path, caplog):
    blocks = DiskBlocks(tmp_path, 10 * FILE)
    blocks.close()
    (blocks.folder / "notes.txt").write_text("mine")
    (blocks.folder / "short.kv").write_text("mine")
    (blocks.folder / f"{key(3).hex()}.kv").symlink_to(tmp_path)
    (blocks.folder / f"{key(1).hex()}.part").write_text("torn")
    again = DiskBlocks(tmp_path, 10 * FILE)
    assert len(again) == 0
    assert len(caplog.records) == 1
    assert "3 files" in caplog.text
    assert (again.folder / "notes.txt").exists()
    assert not [*again.folder.glob("*.part")]


def test_each_process_has_a_folder_of_its_own_and_finds_it_again(tmp_path):
    first, second = DiskBlocks(tmp_path, FILE), DiskBlocks(tmp_path, FILE)
    assert first.folder != second.folder
    first.close()
    assert DiskBlocks(tmp_path, FILE).folder == first.folder


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(LLMError, match="kv_disk_folder"):
        DiskBlocks(tmp_path / "file", FILE)


def test_a_disk_that_fails_costs_one_line(tmp_path, caplog):
    blocks = DiskBlocks(tmp_path, 10 * FILE)
    (blocks.folder / f"{key(1).hex()}.part").mkdir()
    blocks.write(key(1), content(1))
    blocks.write(key(1), content(1))
    assert key(1) not in blocks
    assert len(caplog.records) == 1


def test_names_of_blocks():
    assert key_of(f"{key(1).hex()}.kv") == key(1)
    assert [key_of(name) for name in ("lock", "ab.kv", f"{key(1).hex()}.part", f"{key(1).hex()}")] == [None] * 4
