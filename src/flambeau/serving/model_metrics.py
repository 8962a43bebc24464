"""The state and traffic of models as `flambeau_*` metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flambeau.metrics.registry import Labels, MetricFamily
from flambeau.metrics.traffic import SECONDS, SIZES, Histogram
from flambeau.serving.model import Model


def model_metrics(models: Iterable[Model]) -> Iterator[MetricFamily]:
    """The current state of models and workers, and the totals of their requests."""
    answers = MetricFamily("flambeau_requests_total", "counter", "Requests answered, by model and status.")
    waiting = MetricFamily("flambeau_queue_jobs", "gauge", "Jobs that wait for a worker.")
    ready = MetricFamily("flambeau_workers_ready", "gauge", "Workers with the model loaded.")
    wanted = MetricFamily("flambeau_workers_wanted", "gauge", "Workers the model should have.")
    restarts = MetricFamily("flambeau_worker_restarts_total", "counter", "Workers that ended and were replaced.")
    seconds = MetricFamily(
        "flambeau_request_seconds", "histogram", "From a request's arrival to the end of its answer.", SECONDS
    )
    queue = MetricFamily(
        "flambeau_queue_seconds", "histogram", "From a request's arrival to its worker's attention.", SECONDS
    )
    sizes = MetricFamily("flambeau_batch_size", "histogram", "Requests sent to a worker together.", SIZES)
    for model in models:
        labels = (("model", model.name), ("version", model.version))
        for status, count in model.answers.items():
            answers.update(count, (*labels, ("status", str(status))))
        waiting.update(model.num_waiting, labels)
        ready.update(model.pool.num_ready, labels)
        wanted.update(model.pool.num_wanted, labels)
        restarts.update(model.pool.num_restarts, labels)
        traffic = model.traffic
        for status_class, histogram in traffic.by_class.items():
            fill(seconds, (*labels, ("status", f"{status_class}xx")), histogram)
        fill(queue, labels, traffic.queue)
        fill(sizes, labels, traffic.batch_sizes)
    yield from (answers, waiting, ready, wanted, restarts, seconds, queue, sizes)


def fill(metric: MetricFamily, labels: Labels, histogram: Histogram) -> None:
    """Set a series of a metric to a histogram."""
    metric.values[labels] = histogram.total
    metric.buckets[labels] = histogram.counts
