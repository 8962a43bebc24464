"""Telemetry: what a server and its handlers measure, and where it goes: the metrics endpoint, the logs, or both."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from socket import gethostname

from flambeau.config.server import MetricsConfig
from flambeau.logs.layouts import MODEL_METRICS, TS_METRICS
from flambeau.logs.writer import Logs
from flambeau.metrics.definitions import BUNDLED, Definition, read_definitions
from flambeau.metrics.log_lines import model_line, server_line
from flambeau.metrics.registry import MetricFamily, MetricsRegistry, to_text
from flambeau.metrics.samples import Sample
from flambeau.metrics.system import Reading
from flambeau.metrics.traffic import HostTraffic, ModelTraffic, RequestCounts, status_metric

LEGACY = ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds")


class Telemetry:
    """Everything measured by one server; `traffic` is what requests are counted in."""

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
        self.traffic = HostTraffic(*(self._note, self._note_prediction) if self._logs_lines else ())

    # ---- taking ----

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Take what a handler measured."""
        for sample in samples:
            definition = self._metrics.take(sample)
            if definition is not None and self._logs_lines:
                values = tuple(text for _, text in sample[4])
                payload = (model_line, definition, sample[3], values, self._host, sample[5])
                self._logs.put(MODEL_METRICS, logging.INFO, "main", MODEL_METRICS, payload)

    def add_readings(self, readings: Iterable[Reading]) -> None:
        """Take what was read about the host; a device is the last label but the host's."""
        for name, _, value, device in readings:
            labels = ("Host",) if device is None else ("Host", device)
            metric = self._metrics.server_metric(name, "gauge")
            if metric is not None and metric.add(value, (*labels, self._host)):
                self._note(name, value, labels)

    def _note_prediction(self, model: str, milliseconds: float, ids: str) -> None:
        self.add_samples([prediction(model, milliseconds, ids)])

    def _note(self, name: str, value: float, labels: tuple[str, ...]) -> None:
        """Log one measurement of the server, if the configuration names it."""
        definition = self.definitions.server.get(name)
        if definition is None or not self._logs_lines or (self._mode == "legacy" and name in LEGACY):
            return
        payload = (server_line, definition, value, labels, self._host)
        self._logs.put(TS_METRICS, logging.INFO, "main", TS_METRICS, payload)

    # ---- telling ----

    def text(
        self,
        models: Iterable[ModelTraffic],
        load_times: Iterable[tuple[str, float]],
        own: Iterable[MetricFamily],
        wanted: Collection[str] = (),
    ) -> str:
        """What the metrics endpoint shows, by mode: the models' traffic, workers' load times, and our own metrics."""
        if self._mode == "log":
            return ""
        models = [*models]
        self._fill(self.traffic.usages.values(), load_times)
        for model in models:
            if model.prediction_ms is not None:
                self._metrics.take(prediction(model.name, model.prediction_ms))
        metrics = [*self._metrics.all(), *own]
        if self._mode == "legacy":
            metrics = [metric for metric in metrics if metric.name in LEGACY]
        return to_text(metrics, wanted)

    def _fill(self, usages: Iterable[RequestCounts], load_times: Iterable[tuple[str, float]]) -> None:
        """Bring the metrics that are counted elsewhere up to date."""
        for name in ("Requests2XX", "Requests4XX", "Requests5XX"):
            count = sum(n for digit, n in enumerate(self.traffic.by_class) if status_metric(digit) == name)
            self._set(name, "counter", [(("Host",), count)] if count else [])
        by_labels = [(usage.labels, usage) for usage in usages]
        self._set(LEGACY[0], "counter", [(labels, usage.num_requests) for labels, usage in by_labels])
        answered = [(labels, usage) for labels, usage in by_labels if usage.num_answered]
        self._set(LEGACY[1], "counter", [(labels, round(usage.latency_us, 3)) for labels, usage in answered])
        self._set(LEGACY[2], "counter", [(labels, round(usage.queue_us, 3)) for labels, usage in answered])
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
        """What workers are told of the configuration."""
        return [*self.definitions.model.values()]


def prediction(model: str, milliseconds: float, ids: str = "") -> Sample:
    """How long a handler took, as if it had measured that itself."""
    dimensions = [("ModelName", model), ("Level", "Model")]
    return "PredictionTime", "gauge", "Milliseconds", round(milliseconds, 2), dimensions, ids
