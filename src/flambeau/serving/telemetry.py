"""Telemetry: collects the metrics of a server and its handlers for the metrics endpoint and the logs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from itertools import compress
from socket import gethostname
from types import MethodType
from typing import Concatenate

from flambeau.config.server import MetricsConfig
from flambeau.logs.line_formats import MODEL_METRICS, TS_METRICS, LineFormat, LineGroup
from flambeau.logs.writer import Logs
from flambeau.metrics.definitions import BUNDLED, Definition, Sample, read_definitions
from flambeau.metrics.log_lines import MetricText
from flambeau.metrics.registry import OPEN_METRICS_END, MetricFamily, MetricsRegistry, to_open_metrics, to_text
from flambeau.metrics.system import Reading
from flambeau.metrics.traffic import (
    HostTraffic,
    LogEvent,
    LogPrediction,
    LogTime,
    LogTimes,
    ModelTraffic,
    RequestCounts,
    status_metric,
)

LEGACY = ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds")


class Telemetry:
    """The metrics of one server; requests are counted in `traffic`."""

    def __init__(self, config: MetricsConfig, logs: Logs) -> None:
        self.file = (config.file or BUNDLED).absolute()
        self.definitions = read_definitions(config.file)
        self._mode = config.mode
        self._logs = logs
        self._host = gethostname()
        self._metrics = MetricsRegistry(
            self.definitions.server,
            self.definitions.model,
            hostname=self._host,
            auto_detect=config.auto_detect,
        )
        self._logs_lines = config.mode != "prometheus"
        self.traffic = HostTraffic(self if self._logs_lines else None)

    # ---- recording ----

    def add_samples(self, samples: Iterable[Sample], model: str = "") -> None:
        """Record the samples of a model's handler."""
        for sample in samples:
            definition = self._metrics.take(sample, model)
            if definition is not None and self._logs_lines:
                line = model_line(definition, tuple(text for _, text in sample[4]), self._host)
                self._logs.add(line, (sample[3], sample[5]), len(sample[5]))

    def add_readings(self, readings: Iterable[Reading]) -> None:
        """Record readings of the host; a device is the last label before the host."""
        for name, _, value, device in readings:
            labels = ("Host",) if device is None else ("Host", device)
            metric = self._metrics.server_metric(name, "gauge")
            if metric is not None and metric.add(value, (*labels, self._host)):
                line = self._server_line(name, labels, MetricText.of_server)
                if line is not None:
                    self._logs.add(line, (value,))

    # ---- log lines ----

    def events(self, name: str, labels: tuple[str, ...]) -> LogEvent:
        add, line = self._logs.add, self._server_line(name, labels, MetricText.of_event)
        return (lambda: None) if line is None else (lambda: add(line, ()))

    def times(self, name: str, labels: tuple[str, ...]) -> LogTime:
        add, line = self._logs.add, self._server_line(name, labels, MetricText.of_time)
        return (lambda value: None) if line is None else (lambda value: add(line, (value,)))

    def times_together(self, *series: tuple[str, tuple[str, ...]]) -> LogTimes:
        lines = [self._server_line(name, labels, MetricText.of_time) for name, labels in series]
        known = tuple(line for line in lines if line is not None)
        add, group = self._logs.add, LineGroup(known)
        if not known:
            return lambda *values: None
        if len(known) == len(lines):
            return lambda *values: add(group, values)
        is_known = [line is not None for line in lines]
        return lambda *values: add(group, tuple(compress(values, is_known)))

    def _server_line(
        self, name: str, labels: tuple[str, ...], to_text: Callable[Concatenate[MetricText, ...], str]
    ) -> LineFormat | None:
        """The format of a series of the server; None if the configuration does not define the metric."""
        definition = self.definitions.server.get(name)
        if definition is None or not self._logs_lines or (self._mode == "legacy" and name in LEGACY):
            return None
        return LineFormat(TS_METRICS, to_text=MethodType(to_text, MetricText(definition, labels, self._host)))

    def predictions(self, model: str) -> LogPrediction:
        """Log the times of a model's handler."""
        definition = self._metrics.take(prediction(model, 0.0), model)
        if definition is None:
            return lambda milliseconds, ids: None
        add = self._logs.add
        text = MetricText(definition, (model, "Model"), self._host)
        line = LineFormat(MODEL_METRICS, to_text=text.of_prediction)
        return lambda milliseconds, ids: add(line, (milliseconds, ids), len(ids))

    # ---- exposition ----

    def text(
        self,
        models: Iterable[ModelTraffic],
        load_times: Iterable[tuple[str, float]],
        own: Iterable[MetricFamily],
        wanted: Collection[str] = (),
        *,
        is_open: bool = False,
    ) -> str:
        """The text of the metrics endpoint: model traffic, worker load times and the server's own metrics."""
        if self._mode == "log":
            return OPEN_METRICS_END if is_open else ""
        models = [*models]
        self._fill(self.traffic.counts.values(), load_times)
        for model in models:
            if model.prediction_ms is not None:
                self._metrics.take(prediction(model.name, model.prediction_ms), model.name)
        metrics = [*own, *self._metrics.all()]  # of two with one name the first is shown: a handler hides none of these
        if self._mode == "legacy":
            metrics = [metric for metric in metrics if metric.name in LEGACY]
        return to_open_metrics(metrics, wanted) if is_open else to_text(metrics, wanted)

    def _fill(self, counts: Iterable[RequestCounts], load_times: Iterable[tuple[str, float]]) -> None:
        """Update the metrics that are counted elsewhere."""
        for name in ("Requests2XX", "Requests4XX", "Requests5XX"):
            count = sum(n for digit, n in enumerate(self.traffic.by_class) if status_metric(digit) == name)
            self._set(name, "counter", [(("Host",), count)] if count else [])
        by_labels = [(one.labels, one) for one in counts]
        self._set(LEGACY[0], "counter", [(labels, one.num_requests) for labels, one in by_labels])
        answered = [(labels, one) for labels, one in by_labels if one.num_answered]
        self._set(LEGACY[1], "counter", [(labels, round(one.latency_us, 3)) for labels, one in answered])
        self._set(LEGACY[2], "counter", [(labels, round(one.queue_us, 3)) for labels, one in answered])
        for name, value in (("QueueTime", self.traffic.queue_ms), ("WorkerThreadTime", self.traffic.worker_thread_ms)):
            self._set(name, "gauge", [] if value is None else [(("Host",), round(value, 3))])
        self._set("WorkerLoadTime", "gauge", [((name, "Host"), round(s * 1000)) for name, s in load_times])

    def _set(self, name: str, kind: str, series: Iterable[tuple[tuple[str, ...], float]]) -> None:
        metric = self._metrics.server_metric(name, kind)
        if metric is not None:
            metric.values.clear()
            for labels, value in series:
                metric.add(value, (*labels, self._host))

    @property
    def model_definitions(self) -> list[Definition]:
        """The definitions that workers receive."""
        return [*self.definitions.model.values()]


@lru_cache(10_000)
def model_line(definition: Definition, label_values: tuple[str, ...], host: str) -> LineFormat:
    """The format of a handler's series; cached, since handlers do not know their series in advance."""
    return LineFormat(MODEL_METRICS, to_text=MetricText(definition, label_values, host).of_model)


def prediction(model: str, milliseconds: float, ids: str = "") -> Sample:
    """The time of a handler, in the form of a handler's sample."""
    dimensions = [("ModelName", model), ("Level", "Model")]
    return "PredictionTime", "gauge", "Milliseconds", round(milliseconds, 2), dimensions, ids
