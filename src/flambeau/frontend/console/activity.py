"""Activity: what each model did in the last seconds, from counters that grow. Without effects; time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flambeau.metrics.traffic import SECONDS
from flambeau.serving.model import Model

KEPT = 300  # samples of each model
WINDOW = 10  # samples that a rate or percentile is taken from
FIELDS = ("requests", "errors", "p50", "p95", "p99", "queue", "handler", "batch", "waiting", "tokens")

Key = tuple[str, str]  # name and version


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters of a model at one moment."""

    at: float
    answers: int
    errors: int
    times: tuple[int, ...]  # answers by SECONDS
    queue_s: float
    handler_s: float
    num_batches: int
    num_batched: float
    waiting: int
    tokens: float

    @classmethod
    def of(cls, model: Model, tokens: float, now: float) -> Totals:
        traffic = model.traffic
        by_class = [*traffic.by_class.items()]
        times = [sum(counts) for counts in zip(*(histogram.counts for _, histogram in by_class), strict=True)]
        return cls(
            at=now,
            answers=sum(times),
            errors=sum(sum(histogram.counts) for digit, histogram in by_class if digit >= 4),
            times=tuple(times) or (0,) * (len(SECONDS) + 1),
            queue_s=traffic.queue.total,
            handler_s=traffic.handler_s,
            num_batches=sum(traffic.batch_sizes.counts),
            num_batched=traffic.batch_sizes.total,
            waiting=model.num_waiting,
            tokens=tokens,
        )


class Activity:
    """Samples of every model, one for each call of `add`."""

    def __init__(self) -> None:
        self._totals: dict[Key, deque[Totals]] = {}
        self._samples: dict[Key, deque[list[float | None]]] = {}

    def add(self, models: Iterable[Model], tokens: Mapping[str, float], now: float) -> None:
        """Take a sample of each model; `tokens` are those generated so far, by name."""
        present: set[Key] = set()
        for model in models:
            key = (model.name, model.version)
            present.add(key)
            totals = self._totals.setdefault(key, deque(maxlen=WINDOW + 1))
            totals.append(Totals.of(model, tokens.get(model.name, 0.0), now))
            samples = self._samples.setdefault(key, deque(maxlen=KEPT))
            samples.append(rates(totals[max(0, len(totals) - 2)], totals[-1]))
        for key in self._totals.keys() - present:
            del self._totals[key], self._samples[key]

    def recent(self, key: Key) -> dict[str, float | None]:
        """The rates and percentiles of the last WINDOW samples."""
        totals = self._totals.get(key)
        return dict(zip(FIELDS, rates(totals[0], totals[-1]), strict=True)) if totals else {}

    def latest(self, key: Key) -> list[float | None]:
        """The newest sample, in the order of FIELDS."""
        samples = self._samples.get(key)
        return samples[-1] if samples else [None] * len(FIELDS)

    def history(self, key: Key) -> list[list[float | None]]:
        """All samples, the oldest first."""
        return [*self._samples.get(key, ())]


def rates(before: Totals, after: Totals) -> list[float | None]:
    """What happened between two moments, in the order of FIELDS: per second, in milliseconds, or None."""
    seconds = after.at - before.at
    answers = after.answers - before.answers
    batches = after.num_batches - before.num_batches
    times = [new - old for new, old in zip(after.times, before.times, strict=True)]
    return [
        rounded(answers / seconds) if seconds > 0 else 0.0,
        rounded((after.errors - before.errors) / seconds) if seconds > 0 else 0.0,
        *(milliseconds(percentile(times, share)) for share in (0.5, 0.95, 0.99)),
        milliseconds((after.queue_s - before.queue_s) / answers) if answers else None,
        milliseconds((after.handler_s - before.handler_s) / batches) if batches else None,
        rounded((after.num_batched - before.num_batched) / batches) if batches else None,
        float(after.waiting),
        rounded((after.tokens - before.tokens) / seconds) if seconds > 0 else 0.0,
    ]


def percentile(counts: Sequence[int], share: float) -> float | None:
    """A percentile in seconds from counts by SECONDS, linear inside a bucket; None without a count."""
    total = sum(counts)
    if not total:
        return None
    wanted, seen = share * total, 0
    for number, count in enumerate(counts):
        if count and seen + count >= wanted:
            low = SECONDS[number - 1] if number else 0.0
            high = SECONDS[min(number, len(SECONDS) - 1)]
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return SECONDS[-1]


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else rounded(1000 * seconds)


def rounded(value: float) -> float:
    """Three significant digits: more are noise in a chart."""
    return float(f"{value:.3g}")
