"""Counters of requests, answers and batches; counting a request takes about a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# Logs one value of the server: name, value, label values without the host.
LogValue = Callable[[str, float, tuple[str, ...]], None]
# Logs the time of a handler: model, milliseconds, request ids of the batch.
LogPrediction = Callable[[str, float, str], None]


class Histogram:
    """Counts per bucket, and the sum of all values."""

    __slots__ = ("counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


class RequestCounts:
    """Requests of a model that named one version, or none."""

    __slots__ = ("labels", "latency_us", "num_answered", "num_requests", "queue_us")

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.num_requests = 0
        self.num_answered = 0  # successfully
        self.latency_us = 0.0
        self.queue_us = 0.0


class ModelTraffic:
    """Requests and batches of one model and version."""

    def __init__(self, name: str, host: HostTraffic) -> None:
        self.name = name
        self.host = host
        self.log_value = host.log_value
        self.queue = Histogram(SECONDS)
        self.batch_sizes = Histogram(SIZES)
        self.by_class: dict[int, Histogram] = {}
        self.handler_s = 0.0  # of all batches
        self.num_ahead = 0  # jobs sent to workers that have not started them
        self.prediction_ms: float | None = None  # of the last batch
        self._counts: dict[str | None, RequestCounts] = {}

    def requested(self, version: str | None) -> RequestCounts:
        """Count a request; pass the result to `answered` later."""
        counts = self._counts.get(version)
        if counts is None:
            counts = self._counts[version] = self.host.counts_of(self.name, version or "default")
        counts.num_requests += 1
        if self.log_value is not None:
            self.log_value("ts_inference_requests_total", 1.0, counts.labels)
        return counts

    def answered(self, counts: RequestCounts, total_s: float, queue_s: float, status: int) -> None:
        """Count an answer with its total time and the part spent in the queue."""
        if queue_s < 0.0:
            queue_s = 0.0
        times = self.by_class.get(status // 100) or self._times(status // 100)
        times.counts[bisect_left(SECONDS, total_s)] += 1  # inlined: calls would dominate the cost
        times.total += total_s
        queue = self.queue
        queue.counts[bisect_left(SECONDS, queue_s)] += 1
        queue.total += queue_s
        self.host.queue_ms = queue_s * 1000
        if status < 400:
            counts.num_answered += 1
            counts.latency_us += total_s * 1e6
            counts.queue_us += queue_s * 1e6
            if self.log_value is not None:
                self.log_value("ts_inference_latency_microseconds", round(total_s * 1e6, 3), counts.labels)
                self.log_value("ts_queue_latency_microseconds", round(queue_s * 1e6, 3), counts.labels)
                self.log_value("QueueTime", round(queue_s * 1000, 3), ("Host",))

    def _times(self, status_class: int) -> Histogram:
        return self.by_class.setdefault(status_class, Histogram(SECONDS))

    def predicted(self, handler_s: float, ids: list[str]) -> None:
        """Record the handler's time for a batch."""
        self.handler_s += handler_s
        self.prediction_ms = handler_s * 1000
        if self.host.log_prediction is not None:
            self.host.log_prediction(self.name, self.prediction_ms, ",".join(ids))

    def loaded(self, worker: str, seconds: float) -> None:
        """Record a worker's load time."""
        if self.log_value is not None:
            self.log_value("WorkerLoadTime", float(round(seconds * 1000)), (worker, "Host"))

    def batch_done(self, size: int, overhead_s: float) -> None:
        """Count a batch, and its time outside of the handler."""
        sizes = self.batch_sizes
        sizes.counts[bisect_left(SIZES, size)] += 1
        sizes.total += size
        self.host.worker_thread_ms = overhead_ms = overhead_s * 1000 if overhead_s > 0 else 0.0
        if self.log_value is not None:
            self.log_value("WorkerThreadTime", round(overhead_ms, 3), ("Host",))


class HostTraffic:
    """Counters shared by all models and listeners of a server."""

    def __init__(self, log_value: LogValue | None = None, log_prediction: LogPrediction | None = None) -> None:
        self.log_value = log_value
        self.log_prediction = log_prediction
        self.by_class = [0] * 10  # HTTP responses of all listeners, by the first digit of the status
        # By model and version. They are kept when a model is unregistered: counters never decrease.
        self.counts: dict[tuple[str, str], RequestCounts] = {}
        self.queue_ms: float | None = None
        self.worker_thread_ms: float | None = None

    def counts_of(self, model: str, version: str) -> RequestCounts:
        """The counts of a model for requests that named this version, or `default`."""
        return self.counts.setdefault((model, version), RequestCounts((model, version)))

    def responded(self, status: int) -> None:
        """Count an HTTP response."""
        self.by_class[status // 100 if status < 1000 else 9] += 1
        if self.log_value is not None:
            self.log_value(status_metric(status // 100), 1.0, ("Host",))


def status_metric(status_class: int) -> str:
    """The metric for a status class; everything except 2xx and 4xx counts as 5xx."""
    return {2: "Requests2XX", 4: "Requests4XX"}.get(status_class, "Requests5XX")


def smoothed(old: float | None, new: float) -> float:
    """A moving average that follows slow-downs at once and speed-ups gradually."""
    return new if old is None or new > old * 8 else old + (new - old) * 0.1
