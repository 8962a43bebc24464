"""Log lines as JSON: one layout for the server, its workers and its access log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from flambeau.logs.line_formats import LineFormat
from flambeau.wire.log_records import Fields, valid

_encode = msgspec.json.Encoder().encode


class JsonLine(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """The fields of a line; those that are not known are left out. The last ones are those of the access log."""

    timestamp: str  # UTC, with milliseconds
    level: str
    logger: str
    message: str
    request_id: str = ""  # several ones of a batch are separated by commas
    model: str = ""
    model_version: str = ""  # in the access log: the one that was chosen for a request that names none
    worker: str = ""
    trace_id: str = ""
    exception: str = ""  # a traceback
    client: str = ""
    method: str = ""
    path: str = ""
    status: int | None = None
    duration_ms: float | None = None
    request_bytes: int | None = None
    response_bytes: int | None = None
    aborted: bool = False


def json_line(line: LineFormat, created: float, fields: Mapping[str, Any]) -> bytes:
    """A line with its line break; text that is not valid Unicode is escaped."""
    values: dict[str, Any] = {"worker": line.worker, "model": line.model, **fields}
    made = JsonLine(timestamp(created), logging.getLevelName(line.level), line.logger, **values)
    try:
        return _encode(made) + b"\n"
    except UnicodeEncodeError:  # lone surrogates
        values = {name: valid(value) if isinstance(value, str) else value for name, value in values.items()}
        return _encode(JsonLine(made.timestamp, made.level, valid(made.logger), **values)) + b"\n"


def json_lines(line: LineFormat, created: float, payload: Any) -> bytes:
    """The lines of an entry: a text, several lines of output, or values."""
    if type(payload) is tuple:
        second = int(created)
        if line.to_fields is not None:
            return json_line(line, created, line.to_fields(*payload, second))
        return json_line(line, created, {"message": line.to_text(*payload, second)})
    if type(payload) is list:
        return b"".join([json_line(line, created, {"message": one.decode("utf-8", "replace")}) for one in payload])
    return json_line(line, created, {"message": str(payload)})


def timestamp(created: float) -> str:
    second = int(created)
    return f"{_second(second)}.{int((created - second) * 1000):03d}Z"


@lru_cache(4)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


# ---- records of Python's logging ----


@lru_cache(1000)
def record_format(channel: str, level: int, thread: str, logger: str, worker: str, model: str) -> LineFormat:
    """The format of records: their values are a text and fields."""
    return LineFormat(channel, level, thread, logger, text_of, fields_of, worker=worker, model=model)


def text_of(text: str, fields: Fields, _: int = 0) -> str:
    return text


def fields_of(text: str, fields: Fields, _: int = 0) -> Fields:
    return {"message": text, **fields}
