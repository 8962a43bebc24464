"""LogProcess: a real process that writes the lines."""

from __future__ import annotations

import logging
import marshal
import os
import signal
import subprocess
import sys
import time

import pytest

from flambeau.logs import log_process
from flambeau.logs.access_log import AccessLog
from flambeau.logs.line_formats import ACCESS, MODEL, SERVER, LineFormat, message_format
from flambeau.logs.log_process import (
    AT_ONCE,
    FEW,
    GATHERED,
    LATE_S,
    MANY,
    MARSHAL_VERSION,
    LogProcess,
    LogTargets,
    Priority,
    framed,
    read_frame,
    take_frames,
    yields,
)

LINE = message_format(SERVER, logging.INFO, "main", "test")


@pytest.fixture
def targets(tmp_path):
    names = {SERVER: "ts_log.log", ACCESS: "access_log.log", MODEL: "model_log.log"}
    return LogTargets(console=None, files={channel: tmp_path / name for channel, name in names.items()})


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_of_every_kind_are_written_in_order(targets, tmp_path):
    logs = LogProcess(targets, has_access_log=True)
    for i in range(3000):
        logs.add(LINE, f"line {i}")
    AccessLog(logs).http("/127.0.0.1:1", "GET", "/ping", "", "1.1", 200, 0.002)
    logs.add(LineFormat(MODEL, thread="W-1", to_text="at {}".format), ())
    logs.put(MODEL, logging.INFO, "W-1", MODEL, [b"printed", b"\xff"])
    logs.close(60)
    written = lines_of(tmp_path / "ts_log.log")
    assert [line.rpartition(" - ")[2] for line in written[:3000]] == [f"line {i}" for i in range(3000)]
    assert lines_of(tmp_path / "access_log.log")[0].endswith('- /127.0.0.1:1 "GET /ping HTTP/1.1" 200 2')
    at, printed, not_utf8 = lines_of(tmp_path / "model_log.log")
    assert abs(int(at.rpartition(" ")[2]) - time.time()) < 60
    assert (printed.rpartition(" ")[2], not_utf8.rpartition(" ")[2]) == ("printed", "\ufffd")


def test_a_line_is_written_soon(targets, tmp_path):
    logs = LogProcess(targets)
    logs.add(LINE, "soon")
    until(lambda: lines_of(tmp_path / "ts_log.log"))
    logs.close(60)
    logs.close(60)  # twice is harmless


def test_flush_returns_when_all_is_written(targets, tmp_path):
    logs = LogProcess(targets)
    for i in range(3):
        logs.add(LINE, f"line {i}")
        logs.flush(60)
        assert len(lines_of(tmp_path / "ts_log.log")) == i + 1
    logs.close(60)
    logs.flush()  # there is nobody to wait for


def test_lines_after_the_end_go_to_the_console(targets, capfd):
    logs = LogProcess(LogTargets(console=1, files=targets.files))
    logs.close(60)
    logs.add(LINE, "late")
    assert capfd.readouterr().out.endswith("late\n")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_a_group_do_not_end_it(targets, tmp_path, sign):
    logs = LogProcess(targets)
    logs.add(LINE, "first")
    until(lambda: lines_of(tmp_path / "ts_log.log"))  # it runs, and ignores them
    os.kill(logs.pid, sign)
    logs.add(LINE, "second")
    until(lambda: len(lines_of(tmp_path / "ts_log.log")) == 2)
    assert logs._process.poll() is None
    logs.close(60)


def test_if_it_is_killed_the_server_writes_itself(targets, tmp_path):
    logs = LogProcess(targets)
    logs.add(LINE, "first")
    until(lambda: lines_of(tmp_path / "ts_log.log"))
    os.kill(logs.pid, signal.SIGKILL)
    logs._process.wait()
    logs.add(LINE, "second")
    until(lambda: len(lines_of(tmp_path / "ts_log.log")) == 3)
    logs.close(60)
    _, note, second = lines_of(tmp_path / "ts_log.log")
    assert "the server writes its logs itself" in note
    assert second.endswith(" - second")


def test_dropped_lines_are_reported(targets, tmp_path, monkeypatch):
    monkeypatch.setattr("flambeau.logs.writer.MAX_WAITING_BYTES", 5000)
    logs = LogProcess(targets)
    with logs._writing:  # as a process that does not read
        for i in range(100):
            logs.add(LINE, f"line {i}")
        assert logs.num_dropped
    until(lambda: any("were dropped" in line for line in lines_of(tmp_path / "ts_log.log")))
    logs.close(60)
    kept = [line for line in lines_of(tmp_path / "ts_log.log") if " - line " in line]
    assert len(kept) + logs.num_dropped == 100


def test_the_few_entries_of_a_quiet_server_are_passed_on_at_once(targets, tmp_path, monkeypatch):
    monkeypatch.setattr(LogProcess, "_start", lambda self: None)  # no other thread takes any
    monkeypatch.setattr(log_process, "QUIET_S", 60)
    logs = LogProcess(targets)
    for i in range(AT_ONCE):
        logs.add(LINE, str(i))
        assert not logs._waiting
    until(lambda: len(lines_of(tmp_path / "ts_log.log")) == AT_ONCE)
    logs.add(LINE, "one too many")  # a busy server's are gathered
    assert len(logs._waiting) == 1
    monkeypatch.setattr(log_process, "QUIET_S", 0)
    logs._will_write = False  # as the writing thread leaves it
    logs.add(LINE, "after a while")
    assert not logs._waiting
    logs.close(60)
    assert [line.rpartition(" - ")[2] for line in lines_of(tmp_path / "ts_log.log")] == [
        *map(str, range(AT_ONCE)),
        "one too many",
        "after a while",
    ]


def test_lines_that_wait_in_the_pipe_are_all_written_before_a_flush_returns(targets, tmp_path, monkeypatch):
    logs = LogProcess(targets)
    logs.add(LINE, "first")
    until(lambda: lines_of(tmp_path / "ts_log.log"))
    os.kill(logs.pid, signal.SIGSTOP)
    monkeypatch.setattr(LogProcess, "_start", lambda self: None)
    for i in range(AT_ONCE // 2):
        logs.add(LINE, str(i))
    os.kill(logs.pid, signal.SIGCONT)
    logs.flush(60)
    assert [line.rpartition(" - ")[2] for line in lines_of(tmp_path / "ts_log.log")] == [
        "first",
        *map(str, range(AT_ONCE // 2)),
    ]
    logs.close(60)


def test_an_entry_that_the_pipe_does_not_take_whole_wakes_the_writing_thread(targets, tmp_path, monkeypatch):
    logs = LogProcess(targets)
    with monkeypatch.context() as patched:
        patched.setattr(logs, "_write_unsent", lambda: None)  # a full pipe
        patched.setattr(logs, "_start", lambda: None)
        logs.add(LINE, "first")
    assert logs._will_write
    logs._start()
    until(lambda: lines_of(tmp_path / "ts_log.log"))
    logs.close(60)


def test_many_entries_are_passed_on_by_the_thread_that_adds_them(targets, tmp_path, monkeypatch):
    monkeypatch.setattr(LogProcess, "_start", lambda self: None)  # no other thread takes any
    monkeypatch.setattr(log_process, "AT_ONCE", 0)
    logs = LogProcess(targets)
    for i in range(GATHERED - 1):
        logs.add(LINE, str(i))
    assert len(logs._waiting) == GATHERED - 1
    logs.add(LINE, "last")
    assert not logs._waiting
    until(lambda: len(lines_of(tmp_path / "ts_log.log")) == GATHERED)
    logs.close(60)


def test_entries_wait_behind_the_rest_of_a_frame(targets, tmp_path, monkeypatch):
    monkeypatch.setattr(LogProcess, "_start", lambda self: None)
    logs = LogProcess(targets)
    with logs._writing:
        logs._unsent = framed(marshal.dumps(logs._frame([(LINE, time.time(), "first", 0)]), MARSHAL_VERSION))
    for i in range(GATHERED):
        logs.add(LINE, str(i))
    assert len(logs._waiting) == GATHERED
    logs.close(60)
    assert [line.rpartition(" - ")[2] for line in lines_of(tmp_path / "ts_log.log")] == [
        "first",
        *map(str, range(GATHERED)),
    ]


def test_a_process_that_does_not_read_blocks_no_caller_and_misses_nothing(targets, tmp_path):
    logs = LogProcess(targets)
    logs.add(LINE, "first")
    until(lambda: lines_of(tmp_path / "ts_log.log"))
    os.kill(logs.pid, signal.SIGSTOP)
    number = 12_000  # more than the pipe takes
    began = time.monotonic()
    for i in range(number):
        logs.add(LINE, f"{i:0120d}")
    assert time.monotonic() - began < 30
    assert logs._waiting
    os.kill(logs.pid, signal.SIGCONT)
    logs.close(60)
    assert logs.num_dropped == 0
    written = [line.rpartition(" - ")[2] for line in lines_of(tmp_path / "ts_log.log")[1:]]
    assert written == [f"{i:0120d}" for i in range(number)]


def test_many_entries_at_once_reach_the_files_of_a_server_whose_process_was_killed(targets, tmp_path):
    logs = LogProcess(targets)
    logs.add(LINE, "first")
    until(lambda: lines_of(tmp_path / "ts_log.log"))
    os.kill(logs.pid, signal.SIGKILL)
    logs._process.wait()
    for i in range(3 * GATHERED):
        logs.add(LINE, f"line {i}")
    logs.close(60)
    _, note, *written = lines_of(tmp_path / "ts_log.log")
    assert "the server writes its logs itself" in note
    assert [line.rpartition(" - ")[2] for line in written] == [f"line {i}" for i in range(3 * GATHERED)]


def test_formats_are_sent_once_and_forgotten_when_there_are_many(targets, monkeypatch):
    monkeypatch.setattr(log_process, "MAX_FORMATS", 3)
    logs = LogProcess(targets)
    frames = [logs._frame([(message_format(SERVER, 20, "main", f"l{i}"), 0.0, "x", 0)]) for i in (0, 1, 1, 2, 3, 4, 0)]
    logs.close(60)
    assert [bool(formats) for formats, _, _ in frames] == [True, True, False, True, True, True, True]
    assert [entries[0][0] for _, entries, _ in frames] == [0, 1, 1, 2, 3, 0, 1]
    formats: dict[int, LineFormat] = {}
    written: list[str] = []

    class Collected:
        num_dropped = 0

        def write_batch(self, batch):
            written.extend(line.logger for line, *_ in batch)

    take_frames(frames[:3], formats, Collected())
    for frame in frames[3:]:
        take_frames([frame], formats, Collected())
    assert written == ["l0", "l1", "l1", "l2", "l3", "l4", "l0"]


def test_lines_of_a_killed_server_are_written(targets, tmp_path):
    program = f"""
import os, signal
from pathlib import Path
from flambeau.logs.line_formats import SERVER, message_format
from flambeau.logs.log_process import LogProcess, LogTargets
logs = LogProcess(LogTargets(console=None, files={{SERVER: Path({str(tmp_path / "ts_log.log")!r})}}))
for i in range(100):
    logs.add(message_format(SERVER, 20, "main", "test"), f"line {{i}}")
while logs._waiting or logs._taken_bytes < logs._added_bytes:
    pass
print(logs.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: len(lines_of(tmp_path / "ts_log.log")) == 100)
    until(lambda: not is_running(int(done.stdout)))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_half_a_frame_is_the_end():
    reading, writing = os.pipe()
    os.write(writing, b"\x05\0\0\0abc")
    os.close(writing)
    assert read_frame(reading) is None
    os.close(reading)


def test_lines_of_a_busy_server_wait_for_an_idle_core_unless_they_are_late():
    assert not yields(MANY - 1, 0.0, False)
    assert yields(MANY, 0.0, False)
    assert yields(FEW, 0.0, True)
    assert not yields(FEW - 1, 0.0, True)
    assert not yields(MANY, LATE_S, True)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")
def test_only_what_may_wait_runs_without_a_priority():
    found, priority = [], Priority()
    for waits in (True, False, True):
        priority.run(lambda: found.append(os.sched_getscheduler(0)), yields=waits)
    assert found == [os.SCHED_IDLE, os.SCHED_OTHER, os.SCHED_IDLE]
