"""Counters of requests, answers and batches; counting a request takes about a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
HOST = ("Host",)  # the label of metrics of the whole server

LogEvent = Callable[[], None]
LogTime = Callable[[float], None]
LogPrediction = Callable[[float, str], None]  # the milliseconds of a handler, the request ids of its batch


class MetricsLog(Protocol):
    """Where values are logged when they are counted. The function of a series is made once, not found each time.

    Labels are values, without the host.
    """

    def events(self, name: str, labels: tuple[str, ...]) -> LogEvent:
        """Log that something happened."""

    def times(self, name: str, labels: tuple[str, ...]) -> LogTime:
        """Log times in the unit of the metric, to three decimals."""

    def predictions(self, model: str) -> LogPrediction: ...


class Histogram:
    """Counts per bucket, and the sum of all values."""

    __slots__ = ("counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


class RequestCounts:
    """Requests of a model that named one version, or none."""

    __slots__ = ("labels", "latency_us", "log", "num_answered", "num_requests", "queue_us")

    def __init__(self, labels: tuple[str, ...], log: MetricsLog | None = None) -> None:
        self.labels = labels
        self.log = None if log is None else RequestLog(log, labels)
        self.num_requests = 0
        self.num_answered = 0  # successfully
        self.latency_us = 0.0
        self.queue_us = 0.0


class RequestLog:
    """Logs what is counted of each request."""

    __slots__ = ("_latency", "_queue_latency", "_queue_time", "requested")

    def __init__(self, log: MetricsLog, labels: tuple[str, ...]) -> None:
        self.requested = log.events("ts_inference_requests_total", labels)
        self._latency = log.times("ts_inference_latency_microseconds", labels)
        self._queue_latency = log.times("ts_queue_latency_microseconds", labels)
        self._queue_time = log.times("QueueTime", HOST)

    def answered(self, total_s: float, queue_s: float) -> None:
        self._latency(total_s * 1e6)
        self._queue_latency(queue_s * 1e6)
        self._queue_time(queue_s * 1000)


class ModelTraffic:
    """Requests and batches of one model and version."""

    def __init__(self, name: str, host: HostTraffic) -> None:
        self.name = name
        self.host = host
        self.log_prediction = None if host.log is None else host.log.predictions(name)
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
        if counts.log is not None:
            counts.log.requested()
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
            if counts.log is not None:
                counts.log.answered(total_s, queue_s)

    def _times(self, status_class: int) -> Histogram:
        return self.by_class.setdefault(status_class, Histogram(SECONDS))

    def predicted(self, handler_s: float, ids: list[str]) -> None:
        """Record the handler's time for a batch."""
        self.handler_s += handler_s
        self.prediction_ms = handler_s * 1000
        if self.log_prediction is not None:
            self.log_prediction(self.prediction_ms, ",".join(ids))

    def loaded(self, worker: str, seconds: float) -> None:
        """Record a worker's load time."""
        if self.host.log is not None:
            self.host.log.times("WorkerLoadTime", (worker, *HOST))(round(seconds * 1000))

    def batch_done(self, size: int, overhead_s: float) -> None:
        """Count a batch, and its time outside of the handler."""
        sizes = self.batch_sizes
        sizes.counts[bisect_left(SIZES, size)] += 1
        sizes.total += size
        self.host.worker_thread_ms = overhead_ms = overhead_s * 1000 if overhead_s > 0 else 0.0
        if self.host.log_worker_thread is not None:
            self.host.log_worker_thread(overhead_ms)


class HostTraffic:
    """Counters shared by all models and listeners of a server."""

    def __init__(self, log: MetricsLog | None = None) -> None:
        self.log = log
        self.log_worker_thread = None if log is None else log.times("WorkerThreadTime", HOST)
        self._log_class = None if log is None else [log.events(status_metric(digit), HOST) for digit in range(10)]
        self.by_class = [0] * 10  # HTTP responses of all listeners, by the first digit of the status
        # By model and version. They are kept when a model is unregistered: counters never decrease.
        self.counts: dict[tuple[str, str], RequestCounts] = {}
        self.queue_ms: float | None = None
        self.worker_thread_ms: float | None = None

    def counts_of(self, model: str, version: str) -> RequestCounts:
        """The counts of a model for requests that named this version, or `default`."""
        return self.counts.setdefault((model, version), RequestCounts((model, version), self.log))

    def responded(self, status: int) -> None:
        """Count an HTTP response."""
        first_digit = status // 100 if status < 1000 else 9
        self.by_class[first_digit] += 1
        if self._log_class is not None:
            self._log_class[first_digit]()


def status_metric(status_class: int) -> str:
    """The metric for a status class; everything except 2xx and 4xx counts as 5xx."""
    return {2: "Requests2XX", 4: "Requests4XX"}.get(status_class, "Requests5XX")


def smoothed(old: float | None, new: float) -> float:
    """A moving average that follows slow-downs at once and speed-ups gradually."""
    return new if old is None or new > old * 8 else old + (new - old) * 0.1
