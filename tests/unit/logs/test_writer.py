from __future__ import annotations

import logging
import os
import re
import time

import pytest

from flambeau.logs import console, rolling_file, writer
from flambeau.logs.access_log import http_line
from flambeau.logs.line_formats import ACCESS, MODEL, SERVER, TS_METRICS, LineFormat, message_format
from flambeau.logs.rolling_file import RollingFile
from flambeau.logs.setup import QueueHandler
from flambeau.logs.writer import Logs

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_every_line_goes_to_its_file_the_servers_file_and_the_console(tmp_path, pipe):
    names = {SERVER: "ts_log.log", ACCESS: "access_log.log", MODEL: "model_log.log", TS_METRICS: "ts_metrics.log"}
    files = {channel: RollingFile(tmp_path / "logs" / name) for channel, name in names.items()}
    logs = Logs(pipe[1], files, is_terminal=False)
    logs.add(LineFormat(ACCESS, to_text=lambda word, second: f"{word} asked"), ("somebody",))
    logs.put(MODEL, logging.WARNING, "W-1-m_1-stderr", MODEL, [b"one", "zwei \xfc".encode("latin-1")])
    logs.put(TS_METRICS, logging.INFO, "main", TS_METRICS, "QueueTime")
    logs.put(SERVER, logging.DEBUG, "main", "flambeau.x", "state")
    logs.close()
    read = {channel: (tmp_path / "logs" / name).read_text().splitlines() for channel, name in names.items()}
    assert re.fullmatch(f"{TIME} - somebody asked", *read[ACCESS])
    assert re.fullmatch(f"{TIME} - QueueTime", *read[TS_METRICS])
    assert [line.partition(" MODEL_LOG - ")[2] for line in read[MODEL]] == ["one", "zwei �"]
    assert len(read[SERVER]) == 5
    assert os.read(pipe[0], 10_000).decode().splitlines() == read[SERVER]


def read_all(descriptor):
    """Everything that a pipe holds."""
    os.set_blocking(descriptor, False)
    found = b""
    try:
        while piece := os.read(descriptor, 1 << 20):
            found += piece
    except BlockingIOError:
        pass
    return found.decode()


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_console_without_a_reader_blocks_neither_callers_nor_files(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0.02)
    file = RollingFile(tmp_path / "ts_log.log")
    logs = Logs(pipe[1], {SERVER: file}, is_terminal=False)
    for number in range(5000):
        logs.add_now(message_format(SERVER, logging.INFO, "main", "x"), f"{number} {'y' * 200}")
    logs.close()
    assert (tmp_path / "ts_log.log").read_text().count("\n") == 5000
    assert logs.num_dropped == 0


def test_console_gets_the_number_of_lines_it_missed_when_it_is_read_again(pipe, monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0.02)
    monkeypatch.setattr(writer, "NOTE_S", 0.05)
    logs = Logs(pipe[1], is_terminal=False)
    for number in range(5000):
        logs.put(SERVER, logging.INFO, "main", "x", f"{number} {'y' * 200}")
    wait_for(lambda: not logs._waiting and logs._console.num_lost)
    before = read_all(pipe[0])
    wait_for(lambda: not logs._console.num_lost)  # without a further line
    after = read_all(pipe[0])
    logs.close()
    lines = (before + after).splitlines()
    numbers = [int(line.partition(" x - ")[2].split()[0]) for line in lines if " x - " in line]
    [note] = [line for line in lines if "log lines were dropped" in line]
    assert numbers == [*range(len(numbers))], "no line is cut, none is written twice"
    assert f"{5000 - len(numbers)} log lines were dropped" in note


def test_what_waits_is_bounded_in_bytes_and_drops_are_counted(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 100_000)
    logs = Logs(None, {SERVER: RollingFile(tmp_path / "ts_log.log")}, is_terminal=False)
    with logs._writing:  # as a disk that hangs
        for _ in range(20):
            logs.put(MODEL, logging.INFO, "W", MODEL, [b"x" * 1000] * 50)
            logs.put(SERVER, logging.INFO, "main", "x", "y" * 30_000)
            logs.add(LineFormat(ACCESS, to_text=http_line), ("/h:1", "GET", "/" + "z" * 40_000), 40_000)
        assert sum(entry[-1] for entry in logs._waiting) < 100_000
        dropped = logs.num_dropped
    assert dropped > 0
    logs._waiting.clear()
    logs.put(SERVER, logging.INFO, "main", "x", "afterwards")
    logs.close()
    assert f"{dropped} log lines were dropped" in (tmp_path / "ts_log.log").read_text()
    assert logs._added_bytes == logs._taken_bytes


def test_file_that_failed_is_written_again_and_the_gap_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(rolling_file, "RETRY_S", 0.0)
    folder = tmp_path / "logs"
    folder.write_text("a file is in the way")
    files = {SERVER: RollingFile(tmp_path / "ts_log.log"), ACCESS: RollingFile(folder / "access_log.log")}
    logs = Logs(None, files, is_terminal=False)
    logs.put(ACCESS, logging.INFO, "main", ACCESS, "lost")
    logs.put(ACCESS, logging.INFO, "main", ACCESS, "lost too")
    wait_for(lambda: files[ACCESS].num_lost == 2)
    folder.unlink()
    logs.put(ACCESS, logging.INFO, "main", ACCESS, "kept")
    logs.close()
    assert [line.partition(" - ")[2] for line in (folder / "access_log.log").read_text().splitlines()] == ["kept"]
    assert f"{folder / 'access_log.log'} is written again; 2 log lines were" in (tmp_path / "ts_log.log").read_text()


def test_records_of_python_logging_carry_the_workers_name(pipe):
    logs = Logs(pipe[1], is_terminal=False)
    logger = logging.Logger("flambeau.serving.workers.supervisor")
    logger.addHandler(QueueHandler(logs))
    logger.info("Retry worker: %d in %g seconds.", 9000, 1.0, extra={"worker": "W-9000-m_1.0"})
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed")
    logs.close()
    logger.info("last words")
    text = os.read(pipe[0], 10_000).decode()
    assert re.match(
        TIME + r" \[INFO \] W-9000-m_1.0 flambeau.serving.workers.supervisor - Retry worker: 9000 in 1 sec", text
    )
    assert "[ERROR] main flambeau.serving.workers.supervisor - failed\nTraceback" in text
    assert "ValueError: no" in text
    assert "last words" in text


def test_lines_below_a_logs_level_are_dropped(pipe):
    logs = Logs(pipe[1], levels={ACCESS: logging.WARNING}, is_terminal=False)
    logs.put(ACCESS, logging.INFO, "main", ACCESS, "quiet")
    logs.put(SERVER, logging.INFO, "main", "x", "loud")
    logs.close()
    assert b"quiet" not in (text := os.read(pipe[0], 1000))
    assert b"loud" in text


def test_logs_continue_after_a_line_that_cannot_be_formatted(pipe):
    logs = Logs(pipe[1])
    logs.add(LineFormat(SERVER, to_text=lambda second: 1 / 0), ())
    logs.put(SERVER, logging.INFO, "main", "x", "lost with it")
    while logs._waiting:
        time.sleep(0.01)
    logs.put(SERVER, logging.INFO, "main", "x", "still here")
    logs.close()
    text = os.read(pipe[0], 10_000).decode()
    assert "still here" in text
    assert "ZeroDivisionError" in text


def test_control_characters_in_records_are_escaped():
    class Taken:
        is_json = False

        def add_now(self, line, payload, num_bytes):
            self.entry = line.thread, line.logger, payload

    logs = Taken()
    record = logging.LogRecord("flambeau", logging.INFO, "", 0, "model %s", ("a\rb",), None)
    record.worker = "W-1\nx"
    QueueHandler(logs).emit(record)
    assert logs.entry == ("W-1\\nx", "flambeau", "model a\\rb")


def test_entries_added_while_the_logs_close_are_written(tmp_path):
    file = RollingFile(tmp_path / "ts_log.log")
    logs = Logs(None, {SERVER: file}, is_terminal=False)
    logs.put(SERVER, logging.INFO, "main", "x", "first")
    join = logs._thread.join

    def join_late(timeout_s):
        join(timeout_s)
        logs.put(SERVER, logging.INFO, "main", "x", "last")

    logs._thread.join = join_late
    logs.close()
    assert [line.partition(" x - ")[2] for line in (tmp_path / "ts_log.log").read_text().splitlines()] == [
        "first",
        "last",
    ]


def test_a_console_that_is_a_file_gets_everything_at_once(tmp_path, monkeypatch):
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    sizes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: sizes.append(len(data)) or write(to, data))
    console.Console(descriptor).write(b"line\n" * 20_000)
    os.close(descriptor)
    assert sizes == [100_000]
    assert (tmp_path / "out").stat().st_size == 100_000
