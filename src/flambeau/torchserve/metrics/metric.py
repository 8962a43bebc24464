"""CachingMetric: one metric of a handler. Its values go to the server, or to the log outside of a worker. Errors."""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Sequence
from functools import cache
from socket import gethostname
from typing import Any

from flambeau.metrics.definitions import MetricTypes, Sample

logger = logging.getLogger(__name__)

MAX_UNSENT = 100_000  # a thread may record values while no request takes the samples away

hostname = cache(gethostname)


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


class Units:
    """Short names of units and their long names."""

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
        return {"Name": self.name, "Value": self.value}


class MetricAbstract(abc.ABC):
    """A metric with its name, unit, dimension names and kind."""

    def __init__(
        self,
        metric_name: str,
        unit: str,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        self.metric_name = metric_name
        self.unit = UNITS.get(unit, unit)
        self.dimension_names = dimension_names or []
        self.metric_type = metric_type

    @abc.abstractmethod
    def add_or_update(self, value: float, dimension_values: Sequence[Any] = (), request_id: str = "") -> None:
        """Record a value."""


class CachingMetric(MetricAbstract):
    """A metric that forwards its values."""

    sink: list[Sample] | None = None  # where a worker collects samples; None: values are logged

    def add_or_update(self, value: float, dimension_values: Sequence[Any] = (), request_id: str = "") -> None:
        """Record a value; an invalid one is logged and dropped."""
        problem = self._mismatch(dimension_values)
        text = "" if problem else self._dimension_text(dimension_values)
        problem = problem or self._wrong_value(value)
        if problem:
            logger.error(
                "[METRICS]Failed to update metric with name:%s and dimensions: %s with value: %s: %s",
                *(self.metric_name, text, value, problem),
            )
        elif self.sink is None:
            self.emit_metrics(request_id, value, text)
        elif len(self.sink) < MAX_UNSENT:
            pairs = [(str(n), str(v)) for n, v in zip(self.dimension_names, dimension_values, strict=True)]
            ids = str(request_id) if request_id else ""
            self.sink.append((self.metric_name, self.metric_type.value, self.unit, float(value), pairs, ids))

    def update(self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()) -> None:
        """The old form: the given dimensions replace those of the metric."""
        logger.warning("Overriding existing dimensions")
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.add_or_update(value, [dimension.value for dimension in dimensions], request_id)

    def emit_metrics(self, request_id: str, value: float, dimension_string: str) -> None:
        """Log a value as a metric line."""
        kind = self.metric_type.name
        line = f"[METRICS]{self.metric_name}.{self.unit}:{value}|#{dimension_string}|#type:{kind}"
        ids = f",{request_id}" if request_id else ""
        logger.info("%s|#hostname:%s,%d%s", line, hostname(), time.time(), ids)

    def _mismatch(self, values: Sequence[Any]) -> str | None:
        if values is None or len(values) != len(self.dimension_names):
            return f"Dimension values: {values} should correspond to Dimension names: {self.dimension_names}"
        return None

    def _wrong_value(self, value: Any) -> str | None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return f"{value!r} is not a number"
        if number < 0 and self.metric_type is MetricTypes.COUNTER:
            return "Counter metric update value cannot be negative"
        return None

    def _dimension_text(self, values: Sequence[Any]) -> str:
        return ",".join(f"{name}:{value}" for name, value in zip(self.dimension_names, values, strict=True))


class GeneralMetricsCacheError(Exception):
    """An error without a class of its own."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(IOError):
    """The metrics configuration cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error reading file: {message}")


class MetricsCacheTypeError(TypeError):
    pass


class MetricsCacheValueError(ValueError):
    pass


class MetricsCacheKeyError(KeyError):
    """No such metric, or no such key in the metrics configuration."""


def __getattr__(name: str) -> Any:
    """Create MetricsCachePyYamlError on first use: its base is PyYAML's, which few workers load."""
    if name != "MetricsCachePyYamlError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import yaml

    class MetricsCachePyYamlError(yaml.YAMLError):
        """The metrics configuration is not YAML."""

        def __init__(self, message: str) -> None:
            super().__init__(f"Error parsing file: {message}")

    globals()[name] = MetricsCachePyYamlError
    return MetricsCachePyYamlError
