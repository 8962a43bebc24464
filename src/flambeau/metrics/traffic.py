"""What passes through a server, in plain numbers: counting a request costs about a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# Writes one measurement of the server to its log: name, value, label values without the host.
Note = Callable[[str, float, tuple[str, ...]], None]
# The same for the time a handler took: model, milliseconds, the ids of the batch.
NotePrediction = Callable[[str, float, str], None]


class Histogram:
    """How often values fell between bounds, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


class RequestCounts:
    """The requests that named one version of a model, or none."""

    __slots__ = ("labels", "latency_us", "num_answered", "num_requests", "queue_us")

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.num_requests = 0
        self.num_answered = 0  # with success
        self.latency_us = 0.0
        self.queue_us = 0.0


class ModelTraffic:
    """The requests of one model and version, and the batches they became."""

    def __init__(self, name: str, host: HostTraffic) -> None:
        self.name = name
        self.host = host
        self.note = host.note
        self.queue = Histogram(SECONDS)
        self.batch_sizes = Histogram(SIZES)
        self.by_class: dict[int, Histogram] = {}
        self.num_ahead = 0  # jobs that were sent to workers which have not begun them
        self.prediction_ms: float | None = None  # what the handler took for the last batch
        self._usages: dict[str | None, RequestCounts] = {}

    def requested(self, version: str | None) -> RequestCounts:
        """Count a request, whatever becomes of it; its answer is to be counted under the same usage."""
        usage = self._usages.get(version)
        if usage is None:
            usage = self._usages[version] = self.host.usage(self.name, version or "default")
        usage.num_requests += 1
        if self.note is not None:
            self.note("ts_inference_requests_total", 1.0, usage.labels)
        return usage

    def answered(self, usage: RequestCounts, total_s: float, queue_s: float, status: int) -> None:
        """Count an answer of a worker: the time since the request came, and how much of it was waiting."""
        if queue_s < 0.0:
            queue_s = 0.0
        times = self.by_class.get(status // 100) or self._times(status // 100)
        times.counts[bisect_left(SECONDS, total_s)] += 1  # written out: calls are most of what counting costs
        times.total += total_s
        queue = self.queue
        queue.counts[bisect_left(SECONDS, queue_s)] += 1
        queue.total += queue_s
        self.host.queue_ms = queue_s * 1000
        if status < 400:
            usage.num_answered += 1
            usage.latency_us += total_s * 1e6
            usage.queue_us += queue_s * 1e6
            if self.note is not None:
                self.note("ts_inference_latency_microseconds", round(total_s * 1e6, 3), usage.labels)
                self.note("ts_queue_latency_microseconds", round(queue_s * 1e6, 3), usage.labels)
                self.note("QueueTime", round(queue_s * 1000, 3), ("Host",))

    def _times(self, status_class: int) -> Histogram:
        return self.by_class.setdefault(status_class, Histogram(SECONDS))

    def predicted(self, handler_s: float, ids: list[str]) -> None:
        """Note how long the handler took for a batch."""
        self.prediction_ms = handler_s * 1000
        if self.host.note_prediction is not None:
            self.host.note_prediction(self.name, self.prediction_ms, ",".join(ids))

    def loaded(self, worker: str, seconds: float) -> None:
        """Note how long a worker took to load the model."""
        if self.note is not None:
            self.note("WorkerLoadTime", float(round(seconds * 1000)), (worker, "Host"))

    def batch_done(self, size: int, overhead_s: float) -> None:
        """Count a batch, and the time it took beyond the handler's."""
        sizes = self.batch_sizes
        sizes.counts[bisect_left(SIZES, size)] += 1
        sizes.total += size
        self.host.worker_thread_ms = overhead_ms = overhead_s * 1000 if overhead_s > 0 else 0.0
        if self.note is not None:
            self.note("WorkerThreadTime", round(overhead_ms, 3), ("Host",))


class HostTraffic:
    """What all models and listeners of a server have in common."""

    def __init__(self, note: Note | None = None, note_prediction: NotePrediction | None = None) -> None:
        self.note = note
        self.note_prediction = note_prediction
        self.by_class = [0] * 10  # HTTP responses on any listener, by the first digit of their status
        self.usages: dict[tuple[str, str], RequestCounts] = {}  # they outlive their models: counters never go back
        self.queue_ms: float | None = None
        self.worker_thread_ms: float | None = None

    def usage(self, model: str, version: str) -> RequestCounts:
        """The usage of a model by requests that named this version, or `default`."""
        return self.usages.setdefault((model, version), RequestCounts((model, version)))

    def responded(self, status: int) -> None:
        """Count an HTTP response."""
        self.by_class[status // 100 if status < 1000 else 9] += 1
        if self.note is not None:
            self.note(status_metric(status // 100), 1.0, ("Host",))


def status_metric(status_class: int) -> str:
    """The metric that counts responses of this class; what is neither 2xx nor 4xx counts as 5xx."""
    return {2: "Requests2XX", 4: "Requests4XX"}.get(status_class, "Requests5XX")
