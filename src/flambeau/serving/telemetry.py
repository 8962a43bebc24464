"""Telemetry: collects the metrics of a server and its handlers for the metrics endpoint and the logs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from socket import gethostname

from flambeau.config.server import MetricsConfig
from flambeau.logs.line_formats import MODEL_METRICS, TS_METRICS
from flambeau.logs.writer import Logs
from flambeau.metrics.definitions import BUNDLED, Definition, Sample, read_definitions
from flambeau.metrics.log_lines import model_line, server_line
from flambeau.metrics.registry import MetricFamily, MetricsRegistry, to_text
from flambeau.metrics.system import Reading
from flambeau.metrics.traffic import HostTraffic, ModelTraffic, RequestCounts, status_metric

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
        self.traffic = HostTraffic(*(self._log_value, self._log_prediction) if self._logs_lines else ())

    # ---- recording ----

    def add_samples(self, samples: Iterable[Sample], model: str = "") -> None:
        """Record the samples of a model's handler."""
        for sample in samples:
            definition = self._metrics.take(sample, model)
            if definition is not None and self._logs_lines:
                values = tuple(text for _, text in sample[4])
                payload = (model_line, definition, sample[3], values, self._host, sample[5])
                self._logs.put(MODEL_METRICS, logging.INFO, "main", MODEL_METRICS, payload, sum(map(len, values)))

    def add_readings(self, readings: Iterable[Reading]) -> None:
        """Record readings of the host; a device is the last label before the host."""
        for name, _, value, device in readings:
            labels = ("Host",) if device is None else ("Host", device)
            metric = self._metrics.server_metric(name, "gauge")
            if metric is not None and metric.add(value, (*labels, self._host)):
                self._log_value(name, value, labels)

    def _log_prediction(self, model: str, milliseconds: float, ids: str) -> None:
        self.add_samples([prediction(model, milliseconds, ids)], model)

    def _log_value(self, name: str, value: float, labels: tuple[str, ...]) -> None:
        """Log one value of the server, if the configuration defines the metric."""
        definition = self.definitions.server.get(name)
        if definition is None or not self._logs_lines or (self._mode == "legacy" and name in LEGACY):
            return
        payload = (server_line, definition, value, labels, self._host)
        self._logs.put(TS_METRICS, logging.INFO, "main", TS_METRICS, payload)

    # ---- exposition ----

    def text(
        self,
        models: Iterable[ModelTraffic],
        load_times: Iterable[tuple[str, float]],
        own: Iterable[MetricFamily],
        wanted: Collection[str] = (),
    ) -> str:
        """The text of the metrics endpoint: model traffic, worker load times and the server's own metrics."""
        if self._mode == "log":
            return ""
        models = [*models]
        self._fill(self.traffic.counts.values(), load_times)
        for model in models:
            if model.prediction_ms is not None:
                self._metrics.take(prediction(model.name, model.prediction_ms), model.name)
        metrics = [*own, *self._metrics.all()]  # of two with one name the first is shown: a handler hides none of these
        if self._mode == "legacy":
            metrics = [metric for metric in metrics if metric.name in LEGACY]
        return to_text(metrics, wanted)

    def totals_by_model(self, name: str) -> dict[str, float]:
        """The values of a metric of handlers, added up for each model."""
        totals: dict[str, float] = {}
        for metric in self._metrics.all():
            if metric.name == name:
                for labels, value in metric.values.items():
                    model = dict(labels).get("ModelName", "")
                    totals[model] = totals.get(model, 0.0) + value
        return totals

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


def prediction(model: str, milliseconds: float, ids: str = "") -> Sample:
    """The time of a handler, in the form of a handler's sample."""
    dimensions = [("ModelName", model), ("Level", "Model")]
    return "PredictionTime", "gauge", "Milliseconds", round(milliseconds, 2), dimensions, ids
