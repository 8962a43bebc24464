"""MetricSamples: what a handler knows as `context.metrics`; samples travel to the server as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flambeau.metrics.registry import Sample

UNITS = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
}


class Dimension(Protocol):
    """A label: a name and its value."""

    name: str
    value: str


class MetricSamples:
    """Takes measurements by name; the worker sends them on after each batch."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._samples: list[Sample] = []

    def take(self) -> list[Sample]:
        """The samples since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: object = "counter",
    ) -> None:
        """Take a measurement of any kind: counter, gauge or histogram."""
        kind = str(getattr(metric_type, "value", metric_type))
        labels = [(str(dimension.name), str(dimension.value)) for dimension in dimensions]
        given = {label for label, _ in labels}
        labels += [pair for pair in (("ModelName", self.model_name), ("Level", "Model")) if pair[0] not in given]
        self._samples.append((str(name), kind, UNITS.get(unit, str(unit)), float(value), labels))

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Count something."""
        self.add_metric(name, value, "count", idx, dimensions, "counter")

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: object = "gauge",
    ) -> None:
        """Measure a time in ms or s."""
        if unit not in ("ms", "s"):
            raise ValueError(f"the unit of a time is ms or s, not {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: object = "gauge",
    ) -> None:
        """Measure a size in MB, kB, GB or B."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError(f"the unit of a size is MB, kB, GB or B, not {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: object = "gauge",
    ) -> None:
        """Measure a share."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        """Count an error."""
        self.add_metric(name, value, "", None, dimensions, "counter")
