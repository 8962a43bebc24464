from __future__ import annotations

import gzip
import os
import re
import resource
import shutil
import stat
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from flambeau.logs import rolling_file
from flambeau.logs.rolling_file import RollingFile, rolled


def compressing():
    return [thread for thread in threading.enumerate() if thread.name == "compress-log"]


def test_files_are_rolled_by_size_and_five_are_kept(tmp_path):
    file = RollingFile(tmp_path / "ts_log.log", max_bytes=100)
    for number in range(9):
        file.write(f"{number}".encode() * 80 + b"\n")
        for thread in compressing():
            thread.join()
    file.close()
    assert (tmp_path / "ts_log.log").read_bytes() == b"8" * 80 + b"\n"
    kept = rolled(tmp_path / "ts_log.log")
    assert len(kept) == 5
    assert all(re.fullmatch(r"ts_log\.\d\d-[A-Za-z]{3}(\.\d)?\.log\.gz", path.name) for path in kept)
    assert sorted(gzip.decompress(path.read_bytes())[:1] for path in kept) == [b"3", b"4", b"5", b"6", b"7"]


def test_files_are_rolled_every_day(tmp_path):
    path = tmp_path / "access_log.log"
    path.write_bytes(b"yesterday\n")
    yesterday = time.time() - 86_400
    os.utime(path, (yesterday, yesterday))
    file = RollingFile(path)
    file.write(b"today\n")
    for thread in compressing():
        thread.join()
    file.close()
    assert path.read_bytes() == b"today\n"
    day = time.strftime("%d-%b", time.localtime(yesterday))
    assert gzip.decompress((tmp_path / f"access_log.{day}.log.gz").read_bytes()) == b"yesterday\n"


@pytest.fixture
def open_file():
    """Opens files that are closed after the test."""
    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(closing(RollingFile(*words, **options)))


@pytest.fixture
def at_once(monkeypatch):
    """A file that failed is tried again with the next line."""
    monkeypatch.setattr(rolling_file, "RETRY_S", 0.0)
    monkeypatch.setattr(rolling_file, "CHECK_S", 0.0)


@contextmanager
def size_limit(size):
    """Limits the size of files of this process, which fails as a full disk does; pytest may write to a longer one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_loses_whole_lines_and_the_file_is_continued(tmp_path, open_file, at_once):
    path = tmp_path / "ts_log.log"
    file = open_file(path)
    file.write(b"first\n")
    with size_limit(10):
        file.write(b"cut here\nlost\n")
        file.write(b"lost\n")
    assert file.problem == "File too large"
    assert file.num_lost == 3
    file.write(b"again\n")
    assert not file.problem
    assert path.read_bytes() == b"first\ncut \nagain\n"


@pytest.mark.parametrize("deleted", ["file", "folder"])
def test_deleted_file_is_created_again(tmp_path, open_file, at_once, deleted):
    path = tmp_path / "logs" / "ts_log.log"
    file = open_file(path)
    file.write(b"first\n")
    path.unlink() if deleted == "file" else shutil.rmtree(path.parent)
    file.write(b"second\n")
    assert path.read_bytes() == b"second\n"
    assert file.num_lost == 0


def test_file_that_another_program_moved_is_left_and_a_new_one_begun(tmp_path, open_file, at_once):
    file = open_file(tmp_path / "ts_log.log")
    file.write(b"first\n")
    (tmp_path / "ts_log.log").rename(tmp_path / "ts_log.log.1")
    file.write(b"second\n")
    assert (tmp_path / "ts_log.log").read_bytes() == b"second\n"
    assert (tmp_path / "ts_log.log.1").read_bytes() == b"first\n"


def test_other_users_cannot_read_logs_new_or_compressed(tmp_path, open_file):
    mask = os.umask(0)
    try:
        file = open_file(tmp_path / "ts_log.log", max_bytes=10)
        for _ in range(2):
            file.write(b"a line\n")
        for thread in compressing():
            thread.join()
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}
    assert len([*tmp_path.iterdir()]) == 2


def test_file_in_a_folder_that_allows_no_new_names_grows(tmp_path, open_file, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    file = open_file(tmp_path / "ts_log.log", max_bytes=10)
    monkeypatch.setattr(os, "replace", refuse)
    for _ in range(3):
        file.write(b"a line\n")
    assert (tmp_path / "ts_log.log").read_bytes() == b"a line\n" * 3
    assert file.num_lost == 0


def test_only_rolled_files_are_deleted(tmp_path, open_file):
    (tmp_path / "ts_log.mine.log").touch()
    file = open_file(tmp_path / "ts_log.log", max_bytes=10, kept=1)
    for _ in range(4):
        file.write(b"a line\n")
        for thread in compressing():
            thread.join()
    assert (tmp_path / "ts_log.mine.log").exists()
    assert len(rolled(tmp_path / "ts_log.log")) == 1
