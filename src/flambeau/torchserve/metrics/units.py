"""The small words of metrics: kinds, units and dimensions, in the spelling that handlers know."""

from __future__ import annotations

import enum
from typing import Any

UNITS: dict[str | None, str] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}


class MetricTypes(enum.Enum):
    """The kinds of metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Units:
    """Short names of units and what they stand for."""

    def __init__(self) -> None:
        self.units = dict(UNITS)


class Dimension:
    """A label: a name and its value."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, Any]:
        """The dimension as JSON shows it."""
        return {"Name": self.name, "Value": self.value}
