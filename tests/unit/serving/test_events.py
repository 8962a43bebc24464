"""The events of a server, as `flambeau serve` logs them."""

from __future__ import annotations

import logging

import pytest

from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents, WorkerRef

WORKER = WorkerRef(9000, "m", "1.0")
CRASH = WorkerExit(reason="exited with code 1", last_lines=("boom",))
FINAL = WorkerExit(reason="no tokenizer", is_final=True)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    caplog.set_level(logging.DEBUG)


@pytest.mark.parametrize(
    ("event", "arguments", "level"),
    [
        ("worker_starting", (), "DEBUG"),
        ("worker_loaded", (1.5,), "INFO"),
        ("worker_load_timed_out", (10.0,), "ERROR"),
        ("worker_stalled", (5.0, 1), "ERROR"),
        ("worker_exited", (CRASH,), "DEBUG"),
        ("worker_retried", (CRASH, 1.0), "WARNING"),
        ("worker_retired", (), "INFO"),
    ],
)
def test_event_of_a_worker_names_it_and_the_event(caplog, event, arguments, level):
    getattr(ServerEvents(), event)(WORKER, *arguments)
    assert [(r.event, r.worker, r.levelname) for r in caplog.records] == [(event, "W-9000-m_1.0", level)]


def test_retry_is_logged_with_the_last_lines_of_the_worker(caplog):
    ServerEvents().worker_retried(WORKER, CRASH, 1.0)
    assert [r.args for r in caplog.records] == [(WORKER, 1.0, CRASH.cause)]


def test_abandoned_worker_is_logged_with_its_cause(caplog):
    ServerEvents().worker_abandoned(WORKER, CRASH, is_repeated=False)
    ServerEvents().worker_abandoned(WORKER, FINAL, is_repeated=False)
    assert [(r.levelname, r.args) for r in caplog.records] == [
        ("ERROR", (WORKER, CRASH.cause)),
        ("ERROR", (WORKER, FINAL.reason)),
    ]


def test_final_failure_of_several_workers_is_logged_once(caplog):
    ServerEvents().worker_abandoned(WORKER, FINAL, is_repeated=True)
    assert not caplog.records


def test_events_of_processes_and_models(caplog):
    events = ServerEvents()
    events.model_loaded("m")
    events.process_started("W-9000-m_1.0-rank-1", 7)
    events.metric_rejected("W-9000-m_1.0", "nonsense")
    events.stream_cancelled("W-9000-m_1.0", "r")
    assert [r.event for r in caplog.records] == [
        "model_loaded",
        "process_started",
        "metric_rejected",
        "stream_cancelled",
    ]


def test_batches_are_not_reported():
    assert not ServerEvents.reports_batches
