from __future__ import annotations

import json
import logging

from hypothesis import given
from hypothesis import strategies as st

from flambeau.wire.log_records import MAX_CHARS, RECORD, WorkerFormatter, read_record

TEXTS = st.text(st.characters(codec=None, categories=None))


def formatted(text, *, name="handler", current=None, error=None):
    info = (type(error), error, None) if error else None
    record = logging.LogRecord(name, logging.ERROR, "", 0, text, (), info)
    return WorkerFormatter(lambda: current or {}).format(record).encode()


@given(TEXTS, TEXTS)
def test_any_record_is_one_line_that_can_be_read(text, name):
    line = formatted(text, name=name, current={"request_id": "1,2"})
    assert line.startswith(RECORD)
    assert b"\n" not in line
    record = read_record(line)
    assert (record.level, record.fields) == (logging.ERROR, {"request_id": "1,2"})
    if text.isprintable():
        assert record.message == text


def test_the_end_of_a_long_traceback_is_kept():
    record = read_record(formatted("x" * 10**6, error=ValueError(f"{'y' * 10**6} cause")))
    assert len(record.message) == MAX_CHARS
    assert record.fields["exception"].endswith("y cause")
    assert len(record.fields["exception"]) == MAX_CHARS


@given(st.one_of(st.binary(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_whatever_a_handler_prints_is_a_record_or_none(printed):
    printed = printed if isinstance(printed, bytes) else printed.encode()
    record = read_record(RECORD + printed)
    assert record is None or isinstance(record.message, str)


def test_fields_that_no_line_has_are_refused():
    assert read_record(RECORD + b'[20,"x","y",{"status":"1"}]') is None
    assert read_record(RECORD + b'[20,"x","y",{"trace_id":"1"}]').fields == {"trace_id": "1"}
