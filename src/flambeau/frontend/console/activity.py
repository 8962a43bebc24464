"""Activity: what each model did in the last seconds, from counters that grow. Without effects; time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flambeau.metrics.traffic import SECONDS, Histogram, ModelTraffic, percentile
from flambeau.serving.model import Model
from flambeau.wire.messages import TOKEN_GAPS

KEPT = 300  # samples of each model
WINDOW = 10  # samples that a rate or percentile is taken from
# Per second: requests, errors, tokens. Percent: kv, prefix, accepted. Numbers: batch, waiting, running, sequences.
# Milliseconds: all others; the parts of a request's time, from queue to postprocess, are averages.
FIELDS = (
    *("requests", "errors", "p50", "p95", "p99"),
    *("queue", "batchWait", "transfer", "preprocess", "inference", "postprocess", "handler"),
    *("batch", "waiting", "tokens", "firstToken", "gap", "gap95"),
    *("running", "sequences", "kv", "prefix", "accepted"),
)

Key = tuple[str, str]  # name and version
Sample = list[float | None]


@dataclass(frozen=True, slots=True)
class Count:
    """How many values there were, and their sum."""

    number: float = 0
    total: float = 0.0

    @classmethod
    def of(cls, histogram: Histogram) -> Count:
        return cls(sum(histogram.counts), histogram.total)

    def mean_since(self, before: Count) -> float | None:
        number = self.number - before.number
        return (self.total - before.total) / number if number > 0 else None


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters of a model at one moment."""

    at: float
    answers: int
    errors: int
    times: tuple[int, ...]  # answers by SECONDS
    queue_s: float
    batch_wait_s: float
    total_s: float  # of all answers, from their arrival
    stages: tuple[Count, Count, Count]
    handler: Count
    batches: Count
    waiting: int
    first_token: Count
    gaps: tuple[int, ...]  # tokens by TOKEN_GAPS
    num_prompt: float
    num_cached: int
    num_drafted: int
    num_accepted: int
    load: tuple[int, int, float] | None  # running and waiting sequences, the share of KV blocks; None: no engine

    @classmethod
    def of(cls, model: Model, now: float) -> Totals:
        traffic: ModelTraffic = model.traffic
        generation, engine, stages = traffic.generation, traffic.engine, traffic.stages
        by_class = [*traffic.by_class.items()]
        times = [sum(counts) for counts in zip(*(histogram.counts for _, histogram in by_class), strict=True)]
        return cls(
            at=now,
            answers=sum(times),
            errors=sum(sum(histogram.counts) for digit, histogram in by_class if digit >= 4),
            times=tuple(times) or (0,) * (len(SECONDS) + 1),
            queue_s=traffic.queue.total,
            batch_wait_s=traffic.batch_wait.total,
            total_s=sum(histogram.total for _, histogram in by_class),
            stages=(Count.of(stages.preprocess), Count.of(stages.inference), Count.of(stages.postprocess)),
            handler=Count.of(stages.handler),
            batches=Count.of(traffic.batch_sizes),
            waiting=model.num_waiting,
            first_token=Count.of(generation.first_token),
            gaps=tuple(engine.token_gaps.counts),
            num_prompt=generation.prompt_tokens.total,
            num_cached=generation.num_cached,
            num_drafted=generation.num_drafted,
            num_accepted=generation.num_accepted,
            load=(engine.num_running, engine.num_waiting, engine.kv_usage) if engine.reports else None,
        )


class Activity:
    """Samples of every model, one for each call of `add`."""

    def __init__(self) -> None:
        self._totals: dict[Key, deque[Totals]] = {}
        self._samples: dict[Key, deque[Sample]] = {}

    def add(self, models: Iterable[Model], now: float) -> None:
        """Take a sample of each model."""
        present: set[Key] = set()
        for model in models:
            key = (model.name, model.version)
            present.add(key)
            totals = self._totals.setdefault(key, deque(maxlen=WINDOW + 1))
            totals.append(Totals.of(model, now))
            samples = self._samples.setdefault(key, deque(maxlen=KEPT))
            samples.append(rates(totals[max(0, len(totals) - 2)], totals[-1]))
        for key in self._totals.keys() - present:
            del self._totals[key], self._samples[key]

    def recent(self, key: Key) -> dict[str, float | None]:
        """The rates and percentiles of the last WINDOW samples."""
        totals = self._totals.get(key)
        return dict(zip(FIELDS, rates(totals[0], totals[-1]), strict=True)) if totals else {}

    def latest(self, key: Key) -> Sample:
        """The newest sample, in the order of FIELDS."""
        samples = self._samples.get(key)
        return samples[-1] if samples else [None] * len(FIELDS)

    def history(self, key: Key) -> list[Sample]:
        """All samples, the oldest first."""
        return [*self._samples.get(key, ())]


def rates(before: Totals, after: Totals) -> Sample:
    """What happened between two moments, in the order of FIELDS; None where nothing was measured."""
    seconds = after.at - before.at
    answers = after.answers - before.answers
    times = differences(after.times, before.times)
    gaps = differences(after.gaps, before.gaps)
    num_tokens = sum(gaps) + after.first_token.number - before.first_token.number
    batch_wait_s = (after.batch_wait_s - before.batch_wait_s) / answers if answers else None
    queue_s = (after.queue_s - before.queue_s) / answers - (batch_wait_s or 0.0) if answers else None
    return [
        rounded(answers / seconds) if seconds > 0 else 0.0,
        rounded((after.errors - before.errors) / seconds) if seconds > 0 else 0.0,
        *(milliseconds(percentile(times, share)) for share in (0.5, 0.95, 0.99)),
        milliseconds(queue_s),
        milliseconds(batch_wait_s),
        *map(milliseconds, work_between(before, after)),
        rounded(after.batches.mean_since(before.batches)),
        float(after.waiting),
        rounded(num_tokens / seconds) if seconds > 0 else 0.0,
        milliseconds(after.first_token.mean_since(before.first_token)),
        *(milliseconds(percentile(gaps, share, TOKEN_GAPS)) for share in (0.5, 0.95)),
        *((None, None, None) if after.load is None else (*after.load[:2], rounded(100 * after.load[2]))),
        percent(after.num_cached - before.num_cached, after.num_prompt - before.num_prompt),
        percent(after.num_accepted - before.num_accepted, after.num_drafted - before.num_drafted),
    ]


def work_between(before: Totals, after: Totals) -> list[float | None]:
    """The average seconds of a batch: transfer, the three stages, and the handler's time outside of them.

    Transfer is what neither the queue nor the handler took: the way to the worker and back, reading and writing.
    """
    stages = [new.mean_since(old) for new, old in zip(after.stages, before.stages, strict=True)]
    handler = after.handler.mean_since(before.handler)
    answers = after.answers - before.answers
    if handler is None or not answers:
        return [None, *stages, handler]
    spent = (after.total_s - before.total_s - (after.queue_s - before.queue_s)) / answers
    return [max(0.0, spent - handler), *stages, max(0.0, handler - sum(stage or 0.0 for stage in stages))]


def differences(new: Sequence[int], old: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(new, old, strict=True)]


def percent(part: float, whole: float) -> float | None:
    return rounded(100 * part / whole) if whole > 0 else None


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else rounded(1000 * max(0.0, seconds))


def rounded(value: float | None) -> float | None:
    """Three significant digits: more are noise in a chart."""
    return None if value is None else float(f"{value:.3g}")
