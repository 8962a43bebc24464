"""The events of a server in TorchServe's words, which scripts wait for."""

from __future__ import annotations

import logging
import re

import pytest

from flambeau.logs.line_formats import MODEL
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import WorkerRef
from flambeau.torchserve.log_messages import TorchServeEvents

WORKER = WorkerRef(9000, "m", "1.0")
CRASH = WorkerExit(reason="exited with code 1", exit_code=1)
CANNOT_LOAD = WorkerExit(reason="no such file", while_loading=True)
FINAL = WorkerExit(reason="no tokenizer", while_loading=True, is_final=True)


class FakeLogs:
    """Keeps the lines of the model log."""

    def __init__(self, *, is_terminal=False):
        self.is_terminal = is_terminal
        self.lines = []

    def put(self, channel, level, thread, logger, payload):
        assert (channel, level, logger) == (MODEL, logging.INFO, MODEL)
        self.lines += [(thread, line.decode()) for line in payload]

    def add(self, line, values):
        assert (line.channel, line.level) == (MODEL, logging.INFO)
        self.lines.append((line.thread, line.to_text(*values, 1_700_000_000)))


@pytest.fixture
def logs():
    return FakeLogs()


@pytest.fixture
def voice(logs, caplog):
    caplog.set_level(logging.DEBUG)
    return TorchServeEvents(logs)


@pytest.fixture
def texts(caplog):
    return lambda: [record.getMessage() for record in caplog.records]


def test_life_of_a_worker_that_crashes_once(voice, texts, caplog):
    voice.worker_starting(WORKER)
    voice.worker_loaded(WORKER, 1.0)
    voice.worker_exited(WORKER, CRASH)
    voice.worker_retried(WORKER, CRASH, 0)
    voice.worker_starting(WORKER)
    voice.worker_loaded(WORKER, 1.0)
    voice.worker_retired(WORKER)
    lines = texts()
    assert re.fullmatch(r"Auto recovery start timestamp: \d{13}", lines.pop(4))
    assert lines == [
        "W-9000-m_1.0 State change null -> WORKER_STARTED",
        "W-9000-m_1.0 State change WORKER_STARTED -> WORKER_MODEL_LOADED",
        "9000 Worker disconnected. WORKER_MODEL_LOADED",
        "W-9000-m_1.0 State change WORKER_MODEL_LOADED -> WORKER_STOPPED",
        "worker 9000 of model m version: 1.0: exited with code 1",
        "Retry worker: 9000 in 0 seconds.",
        "W-9000-m_1.0 State change WORKER_STOPPED -> WORKER_STARTED",
        "W-9000-m_1.0 State change WORKER_STARTED -> WORKER_MODEL_LOADED",
        "Auto recovery succeeded, reset recoveryStartTS",
        "W-9000-m_1.0 State change WORKER_MODEL_LOADED -> WORKER_SCALED_DOWN",
    ]
    assert {getattr(record, "worker", None) for record in caplog.records} == {"W-9000-m_1.0", None}


def test_worker_that_cannot_load_again_and_again(voice, texts, logs):
    for _ in range(2):
        voice.worker_starting(WORKER)
        voice.load_failed("W-9000-m_1.0", "no such file", "Traceback\nOSError")
        voice.worker_exited(WORKER, CANNOT_LOAD)
        voice.worker_retried(WORKER, CANNOT_LOAD, 1.5)
    voice.worker_abandoned(WORKER, CANNOT_LOAD, is_repeated=False)
    lines = texts()
    assert lines.count("Backend worker error") == 2
    assert lines.count("W-9000-m_1.0 State change WORKER_STARTED -> WORKER_ERROR") == 2
    assert lines.count("Auto recovery failed again") == 1
    assert lines.count("Retry worker: 9000 in 1.5 seconds.") == 2
    assert lines[-1] == "worker 9000 of model m version: 1.0: giving up: no such file"
    assert not any(
        line.startswith("worker 9000 of model m version: 1.0: no such") for line in lines
    )  # in the model log
    thread = "W-9000-m_1.0-stdout"
    died = (thread, "Backend worker process died.")
    assert logs.lines == [died, (thread, "Traceback"), (thread, "OSError")] * 2  # scripts look for each of them


def test_worker_that_can_never_load_is_one_error(voice, texts, caplog):
    voice.worker_starting(WORKER)
    voice.worker_exited(WORKER, FINAL)
    voice.worker_abandoned(WORKER, FINAL, is_repeated=False)
    voice.worker_abandoned(WORKER, FINAL, is_repeated=True)
    text = "Backend worker error: worker 9000 of model m version: 1.0 is not tried again: no tokenizer"
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [text]
    assert not any("Auto recovery" in line for line in texts())


def test_slow_and_stalled_workers(voice, texts):
    voice.worker_load_timed_out(WORKER, 10)
    voice.worker_stalled(WORKER, 5, 2)
    assert texts() == [
        "Backend worker error\n"
        "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did not respond in given time",
        "Backend worker did not respond in given time: worker 9000 of m 1.0",
        "Number or consecutive unsuccessful inference 2",
    ]


def test_lines_that_workers_of_torchserve_print(voice, logs):
    voice.process_started("W-9000-m_1.0", 77)
    voice.batch_sent("W-9000-m_1.0")
    lines = [line for _, line in logs.lines]
    assert lines[:2] == ["[PID]77", "Torch worker started."]
    assert re.fullmatch(r"Python runtime: 3\.\d+\.\d+\S*", lines[2])
    assert re.fullmatch(r"Backend received inference at: \d{10}", lines[3])
    assert voice.reports_batches


def test_terminal_is_spared_them(texts):
    logs = FakeLogs(is_terminal=True)
    voice = TorchServeEvents(logs)
    voice.process_started("W-9000-m_1.0", 77)
    voice.load_failed("W-9000-m_1.0", "no", "")
    assert logs.lines == []
    assert not voice.reports_batches
    voice.worker_retried(WORKER, CANNOT_LOAD, 0)
    assert "worker 9000 of model m version: 1.0: no such file" in texts()  # the cause is logged once in any case


def test_other_lines(voice, texts, caplog):
    voice.model_loaded("m")
    voice.stream_cancelled("W-9000-m_1.0", "r-1")
    voice.metric_rejected("W-9000-m_1.0", "this is none")
    assert texts() == [
        "Model m loaded.",
        "Connection to client got closed; Removing job: r-1",
        'Failed to parse metrics line: "this is none".',
    ]
    assert caplog.records[-1].worker == "W-9000-m_1.0-stdout"


def test_nothing_is_kept_of_workers_that_are_gone(voice):
    voice.worker_starting(WORKER)
    voice.worker_exited(WORKER, CRASH)
    voice.load_failed("W-9000-m_1.0", "no", "")
    voice.worker_retired(WORKER)
    assert [voice._states, voice._recovering, voice._explained] == [{}, set(), set()]
