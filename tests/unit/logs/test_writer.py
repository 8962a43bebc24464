from __future__ import annotations

import gzip
import logging
import os
import re
import threading
import time

import pytest

from flambeau.logs import rolling_file as rolling
from flambeau.logs import writer
from flambeau.logs.access import grpc_line, http_line, remote_of
from flambeau.logs.layouts import ACCESS, MODEL, SERVER, TS_METRICS, full_line, local_time, printable, terminal_line
from flambeau.logs.rolling_file import RollingFile
from flambeau.logs.writer import Logs, QueueHandler

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_layouts():
    assert re.fullmatch(TIME, local_time(1717105563.6254))
    assert local_time(1717105563.6254).endswith(",625")
    line = full_line(local_time(0), logging.WARNING, "W-9000-m_1.0-stderr", "MODEL_LOG", "hello")
    assert re.fullmatch(TIME + r" \[WARN \] W-9000-m_1\.0-stderr MODEL_LOG - hello\n", line)
    assert terminal_line(0, logging.INFO, "hello") == "1970-01-01T00:00:00Z INFO    hello\n"
    assert printable("a\nb\x1b[31m") == r"a\nb\x1b[31m"


def test_access_lines_are_torchserves():
    remote = remote_of(("127.0.0.1", 40122))
    assert http_line(remote, "POST", "/predictions/m", "", "1.1", 200, 0.0371, 0) == (
        '/127.0.0.1:40122 "POST /predictions/m HTTP/1.1" 200 37'
    )
    assert '"GET /models?limit=2 HTTP/1.0" 404 0' in http_line(remote, "GET", "/models", "limit=2", "1.0", 404, 0, 0)
    method = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    assert grpc_line("ipv4:127.0.0.1:59418", method, 0, 0.012, 0) == (
        '/127.0.0.1:59418 "gRPC org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions HTTP/2.0" 0 12'
    )
    assert remote_of("ipv6:%5B::1%5D:50051") == "/::1:50051"
    assert remote_of("") == remote_of(None) == "/local"


def test_every_line_goes_to_its_file_the_servers_file_and_the_console(tmp_path, pipe):
    names = {SERVER: "ts_log.log", ACCESS: "access_log.log", MODEL: "model_log.log", TS_METRICS: "ts_metrics.log"}
    files = {channel: RollingFile(tmp_path / "logs" / name) for channel, name in names.items()}
    logs = Logs(pipe[1], files, is_terminal=False)
    logs.put(ACCESS, logging.INFO, "main", ACCESS, (lambda word, created: f"{word} asked", "somebody"))
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


def test_a_console_that_nobody_reads_holds_nobody_up(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_WAITING", 1000)
    monkeypatch.setattr(writer, "PATIENCE_S", 0.02)
    file = RollingFile(tmp_path / "ts_log.log")
    logs = Logs(pipe[1], {SERVER: file}, is_terminal=False)
    began = time.monotonic()
    for _ in range(5000):
        logs.put_now(SERVER, logging.INFO, "main", "x", "y" * 200)
    assert time.monotonic() - began < 20  # it would wait for ever
    logs.close()
    assert logs.num_dropped > 0
    assert "log lines were dropped" in (tmp_path / "ts_log.log").read_text()


def test_python_logging_is_led_in_with_the_workers_name(pipe):
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


def test_lines_below_a_logs_level_are_left_out(pipe):
    logs = Logs(pipe[1], levels={ACCESS: logging.WARNING}, is_terminal=False)
    logs.put(ACCESS, logging.INFO, "main", ACCESS, "quiet")
    logs.put(SERVER, logging.INFO, "main", "x", "loud")
    logs.close()
    assert b"quiet" not in (text := os.read(pipe[0], 1000))
    assert b"loud" in text


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
    kept = rolling.packed(tmp_path / "ts_log.log")
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


def test_logs_go_on_after_a_line_that_cannot_be_laid_out(pipe, capsys):
    logs = Logs(pipe[1])
    logs.put(SERVER, logging.INFO, "main", "x", (lambda created: 1 / 0,))
    logs.put(SERVER, logging.INFO, "main", "x", "lost with it")
    while logs._waiting:
        time.sleep(0.01)
    logs.put(SERVER, logging.INFO, "main", "x", "still here")
    logs.close()
    assert "still here" in os.read(pipe[0], 10_000).decode()
    assert "ZeroDivisionError" in capsys.readouterr().err
