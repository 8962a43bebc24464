"""`context.metrics`: metrics by kind and name, and shortcuts to record values."""

from __future__ import annotations

import abc
import logging
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flambeau.metrics.definitions import Definition, HasRequestId, MetricTypes, Sample, SampleSource
from flambeau.torchserve.metrics.metric import (
    CachingMetric,
    Dimension,
    GeneralMetricsCacheError,
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)

RequestIds = Mapping[int, str] | None
COUNTER, GAUGE = MetricTypes.COUNTER, MetricTypes.GAUGE


class MetricCacheAbstract(abc.ABC):
    """Metrics by kind and name; a subclass decides where they come from."""

    def __init__(self, config_file_path: Any) -> None:
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        self.store: list[Any] = []
        self.model_name: str | None = None
        self.config_file_path = config_file_path
        self._requests: Sequence[HasRequestId] | None = None
        self._request_ids: Any = None
        try:
            os.path.exists(config_file_path)
        except TypeError as error:
            raise MetricsCacheTypeError(f"Error loading {config_file_path} file: {error}") from None

    @property
    def request_ids(self) -> Any:
        """The ids of the batch by index, built on first use."""
        if self._requests is not None:
            self._request_ids = {i: request.request_id for i, request in enumerate(self._requests)}
            self._requests = None
        return self._request_ids

    @request_ids.setter
    def request_ids(self, ids: Any) -> None:
        self._requests, self._request_ids = None, ids

    def set_request_ids(self, request_ids: RequestIds) -> None:
        self.request_ids = request_ids

    def follow(self, requests: Sequence[HasRequestId]) -> None:
        self._requests = requests

    # ---- measuring ----

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = COUNTER,
    ) -> None:
        """Record a value of any unit and kind."""
        ids = self._ids_for(idx)
        self._measure(name, value, unit, self._with_defaults(ids, dimensions), metric_type, ids)

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        self.add_metric(name, value, "count", idx, dimensions, COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = GAUGE,
    ) -> None:
        """Record a time in ms or s."""
        if unit not in ("ms", "s"):
            raise MetricsCacheValueError("the unit for a timed metric should be one of ['ms', 's']")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = GAUGE,
    ) -> None:
        """Record a size in MB, kB, GB or B."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = GAUGE,
    ) -> None:
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        self._measure(name, value, "", self._with_defaults(None, dimensions), COUNTER, "")

    def _measure(
        self, name: str, value: float, unit: str, dimensions: list[Dimension], kind: MetricTypes, ids: Any
    ) -> None:
        try:
            metric = self.get_metric(name, kind)
        except MetricsCacheKeyError:
            metric = self.add_metric_to_cache(name, unit, [dimension.name for dimension in dimensions], kind)
        metric.add_or_update(value, [dimension.value for dimension in dimensions], ids)

    def _with_defaults(self, ids: Any, dimensions: Sequence[Dimension]) -> list[Dimension]:
        """The given dimensions and the default ones; a given list is extended, and may be given to `update` next."""
        named = {dimension.name for dimension in dimensions}
        defaults = (("Level", "Error"),) if ids is None else (("ModelName", self.model_name), ("Level", "Model"))
        all_of_them = dimensions if isinstance(dimensions, list) else [*dimensions]
        all_of_them += [Dimension(name, value) for name, value in defaults if name not in named]
        return all_of_them

    def _ids_for(self, idx: Any) -> Any:
        ids = self.request_ids
        if isinstance(ids, Mapping):
            return ids[idx] if idx is not None and idx in ids else ",".join(ids.values())
        return ids

    # ---- the metrics themselves ----

    @abc.abstractmethod
    def initialize_cache(self) -> None:
        """Add the metrics that the configuration defines."""

    @abc.abstractmethod
    def get_metric(self, metric_name: str, metric_type: MetricTypes = COUNTER) -> CachingMetric:
        """The metric of that name and kind; raises MetricsCacheKeyError."""

    @abc.abstractmethod
    def add_metric_to_cache(
        self, metric_name: str, unit: str, dimension_names: Sequence[str] = (), metric_type: MetricTypes = COUNTER
    ) -> CachingMetric:
        """Add a metric; it replaces one of the same name and kind."""


class MetricsCacheYamlImpl(MetricCacheAbstract):
    """The metrics in the `model_metrics` of a metrics.yaml, and those that the handler adds."""

    def __init__(self, config_file_path: Any) -> None:
        super().__init__(config_file_path)
        self._sink: list[Sample] | None = None
        self._parse_yaml_file(config_file_path)

    def initialize_cache(self) -> None:
        section = self._parse_metrics_section("model_metrics")
        if not section:
            raise MetricsCacheValueError("Missing `model_metrics` specification")
        for kind, entries in section.items():
            try:
                metric_type = MetricTypes(kind)
            except ValueError as error:
                raise MetricsCacheKeyError(f"Invalid metric type: {error}") from None
            for entry in entries:
                try:
                    self.add_metric_to_cache(entry["name"], entry["unit"], entry["dimensions"], metric_type)
                except KeyError as error:
                    raise MetricsCacheKeyError(f"Key not found in cache spec: {error}") from None

    def get_metric(self, metric_name: str, metric_type: MetricTypes = COUNTER) -> CachingMetric:
        check_type(metric_name, str, "`metric_name` must be a str")
        check_type(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        found = self.cache.get(metric_type, {}).get(metric_name)
        if found is None:
            text = f"Metric of type '{metric_type}' and name '{metric_name}' doesn't exist"
            raise MetricsCacheKeyError(text)
        return found

    def add_metric_to_cache(
        self, metric_name: str, unit: str, dimension_names: Sequence[str] = (), metric_type: MetricTypes = COUNTER
    ) -> CachingMetric:
        check_type(metric_name, str, "`metric_name` must be a str")
        check_type(unit, str, "`unit` must be a str")
        check_type(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        if dimension_names:
            check_type(dimension_names, list, "`dimension_names` should be a list of dimension name strings")
        metrics = self.cache.setdefault(metric_type, {})
        if metric_name in metrics:
            logging.warning("Overriding existing key %s:%s", metric_type, metric_name)
        metric = metrics[metric_name] = CachingMetric(metric_name, unit, [*(dimension_names or ())], metric_type)
        metric.sink = self._sink
        return metric

    def cache_keys(self) -> list[str]:
        """All keys, as `<kind>:<name>`."""
        return [f"{kind.value}:{name}" for kind, metrics in self.cache.items() for name in metrics]

    def _parse_yaml_file(self, config_file_path: Any) -> None:
        if not config_file_path:
            raise MetricsCacheTypeError("Config file not initialized")
        import yaml

        try:
            with open(config_file_path, encoding="utf-8") as file:
                self._parsed_file = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise MetricsCachePyYamlError(f"Error parsing file {config_file_path}: {error}") from None
        except OSError as error:
            raise MetricsCacheIOError(f"Error reading file {config_file_path}: {error}") from None
        except ValueError as error:
            raise GeneralMetricsCacheError(f"General error found in file {config_file_path}: {error}") from None
        logging.info("Successfully loaded %s.", config_file_path)

    def _parse_metrics_section(self, key: str = "model_metrics") -> Any:
        try:
            return self._parsed_file[key]
        except KeyError as error:
            raise MetricsCacheKeyError(f"'{key}' key not found in yaml file: {error}") from None


class WorkerMetrics(MetricsCacheYamlImpl, SampleSource):
    """The metrics of a worker: the server read the file and receives the samples."""

    def __init__(self, model_name: str, config_file_path: str = "", definitions: Iterable[Definition] = ()) -> None:
        self._definitions = [*definitions]
        super().__init__(config_file_path)
        self.model_name = model_name
        self.request_ids = {0: str(uuid.uuid4())}  # `initialize` records values outside of any request
        self._sink = []
        self.initialize_cache()

    def initialize_cache(self) -> None:
        for one in self._definitions:
            self.add_metric_to_cache(one.name, one.unit, [*one.dimensions], MetricTypes(one.kind))

    def take(self) -> list[Sample]:
        sink = self._sink
        if not sink:
            return []
        count = len(sink)  # a thread of the handler may add more meanwhile
        taken = sink[:count]
        del sink[:count]
        return taken

    def _parse_yaml_file(self, config_file_path: Any) -> None:
        """Do nothing: the server has read the file."""


def check_type(value: object, expected: type, text: str) -> None:
    if not isinstance(value, expected):
        raise MetricsCacheTypeError(text)
