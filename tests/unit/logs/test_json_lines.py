from __future__ import annotations

import json
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.logs.access_log import AccessLog
from flambeau.logs.json_lines import json_lines, record_format
from flambeau.logs.line_formats import ACCESS, MODEL, SERVER, LineFormat
from flambeau.logs.rolling_file import RollingFile
from flambeau.logs.setup import QueueHandler
from flambeau.logs.writer import Logs

REQUIRED = {"timestamp", "level", "logger", "message"}
# Any text that a str can hold: control characters, line separators and lone surrogates.
TEXTS = st.text(st.characters(codec=None, categories=None))


def documents(data: bytes) -> list[dict]:
    """Every line as JSON; a line that is none raises."""
    assert not data or data.endswith(b"\n")
    found = [json.loads(line.decode()) for line in data.split(b"\n")[:-1]]
    for document in found:
        assert document.keys() >= REQUIRED
    return found


@given(TEXTS, TEXTS, TEXTS)
def test_any_text_is_one_line_of_valid_json(text, logger, worker):
    line = LineFormat(SERVER, logging.ERROR, "main", logger, worker=worker)
    [document] = documents(json_lines(line, 1e9, text))
    if text.isprintable():
        assert document["message"] == text
    assert (document["level"], document["timestamp"]) == ("ERROR", "2001-09-09T01:46:40.000Z")


@given(st.lists(st.binary(), min_size=1, max_size=5))
def test_any_output_of_a_worker_is_valid_json(lines):
    line = LineFormat(MODEL, worker="W-1-m_1.0", model="m")
    found = documents(json_lines(line, 1.5, lines))
    assert [one["message"] for one in found] == [one.decode("utf-8", "replace") for one in lines]
    assert {(one["worker"], one["model"], one["timestamp"][-5:]) for one in found} == {("W-1-m_1.0", "m", ".500Z")}


@given(TEXTS, st.dictionaries(st.sampled_from(["request_id", "trace_id", "exception"]), TEXTS))
def test_any_record_is_valid_json(text, fields):
    [document] = documents(json_lines(record_format(SERVER, 30, "main", "x", "", ""), 1.0, (text, fields)))
    assert document["level"] == "WARNING"
    assert document.keys() - REQUIRED == {name for name, value in fields.items() if value}


@pytest.fixture
def logs(tmp_path):
    """Logs whose lines are read back from the file of the server."""
    names = {SERVER: "ts_log.log", ACCESS: "access_log.log"}
    return Logs(None, {channel: RollingFile(tmp_path / name) for channel, name in names.items()}, is_json=True)


def read(logs, folder, name="ts_log.log"):
    logs.close()
    return documents((folder / name).read_bytes())


@given(
    *(TEXTS for _ in range(4)),
    st.floats(allow_nan=False, min_value=-1, max_value=1e9),
    st.integers(0, 999),
)
def test_any_access_line_is_valid_json(path, query, request_id, model, seconds, status):
    taken = []

    class Taken:
        is_json = True

        def add(self, line, payload, num_bytes=0):
            taken.append(json_lines(line, 1.0, payload))

    log = AccessLog(Taken(), is_full=True)
    request = ("POST", path, query, "1.1", request_id)
    log.http_ended("/127.0.0.1:9", request, status, seconds, (1, 2), " aborted", model, "ab" * 16, "2.0")
    log.http("/127.0.0.1:9", "POST", path, query, "1.1", status, seconds)
    log.grpc("ipv4:127.0.0.1:9", path, status, seconds, request_id, model, "")
    full, short, call = (documents(one)[0] for one in taken)
    assert (full["model_version"], "model_version" in short, "model_version" in call) == ("2.0", False, False)
    assert (full["request_bytes"], full["response_bytes"], full["aborted"], full["trace_id"]) == (1, 2, True, "ab" * 16)
    assert {one["client"] for one in (full, short, call)} == {"127.0.0.1:9"}
    assert {one["status"] for one in (full, short, call)} == {status}


def test_records_have_their_traceback_and_the_ids_of_their_request(logs, tmp_path):
    handler = QueueHandler(logs)
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.LogRecord("flambeau.x", logging.ERROR, "", 0, "it\nfailed: %s", ("\x00",), None)
        record.exc_info = (type(error), error, error.__traceback__)
    record.request_id, record.trace_id, record.model, record.worker = "r1", "t1", "m", "W-1-m_1.0"
    handler.emit(record)
    [document] = read(logs, tmp_path)
    assert document["message"] == "it\nfailed: \x00"
    assert document["exception"].startswith("Traceback")
    assert document["exception"].endswith("ValueError: a\nb")
    names = ("logger", "request_id", "trace_id", "model", "worker")
    assert [document[name] for name in names] == ["flambeau.x", "r1", "t1", "m", "W-1-m_1.0"]


def test_files_of_single_logs_have_the_same_lines(logs, tmp_path):
    AccessLog(logs).http("/h:1", "GET", "/ping", "", "1.1", 200, 0.002)
    logs.put(SERVER, logging.INFO, "main", "x", "else")
    every = read(logs, tmp_path)
    assert [one["logger"] for one in every] == ["ACCESS_LOG", "x"]
    assert documents((tmp_path / "access_log.log").read_bytes()) == every[:1]
    assert every[0]["duration_ms"] == 2.0


def test_a_console_that_missed_lines_gets_a_json_note():
    out, into = os.pipe()
    logs = Logs(into, is_json=True)
    logs._console.num_lost = 3
    logs.put(SERVER, logging.INFO, "main", "x", "next")
    logs.close()
    os.close(into)
    with open(out, "rb") as file:
        note, following = documents(file.read())
    assert note["message"].startswith("3 log lines were dropped")
    assert following["message"] == "next"
