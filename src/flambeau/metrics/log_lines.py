"""Metrics as lines of text: written to the metrics logs, and parsed from the output of handlers and commands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from flambeau.metrics.definitions import Definition, Sample
from flambeau.metrics.registry import plain

MARK = "[METRICS]"
_KINDS = {"COUNTER": "counter", "GAUGE": "gauge", "HISTOGRAM": "histogram"}
_LINE = re.compile(
    r"\s*(?P<name>[\w\s]+)\.(?P<unit>[\w\s]+):(?P<value>[0-9\-,.e]+)\|#(?P<dimensions>[^|]*)"
    r"(?:\|#type:(?P<kind>[^|,\s]+))?\|#hostname:(?P<host>[^,]*),(?P<time>[^,\s]+)(?:,(?P<ids>.*))?"
)


def server_line(definition: Definition, value: float, label_values: Iterable[str], host: str, seconds: float) -> str:
    """A line of ts_metrics.log. The host, the last dimension, has its own field."""
    return f"{_measured(definition, value, label_values)}|#hostname:{host},timestamp:{int(seconds)}"


def model_line(
    definition: Definition, value: float, label_values: Iterable[str], host: str, ids: str, seconds: float
) -> str:
    """A line of model_metrics.log."""
    measured = _measured(definition, value, label_values)
    return f"{measured}|#hostname:{host},requestID:{_one_line(ids)},timestamp:{int(seconds)}"


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _measured(definition: Definition, value: float, label_values: Iterable[str]) -> str:
    head, named = _frame(definition.name, definition.unit, definition.dimensions, tuple(label_values))
    return f"{head}{plain(value)}|#{named}"


@lru_cache(10_000)
def _frame(name: str, unit: str, dimensions: tuple[str, ...], label_values: tuple[str, ...]) -> tuple[str, str]:
    """The text before and after the value; cached, since it is the same for every value of a series."""
    pairs = zip(dimensions, label_values, strict=False)
    return f"{name}.{unit}:", ",".join([f"{key}:{_one_line(text)}" for key, text in pairs])


def parse_line(line: str) -> Sample | None:
    """Parse a printed line, without its mark; None if it is not a metric."""
    match = _LINE.fullmatch(line.strip())
    if match is None:
        return None
    kind = _KINDS.get((match["kind"] or "COUNTER").upper())
    try:
        value = float(match["value"].replace(",", ""))
    except ValueError:
        return None
    pairs = [part.partition(":") for part in match["dimensions"].split(",") if part]
    if kind is None or not all(middle for _, middle, _ in pairs):
        return None
    dimensions = [(key.strip(), text) for key, _, text in pairs]
    return match["name"].strip(), kind, match["unit"].strip(), value, dimensions, (match["ids"] or "").strip()
