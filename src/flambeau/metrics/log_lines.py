"""Metrics as lines of text: written to the metrics logs, and parsed from the output of handlers and commands."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flambeau.metrics.definitions import Definition, Sample
from flambeau.metrics.registry import plain

MARK = "[METRICS]"
_KINDS = {"COUNTER": "counter", "GAUGE": "gauge", "HISTOGRAM": "histogram"}
_LINE = re.compile(
    r"\s*(?P<name>[\w\s]+)\.(?P<unit>[\w\s]+):(?P<value>[0-9\-,.e]+)\|#(?P<dimensions>[^|]*)"
    r"(?:\|#type:(?P<kind>[^|,\s]+))?\|#hostname:(?P<host>[^,]*),(?P<time>[^,\s]+)(?:,(?P<ids>.*))?"
)


class MetricText:
    """The texts of one series in a metrics log; all that is the same for every value is made once."""

    __slots__ = ("_after", "_before")

    def __init__(self, definition: Definition, label_values: Iterable[str], host: str) -> None:
        pairs = zip(definition.dimensions, label_values, strict=False)  # the host, the last one, has its own field
        self._before = f"{definition.name}.{definition.unit}:"
        self._after = f"|#{','.join([f'{key}:{_one_line(text)}' for key, text in pairs])}|#hostname:{host},"

    def of_server(self, value: float, second: int) -> str:
        """A line of ts_metrics.log."""
        return f"{self._before}{plain(value)}{self._after}timestamp:{second}"

    def of_time(self, value: float, second: int) -> str:
        """The same of a time, to three decimals; every request has several."""
        text = f"{value:.3f}"
        return f"{self._before}{trimmed(text) if text[-1] == '0' else text}{self._after}timestamp:{second}"

    def of_event(self, second: int) -> str:
        """The same of something that happened once."""
        return f"{self._before}1.0{self._after}timestamp:{second}"

    def of_model(self, value: float, ids: str, second: int) -> str:
        """A line of model_metrics.log."""
        return f"{self._before}{plain(value)}{self._after}requestID:{_one_line(ids)},timestamp:{second}"

    def of_prediction(self, value: float, ids: str, second: int) -> str:
        """The same of a time, to two decimals; every batch has one."""
        return f"{self._before}{trimmed(f'{value:.2f}')}{self._after}requestID:{_one_line(ids)},timestamp:{second}"


def trimmed(decimals: str) -> str:
    """Without zeros at the end: `repr(round(value, 3))` of a number that is not huge, in half the time."""
    text = decimals.rstrip("0")
    return f"{text}0" if text[-1] == "." else text


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


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
