"""Records of a worker's logging, as lines of its output: the server's JSON logs have them with level and request."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import msgspec

RECORD = b"\x1e"  # ASCII's record separator starts a record; other lines are what a handler prints
MAX_CHARS = 8 << 10  # of a message, and of the end of a traceback: a longer line would be read in pieces

_encode = msgspec.json.Encoder().encode
Fields = dict[str, str]


def fields_of_record(record: logging.LogRecord) -> Fields:
    """What a record has besides its message: the `extra` of that name, and the traceback."""
    known = record.__dict__
    fields = {name: str(known[name]) for name in ("request_id", "trace_id") if known.get(name)}
    if record.exc_info and record.exc_info[0] is not None:
        fields["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
    if record.stack_info:
        fields["exception"] = "\n".join(filter(None, [fields.get("exception"), record.stack_info]))
    return fields


class WorkerRecord(msgspec.Struct, array_like=True, frozen=True):
    """A record of Python's logging in a worker."""

    level: int
    logger: str
    message: str
    fields: dict[str, str] = {}


_decode = msgspec.json.Decoder(WorkerRecord).decode


class WorkerFormatter(logging.Formatter):
    """Formats the records of a worker for the server's JSON lines. `current` has the fields of the running request."""

    def __init__(self, current: Callable[[], Fields]) -> None:
        super().__init__()
        self._current = current

    def format(self, record: logging.LogRecord) -> str:
        fields = {**self._current(), **fields_of_record(record)}
        fields = {name: valid(text[-MAX_CHARS:]) for name, text in fields.items()}
        made = WorkerRecord(record.levelno, valid(record.name), valid(record.getMessage()[:MAX_CHARS]), fields)
        return RECORD.decode() + _encode(made).decode()


def valid(text: str) -> str:
    """A text that UTF-8 can hold: lone surrogates are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_record(line: bytes) -> WorkerRecord | None:
    """The record in a line that starts with RECORD; None if it is invalid: handlers may print anything."""
    try:
        record = _decode(line[len(RECORD) :])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record if record.fields.keys() <= {"request_id", "trace_id", "exception"} else None
