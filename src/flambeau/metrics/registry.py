"""Counters, gauges and histograms of one server, kept in one place and written out as Prometheus text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, str, str, float, list[tuple[str, str]]]  # name, kind, unit, value, dimensions
KINDS = ("counter", "gauge", "histogram")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


class Metric:
    """One named series per set of labels."""

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        self.name = name
        self.kind = kind
        self.help = help_text
        self.values: dict[Labels, float] = {}
        self.buckets: dict[Labels, list[int]] = {}

    def update(self, value: float, labels: Labels) -> None:
        """Count, set or observe a value, as the kind of metric says."""
        if self.kind == "gauge":
            self.values[labels] = value
        elif self.kind == "counter":
            self.values[labels] = self.values.get(labels, 0.0) + max(0.0, value)
        else:
            self.values[labels] = self.values.get(labels, 0.0) + value
            counts = self.buckets.setdefault(labels, [0] * (len(BUCKETS) + 1))
            counts[next((i for i, bound in enumerate(BUCKETS) if value <= bound), len(BUCKETS))] += 1

    def lines(self) -> Iterable[str]:
        """The exposition lines of this metric."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in sorted(self.values.items()):
            if self.kind != "histogram":
                yield f"{self.name}{braces(labels)} {value:.10g}"
                continue
            total = 0
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.buckets[labels], strict=True):
                total += count
                yield f"{self.name}_bucket{braces((*labels, ('le', bound)))} {total}"
            yield f"{self.name}_sum{braces(labels)} {value:.10g}"
            yield f"{self.name}_count{braces(labels)} {total}"


class Metrics:
    """All metrics that were pushed to the server."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Take samples that a handler measured."""
        for name, kind, unit, value, dimensions in samples:
            kind = kind if kind in KINDS else "gauge"
            self.metric(name, kind, f"Measured by a handler, in {unit}.").update(
                value, tuple((clean(key), text) for key, text in dimensions)
            )

    def metric(self, name: str, kind: str, help_text: str) -> Metric:
        """The metric of that name, made at its first use."""
        name = clean(name)
        found = self._metrics.get(name)
        if found is None:
            found = self._metrics[name] = Metric(name, kind, help_text)
        return found

    def text(self, extra: Iterable[Metric] = (), wanted: Collection[str] = ()) -> str:
        """The wanted metrics, or all, in Prometheus' exposition format."""
        metrics = sorted([*self._metrics.values(), *extra], key=lambda metric: metric.name)
        metrics = [metric for metric in metrics if not wanted or metric.name in wanted]
        return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def clean(name: str) -> str:
    """A name that Prometheus accepts."""
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    return f"_{name}" if name[:1].isdigit() else name


def braces(labels: Labels) -> str:
    """Labels as they stand behind a metric's name."""
    if not labels:
        return ""
    escaped = ((key, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for key, text in labels)
    return "{" + ",".join(f'{key}="{text}"' for key, text in escaped) + "}"
