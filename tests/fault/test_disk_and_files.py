"""Disks that are full or hang, consoles without a reader, files that somebody deletes: the server goes on."""

from __future__ import annotations

import os
import re
import resource
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from support.archives import pack_handler
from support.running import HANDLERS, RunningServer


def memory_mb(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def log_process_of(pid):
    """The process that writes a server's logs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [found] = [each for each in children if b"flambeau.logs.log_process" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return int(found)


class Unread:
    """A pipe that is not read until `read`: it blocks as a console without a reader does, or a disk that hangs."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = path
        self.data = bytearray()
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._read)

    def read(self):
        """Read from now on."""
        os.set_blocking(self._reader, True)
        self._thread.start()

    def _read(self):
        while piece := os.read(self._reader, 1 << 16):
            self.data += piece

    def close(self):
        """Call it when the writer has ended."""
        if self._thread.ident:
            self._thread.join()
        os.close(self._reader)


def growth_mb(server, *, megabytes, calls):
    """Print while nobody reads; return by how much the server's memory grew at most."""
    before = most = memory_mb(server.process.pid)
    for _ in range(calls):
        assert server.predict("talkative", str(megabytes).encode()).status == 200
        most = max(most, memory_mb(server.process.pid))
    return most - before


def dropped_in(text):
    return sum(int(number) for number in re.findall(rb"(\d+) log lines were dropped", text))


def test_unread_console_costs_bounded_memory_and_the_gap_is_logged(tmp_path):
    unread = Unread(tmp_path / "pipe")
    server = RunningServer(unread.path, str(HANDLERS / "talkative.py"), "--access-log").wait_ready()
    try:
        assert growth_mb(server, megabytes=20, calls=8) < 90
        unread.read()
        server.until(lambda: dropped_in(unread.data))
    finally:
        assert server.stop() == 0
        unread.close()
    read = unread.data.count(b"x" * 99)
    assert read + dropped_in(unread.data) == pytest.approx(8 * 20 * 10_000, abs=1000)  # and lines of the server


def test_log_disk_that_hangs_costs_bounded_memory_and_the_gap_is_logged(tmp_path):
    (tmp_path / "logs").mkdir()
    unread = Unread(tmp_path / "logs" / "model_log.log")
    folder = ("--log-folder", str(tmp_path / "logs"))
    server = RunningServer(tmp_path / "log", str(HANDLERS / "talkative.py"), *folder).wait_ready()
    try:
        assert growth_mb(server, megabytes=20, calls=5) < 90
        unread.read()
        server.until(lambda: dropped_in(server.log_path.read_bytes()[-1000:]))
    finally:
        assert server.stop() == 0
        unread.close()
    read = unread.data.count(b"x" * 99)
    assert read + dropped_in(server.log_path.read_bytes()) == pytest.approx(5 * 20 * 10_000, abs=1000)  # as above


@pytest.fixture
def logging_server(tmp_path):
    folder = tmp_path / "logs"
    server = RunningServer(tmp_path / "log", str(HANDLERS / "echo.py"), "--log-folder", str(folder)).wait_ready()
    yield server, folder
    assert server.stop() == 0


def test_logs_are_written_again_after_the_disk_was_full(logging_server):
    server, folder = logging_server
    pid = log_process_of(server.process.pid)
    server.until(lambda: "/readyz" in (folder / "access_log.log").read_text())
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    for number in range(50):
        assert server.request("GET", f"/ping?full={number}").status == 200
    time.sleep(2)  # lines are written a little later, and nothing shows that they were tried: the console is full too
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    def is_told():
        server.request("GET", "/ping?free")
        return "access_log.log is written again; " in (folder / "ts_log.log").read_text()

    server.until(is_told)
    text = (folder / "access_log.log").read_text()
    assert "/ping?full" not in text
    assert "/ping?free" in text
    assert dropped_in((folder / "ts_log.log").read_bytes()) >= 50


def test_deleted_log_folder_is_created_again(logging_server):
    server, folder = logging_server
    shutil.rmtree(folder)

    def is_written():
        server.request("GET", "/ping?later")
        return (folder / "access_log.log").exists() and "/ping?later" in (folder / "access_log.log").read_text()

    server.until(is_written)


def test_other_users_cannot_read_the_logs(logging_server):
    _, folder = logging_server
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


def test_worker_starts_again_after_the_temporary_folder_was_cleaned(tmp_path, start):
    for name in ("tmp", "store"):
        (tmp_path / name).mkdir()
    archive = pack_handler(tmp_path / "store", "faulty")
    server = start(archive, env={"TMPDIR": str(tmp_path / "tmp")}).wait_ready()
    for scratch in (tmp_path / "tmp").iterdir():
        shutil.rmtree(scratch)
    assert server.predict("faulty", {"do": "exit"}).status == 500
    assert server.predict("faulty", {"do": "answer"}).status == 200
    assert server.logged("faulty.mar", "again", level="WARNING")
