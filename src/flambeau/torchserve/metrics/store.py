"""Metric and MetricsStore: the older API, for handlers and tests that still use it."""

from __future__ import annotations

import json
import time
from typing import Any

from flambeau.metrics.definitions import MetricTypes
from flambeau.torchserve.metrics.metric import CachingMetric, Dimension, hostname


class Metric:
    """One value with its name, unit and dimensions."""

    def __init__(
        self,
        name: str,
        value: Any,
        unit: str,
        dimensions: list[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.metric_type = MetricTypes.COUNTER
        self.dimensions = dimensions
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.dimension_values = [dimension.value for dimension in dimensions]
        self._metric = CachingMetric(name, unit, self.dimension_names, self.metric_type)
        self.name = name
        self.unit = self._metric.unit
        self.metric_method = metric_method
        self.value = value
        self.request_id = request_id

    def update(self, value: Any) -> None:
        """Record a value; `value` stays the one that the metric was made with."""
        self._metric.add_or_update(value, self.dimension_values, self.request_id or "")

    def reset(self) -> None:
        self._metric.add_or_update(0, self.dimension_values, self.request_id or "")

    def __str__(self) -> str:
        dimensions = ",".join(map(str, self.dimensions))
        ids = f",{self.request_id}" if self.request_id else ""
        return f"{self.name}.{self.unit}:{self.value}|#{dimensions}|#hostname:{hostname()},{int(time.time())}{ids}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": self.dimensions,
            "Timestamp": int(time.time()),
            "HostName": hostname(),
            "RequestId": self.request_id,
        }


class MetricEncoder(json.JSONEncoder):
    """Encodes metrics and dimensions as JSON."""

    def default(self, obj: Any) -> Any:
        return obj.to_dict() if isinstance(obj, Metric | Dimension) else super().default(obj)


class MetricsStore:
    """Values in a list, one per name, unit, request and dimensions."""

    def __init__(self, request_ids: Any, model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids = request_ids
        self.model_name = model_name
        self.cache: dict[str, Metric] = {}

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        self._put(name, value, self._ids_for(idx), "count", dimensions, "counter")

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: list[Dimension] | None = None,
    ) -> None:
        """Record a time in ms or s."""
        if unit not in ("ms", "s"):
            raise ValueError("the unit for a timed metric should be one of ['ms', 's']")
        self._put(name, value, self._ids_for(idx), unit, dimensions)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: list[Dimension] | None = None,
    ) -> None:
        """Record a size in MB, kB, GB or B."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self._put(name, value, self._ids_for(idx), unit, dimensions)

    def add_percent(
        self, name: str, value: float, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        self._put(name, value, self._ids_for(idx), "percent", dimensions)

    def add_error(self, name: str, value: Any, dimensions: list[Dimension] | None = None) -> None:
        """Record an error: a count or a text."""
        self._put(name, value, None, "", dimensions)

    def add_metric(
        self, name: str, value: float, unit: str, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        self._put(name, value, self._ids_for(idx), unit, dimensions)

    def _put(
        self,
        name: str,
        value: Any,
        ids: str | None,
        unit: str,
        dimensions: list[Dimension] | None,
        method: str | None = None,
    ) -> None:
        if dimensions is not None and not isinstance(dimensions, list):
            raise ValueError("Please provide a list of dimensions")
        level = [("Level", "Error")] if ids is None else [("ModelName", self.model_name), ("Level", "Model")]
        every = [*(dimensions or ()), *(Dimension(*pair) for pair in level)]
        key = "-".join([name, unit, str(ids), *map(str, every)])
        if key in self.cache:
            self.cache[key].update(value)
        else:
            metric = self.cache[key] = Metric(name, value, unit, every, ids, method)
            self.store.append(metric)

    def _ids_for(self, idx: int | None) -> Any:
        ids = self.request_ids
        if isinstance(ids, dict):
            return ids[idx] if idx is not None and idx in ids else ",".join(ids.values())
        return ids
