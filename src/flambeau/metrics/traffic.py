"""Counters of requests, answers and batches; counting a request takes about a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

from flambeau.wire.messages import TOKEN_GAPS, EngineReport, GenerationWork, Work

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT_SECONDS = (0.00005, 0.0001, 0.00025, *SECONDS)  # for what may take microseconds
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
MAX_PENDING = 64
HOST = ("Host",)  # the label of metrics of the whole server

LogEvent = Callable[[], None]
LogTime = Callable[[float], None]
LogTimes = Callable[..., None]  # a time of each series
LogPrediction = Callable[[float, str], None]  # the milliseconds of a handler, the request ids of its batch


class MetricsLog(Protocol):
    """Where values are logged when they are counted. The function of a series is made once, not found each time.

    Labels are values, without the host.
    """

    def events(self, name: str, labels: tuple[str, ...]) -> LogEvent:
        """Log that something happened."""

    def times(self, name: str, labels: tuple[str, ...]) -> LogTime:
        """Log times in the unit of the metric, to three decimals."""

    def times_together(self, *series: tuple[str, tuple[str, ...]]) -> LogTimes:
        """Log a time of each series at the same moment, which costs little more than one; a series: name and labels."""

    def predictions(self, model: str) -> LogPrediction: ...


# A value with the labels that tell where it comes from (a trace), and its time in seconds since 1970.
Exemplar = tuple[tuple[tuple[str, str], ...], float, float]


class Histogram:
    """Counts per bucket, and the sum of all values."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] | None = None  # by bucket, where requests are traced

    def mark(self, bounds: Sequence[float], value: float, trace_id: str, at: float) -> None:
        """Note the trace of a value that was counted; a bucket keeps the last one."""
        self.exemplars = self.exemplars or {}
        self.exemplars[bisect_left(bounds, value)] = (("trace_id", trace_id),), value, at

    @property
    def number(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


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

    __slots__ = ("answered", "requested")

    def __init__(self, log: MetricsLog, labels: tuple[str, ...]) -> None:
        self.requested = log.events("ts_inference_requests_total", labels)
        # The whole time and that in the queue in microseconds, and the latter in milliseconds.
        self.answered = log.times_together(
            ("ts_inference_latency_microseconds", labels),
            ("ts_queue_latency_microseconds", labels),
            ("QueueTime", HOST),
        )


class ModelTraffic:
    """Requests and batches of one model and version."""

    def __init__(self, name: str, host: HostTraffic) -> None:
        self.name = name
        self.host = host
        self.log_prediction = None if host.log is None else host.log.predictions(name)
        self.queue = Histogram(SECONDS)
        self.batch_sizes = Histogram(SIZES)
        self.batch_wait = Histogram(SECONDS)  # of requests whose batch waited for more
        self._stages = StageTraffic()
        self._pending: list[Work] = []  # counted together: in a tight loop it costs a third
        self.generation = GenerationTraffic()
        self.engine = EngineTraffic()
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
        self.host.queue_ms = queue_ms = queue_s * 1000
        if status < 400:
            counts.num_answered += 1
            counts.latency_us += (total_us := total_s * 1e6)
            counts.queue_us += (queue_us := queue_s * 1e6)
            if counts.log is not None:
                counts.log.answered(total_us, queue_us, queue_ms)

    def _times(self, status_class: int) -> Histogram:
        return self.by_class.setdefault(status_class, Histogram(SECONDS))

    def batch_waited(self, seconds: float) -> None:
        """Count the time that a request waited for others, while a worker was free."""
        self.batch_wait.counts[bisect_left(SECONDS, seconds)] += 1
        self.batch_wait.total += seconds

    def worked(self, work: Work, queue_s: float) -> None:
        """Count how a worker spent its time on a batch that it got after `queue_s`."""
        if work.generation is not None:
            self.generation.add(work.generation, queue_s, work.ended - work.began)
        self._pending.append(work)
        if len(self._pending) >= MAX_PENDING:
            self._stages.fold(self._pending)

    @property
    def stages(self) -> StageTraffic:
        """The times of handlers and their stages."""
        if self._pending:
            self._stages.fold(self._pending)
        return self._stages

    def traced(self, trace_id: str, total_s: float, queue_s: float, status: int, work: Work | None, at: float) -> None:
        """Note the trace of a request that was counted; `at` is in seconds since 1970."""
        queue_s = max(0.0, queue_s)
        self._times(status // 100).mark(SECONDS, total_s, trace_id, at)
        self.queue.mark(SECONDS, queue_s, trace_id, at)
        if work is None:
            return
        made = self._stages
        made.handler.mark(SHORT_SECONDS, work.handler_s, trace_id, at)
        if work.stages is not None:
            for times, seconds in zip((made.preprocess, made.inference, made.postprocess), work.stages, strict=True):
                times.mark(SHORT_SECONDS, seconds, trace_id, at)
        if work.generation is not None:
            self.generation.first_token.mark(SECONDS, queue_s + work.generation.first_token_s, trace_id, at)

    def predicted(self, handler_s: float, ids: Sequence[str]) -> None:
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


class StageTraffic:
    """The times of a model's batches in its handler and in the stages of it."""

    def __init__(self) -> None:
        self.handler = Histogram(SHORT_SECONDS)
        self.preprocess = Histogram(SHORT_SECONDS)
        self.inference = Histogram(SHORT_SECONDS)
        self.postprocess = Histogram(SHORT_SECONDS)

    def fold(self, pending: list[Work]) -> None:
        """Count these batches, and empty the list."""
        add_all(self.handler, [work.handler_s for work in pending])
        stages = [work.stages for work in pending if work.stages is not None]
        pending.clear()
        if stages:
            preprocess, inference, postprocess = zip(*stages, strict=True)
            add_all(self.preprocess, preprocess)
            add_all(self.inference, inference)
            add_all(self.postprocess, postprocess)


def add_all(times: Histogram, values: Sequence[float]) -> None:
    """Count values of a histogram with SHORT_SECONDS."""
    counts, bounds = times.counts, SHORT_SECONDS
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    times.total += sum(values)


class GenerationTraffic:
    """Finished generations of one model and version."""

    def __init__(self) -> None:
        self.first_token = Histogram(SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.prefill = Histogram(SECONDS)
        self.decode = Histogram(SECONDS)
        self.token_times = Histogram(TOKEN_GAPS)  # the mean time of each generation's tokens behind the first
        self.finish_reasons: dict[str, int] = {}  # of choices
        self.num_cached = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def add(self, work: GenerationWork, queue_s: float, engine_s: float) -> None:
        """Count a generation that reached its engine after `queue_s` and was there for `engine_s`."""
        first_token_s = queue_s + work.first_token_s
        self.first_token.counts[bisect_left(SECONDS, first_token_s)] += 1
        self.first_token.total += first_token_s
        self.prompt_tokens.counts[bisect_left(TOKENS, work.num_prompt)] += 1
        self.prompt_tokens.total += work.num_prompt
        self.output_tokens.counts[bisect_left(TOKENS, work.num_tokens)] += 1
        self.output_tokens.total += work.num_tokens
        decode_s = max(0.0, engine_s - work.first_token_s)
        self.prefill.counts[bisect_left(SECONDS, work.first_token_s)] += 1
        self.prefill.total += work.first_token_s
        self.decode.counts[bisect_left(SECONDS, decode_s)] += 1
        self.decode.total += decode_s
        num_each = work.num_tokens / max(1, len(work.finish_reasons))  # choices are generated side by side
        if num_each > 1:
            per_token_s = decode_s / (num_each - 1)
            self.token_times.counts[bisect_left(TOKEN_GAPS, per_token_s)] += 1
            self.token_times.total += per_token_s
        for reason in work.finish_reasons:
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
        self.num_cached += work.num_cached
        self.num_drafted += work.num_drafted
        self.num_accepted += work.num_accepted


class EngineTraffic:
    """The load of the engines of a model's workers, as they reported it last, and what they counted."""

    def __init__(self) -> None:
        self.reports: dict[str, EngineReport] = {}  # by worker
        self.num_preempted = 0
        self.num_blocks_saved = self.num_blocks_restored = 0
        self.num_steps = 0
        self.token_gaps = Histogram(TOKEN_GAPS)

    def add(self, worker: str, report: EngineReport) -> None:
        """Take a worker's report."""
        self.reports[worker] = report
        self.num_preempted += report.num_preempted
        self.num_blocks_saved += report.num_blocks_saved
        self.num_blocks_restored += report.num_blocks_restored
        self.num_steps += report.num_steps
        self.token_gaps.total += report.token_gaps_s
        if len(report.token_gaps) == len(self.token_gaps.counts):
            pairs = zip(self.token_gaps.counts, report.token_gaps, strict=True)
            self.token_gaps.counts = [old + new for old, new in pairs]

    def forget(self, worker: str) -> None:
        """The worker has ended: its load is gone, and what it counted stays."""
        self.reports.pop(worker, None)

    @property
    def num_running(self) -> int:
        return sum(report.num_running for report in self.reports.values())

    @property
    def num_waiting(self) -> int:
        return sum(report.num_waiting for report in self.reports.values())

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks in use, from 0 to 1."""
        num_blocks = sum(report.num_blocks for report in self.reports.values())
        return sum(report.num_blocks_used for report in self.reports.values()) / num_blocks if num_blocks else 0.0


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


def percentile(counts: Sequence[int], share: float, bounds: Sequence[float] = SECONDS) -> float | None:
    """A percentile in seconds from counts by bounds, linear inside a bucket; None without a count."""
    total = sum(counts)
    if total <= 0:
        return None
    wanted, seen = share * total, 0
    for number, count in enumerate(counts):
        if count and seen + count >= wanted:
            low = bounds[number - 1] if number else 0.0
            high = bounds[min(number, len(bounds) - 1)]
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return bounds[-1]


def smoothed(old: float | None, new: float) -> float:
    """A moving average that follows slow-downs at once and speed-ups gradually."""
    return new if old is None or new > old * 8 else old + (new - old) * 0.1
