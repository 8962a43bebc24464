"""The five log files and the lines on stdout, as scripts know them from TorchServe."""

from __future__ import annotations

import os
import re
import signal

import pytest

from support.archives import pack_handler
from support.command import MODULE
from support.torchserve import CommandServer, our_environment

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"
FILES = {"access_log.log", "ts_log.log", "model_log.log", "ts_metrics.log", "model_metrics.log"}


@pytest.fixture
def torchserve(tmp_path):
    """Start `torchserve` with handlers of tests/support/handlers, or with archives that are in the store."""
    running = []

    def start_command(*handlers, **names):
        store = tmp_path / "store"
        store.mkdir(exist_ok=True)
        for handler in handlers:
            pack_handler(store, handler, name=names.get(handler))
        lines = ["default_workers_per_model=1", "enable_model_api=true"]
        running.append(CommandServer(MODULE, tmp_path / "torchserve", store, lines, our_environment()))
        return running[-1]

    yield start_command
    for server in running:
        server.stop()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "torchserve" / "logs"


@pytest.fixture
def server(torchserve):
    return torchserve("measuring", measuring="m").wait_for_models(["m"])


def test_the_five_files_exist_at_once(server, folder):
    assert {path.name for path in folder.iterdir() if path.is_file()} == FILES


def test_access_lines(server, folder):
    server.predict("m", b"x")
    server.request("GET", "/predictions/nobody?a=b%20c")
    server.manage("GET", "/models")
    server.until(lambda: "GET /models HTTP" in (folder / "access_log.log").read_text())
    text = (folder / "access_log.log").read_text()
    for pattern in (
        r'/127\.0\.0\.1:\d+ "POST /predictions/m HTTP/1\.1" 200 \d+',
        r'/127\.0\.0\.1:\d+ "GET /predictions/nobody\?a=b%20c HTTP/1\.1" 404 \d+',
        r'/127\.0\.0\.1:\d+ "GET /models HTTP/1\.1" 200 \d+',
    ):
        assert re.search(f"^{TIME} - {pattern}$", text, re.MULTILINE), pattern
        assert re.search(rf"^{TIME} \[INFO \] \S+ ACCESS_LOG - {pattern}$", server.log, re.MULTILINE), pattern


def test_what_workers_print_is_the_model_log_without_metrics(server, folder):
    server.predict("m", b"x")
    server.until(lambda: "a word on stderr" in (folder / "model_log.log").read_text())
    server.until(lambda: "a word of logging" in (folder / "model_log.log").read_text())
    text = (folder / "model_log.log").read_text()
    thread = r"W-9000-m_1\.0"
    for pattern in (
        rf"\[INFO \] {thread}-stdout MODEL_LOG - \[PID\]\d+",
        rf"\[INFO \] {thread}-stdout MODEL_LOG - Torch worker started\.",
        rf"\[INFO \] {thread}-stdout MODEL_LOG - printed by initialize",
        rf"\[INFO \] {thread}-stdout MODEL_LOG - Backend received inference at: \d+",
        rf"\[INFO \] {thread}-stdout MODEL_LOG - a word on stdout",
        rf"\[INFO \] {thread}-stdout MODEL_LOG - a word of logging",
        rf"\[WARN \] {thread}-stderr MODEL_LOG - a word on stderr",
    ):
        assert re.search(f"^{TIME} {pattern}$", text, re.MULTILINE), pattern
    assert "[METRICS]" not in text
    assert 'Failed to parse metrics line: "this is none".' in (folder / "ts_log.log").read_text()


def test_the_life_of_a_worker_in_torchserves_words(server, folder):
    for word in (
        "Loading initial models: m.mar",
        "Model m loaded.",
        "W-9000-m_1.0 State change null -> WORKER_STARTED",
        "W-9000-m_1.0 State change WORKER_STARTED -> WORKER_MODEL_LOADED",
    ):
        server.until(lambda word=word: word in server.log)
    os.kill(server.worker_pids("m")[0], signal.SIGKILL)
    for word in (
        "9000 Worker disconnected. WORKER_MODEL_LOADED",
        "State change WORKER_MODEL_LOADED -> WORKER_STOPPED",
        "Auto recovery start timestamp: ",
        "Retry worker: 9000 in 0 seconds.",
        "Auto recovery succeeded, reset recoveryStartTS",
    ):
        server.until(lambda word=word: word in server.log)
    server.manage("PUT", "/models/m?min_worker=0&synchronous=true")
    server.until(lambda: "State change WORKER_MODEL_LOADED -> WORKER_SCALED_DOWN" in server.log)
    server.stop()
    lines = server.log.splitlines()
    assert all(line in lines for line in (folder / "ts_log.log").read_text().splitlines())  # stdout has them too


def test_that_a_model_is_loaded_is_said_once(server):
    assert server.manage("PUT", "/models/m?min_worker=2&synchronous=true").status == 200
    assert server.log.count("Model m loaded.") == 1


def test_that_a_model_without_workers_is_loaded_is_said_once(server):
    assert server.manage("POST", "/models?url=m.mar&model_name=idle&initial_workers=0").status == 200
    server.until(lambda: "Model idle loaded." in server.log)
    assert server.manage("PUT", "/models/idle?min_worker=1&synchronous=true").status == 200
    server.until(lambda: "idle_1.0 State change WORKER_STARTED -> WORKER_MODEL_LOADED" in server.log)
    assert server.log.count("Model idle loaded.") == 1


def test_a_model_that_cannot_load_leaves_its_traceback_in_the_model_log(torchserve, folder):
    server = torchserve("broken")
    model_log = folder / "model_log.log"
    server.until(lambda: model_log.exists() and "Backend worker process died." in model_log.read_text())
    assert "MODEL_LOG - Traceback (most recent call last):" in model_log.read_text()
    server.until(lambda: "Auto recovery failed again" in server.log)
    assert "Backend worker error" in server.log
    assert "State change WORKER_STARTED -> WORKER_ERROR" in server.log


def test_a_model_that_can_never_load_leaves_one_line_in_the_model_log(torchserve, folder, tmp_path):
    archive = tmp_path / "store" / "two"
    archive.mkdir(parents=True)
    (archive / "handler.py").write_text("class A: ...\n\n\nclass B: ...\n")
    (archive / "model-config.yaml").write_text("modelName: two\n")
    server = torchserve()
    words = r"\[ERROR\] \S+ \S+ - Backend worker error: worker 9000 of model two version: 1.0"
    server.until(lambda: re.search(words, server.log))
    text = (folder / "model_log.log").read_text()
    assert "MODEL_LOG - Backend worker process died." in text
    assert "MODEL_LOG - Expected only one class" in text
    assert "Traceback" not in text
    assert "Model two loaded." not in server.log


def test_stdout_has_the_lines_of_the_server_log(start, tmp_path):
    server = start("measuring.py", "--name", "m", "--log-folder", tmp_path / "logs").wait_ready()
    server.predict("m", b"x")
    server.stop()
    assert (tmp_path / "logs" / "ts_log.log").read_text() == server.log


def test_a_folder_that_cannot_be_written_leaves_stdout(start, tmp_path):
    (tmp_path / "logs").write_text("not a folder")
    server = start("measuring.py", "--name", "m", "--log-folder", tmp_path / "logs").wait_ready()
    assert server.predict("m", b"x").status == 200
    server.until(lambda: '"POST /predictions/m HTTP/1.1" 200' in server.log)
    assert server.log.count("cannot be written") == 1


def test_without_a_folder_the_terminal_stays_as_it_is(start):
    server = start("measuring.py", "--name", "m").wait_ready()
    server.predict("m", b"x")
    server.until(lambda: "W-9000-m_1.0-stdout a word on stdout\n" in server.log)
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO    listening on", server.log, re.MULTILINE)
    assert "ACCESS_LOG" not in server.log
    assert '"POST /predictions/m' not in server.log
    assert "[METRICS]PrintedTime" not in server.log


def test_the_access_log_can_be_asked_for(start):
    server = start("measuring.py", "--name", "m", "--access-log").wait_ready()
    server.predict("m", b"x")
    server.until(lambda: re.search(r'Z INFO    /127\.0\.0\.1:\d+ "POST /predictions/m HTTP/1\.1" 200 \d+', server.log))
