"""MetricsRegistry: the counters, gauges and histograms of a server, written as Prometheus text."""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping

from flambeau.metrics.definitions import KINDS, Definition, Sample, read_definitions
from flambeau.metrics.traffic import Exemplar

logger = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]
# The defaults of Prometheus' Java client, which existing dashboards expect.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
MAX_SERIES = 10_000  # per metric, so that labels that never repeat cannot exhaust the memory
MAX_MODEL_SERIES = 2000  # of the handlers of one model, all metrics together
MAX_DETECTED = 1000  # the same for metric names that a handler generates
MAX_LABELS = 20  # of a metric that a handler generates
MAX_LABEL_CHARACTERS = 250  # of a name, unit, or label
OPEN_METRICS_END = "# EOF\n"


class MetricFamily:
    """A metric with one series per set of labels."""

    def __init__(self, name: str, kind: str, help_text: str, buckets: tuple[float, ...] = BUCKETS) -> None:
        self.name = name
        self.kind = kind
        self.help = help_text
        self.bounds = buckets
        self.values: dict[Labels, float] = {}
        self.buckets: dict[Labels, list[int]] = {}
        self.exemplars: dict[Labels, dict[int, Exemplar]] = {}

    def update(self, value: float, labels: Labels) -> None:
        """Add, set or observe a value, depending on the kind."""
        if labels not in self.values and len(self.values) >= MAX_SERIES:
            return
        if self.kind == "gauge":
            self.values[labels] = value
        elif self.kind == "counter":
            self.values[labels] = self.values.get(labels, 0.0) + max(0.0, value)
        else:
            self.values[labels] = self.values.get(labels, 0.0) + value
            counts = self.buckets.setdefault(labels, [0] * (len(self.bounds) + 1))
            counts[bisect_left(self.bounds, value)] += 1

    def lines(self, wanted: Collection[str] = ()) -> Iterable[str]:
        """The exposition lines; `wanted` limits them to samples of these names, or to this whole metric."""
        every = not wanted or self.name in wanted
        samples = [f"{name}{rest}" for name, rest in self._samples() if every or name in wanted]
        if samples or every:
            yield f"# HELP {self.name} {self.help}"
            yield f"# TYPE {self.name} {self.kind}"
            yield from samples

    def _samples(self) -> Iterable[tuple[str, str]]:
        for labels, value in sorted(self.values.items()):
            if self.kind != "histogram":
                yield self.name, f"{self.braces(labels)} {self.number(value)}"
                continue
            total = 0
            for bound, count in zip((*map(str, self.bounds), "+Inf"), self.buckets[labels], strict=True):
                total += count
                yield f"{self.name}_bucket", f"{self.braces((*labels, ('le', bound)))} {self.number(total)}"
            yield f"{self.name}_sum", f"{self.braces(labels)} {self.number(value)}"
            yield f"{self.name}_count", f"{self.braces(labels)} {self.number(total)}"

    def open_lines(self, wanted: Collection[str] = ()) -> Iterable[str]:
        """The same in the format of OpenMetrics, with exemplars. There a counter's samples must end with `_total`."""
        every = not wanted or self.name in wanted
        has_suffix = self.kind != "counter" or self.name.endswith("_total")
        samples = [f"{name}{rest}" for name, rest in self._open_samples() if every or name in wanted]
        if samples or every:
            name = self.name.removesuffix("_total") if self.kind == "counter" else self.name
            yield f"# HELP {name} {escaped(self.help)}"
            yield f"# TYPE {name} {self.kind if has_suffix else 'unknown'}"
            yield from samples

    def _open_samples(self) -> Iterable[tuple[str, str]]:
        for labels, value in sorted(self.values.items()):
            if self.kind != "histogram":
                yield self.name, f"{in_braces(labels)} {self.number(value)}"
                continue
            total, exemplars = 0, self.exemplars.get(labels, {})
            bounds = (*map(str, self.bounds), "+Inf")
            for i, (bound, count) in enumerate(zip(bounds, self.buckets[labels], strict=True)):
                total += count
                text = f"{in_braces((*labels, ('le', bound)))} {self.number(total)}"
                if exemplar := exemplars.get(i):
                    text += f" # {in_braces(exemplar[0])} {plain(exemplar[1])} {exemplar[2]:.3f}"
                yield f"{self.name}_bucket", text
            yield f"{self.name}_sum", f"{in_braces(labels)} {self.number(value)}"
            yield f"{self.name}_count", f"{in_braces(labels)} {self.number(total)}"

    def braces(self, labels: Labels) -> str:
        return in_braces(labels)

    def number(self, value: float) -> str:
        return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else plain(value)


class DefinedMetric(MetricFamily):
    """A metric from a metrics.yaml or a handler, in the exact text that existing scrapers match."""

    def __init__(self, definition: Definition, *more: str) -> None:
        help_text = f"Torchserve prometheus {definition.kind} metric with unit: {definition.unit}"
        super().__init__(clean(definition.name), definition.kind, help_text.replace("\n", " "))
        self.definition = definition
        self.label_names = tuple(clean_label(name) for name in (*definition.dimensions, *more))

    def add(self, value: float, label_values: Iterable[str]) -> bool:
        """Record a value with labels by position; False if their number is wrong."""
        labels = self.to_labels(label_values)
        if labels is not None:
            self.update(value, labels)
        return labels is not None

    def to_labels(self, label_values: Iterable[str]) -> Labels | None:
        """Labels by position; None if their number is wrong."""
        filled = tuple(label_values)
        return tuple(zip(self.label_names, filled, strict=True)) if len(filled) == len(self.label_names) else None

    def braces(self, labels: Labels) -> str:
        # Existing scripts match lines with the trailing comma.
        return "{" + "".join(f"{pair}," for pair in pairs(labels)) + "}" if labels else ""

    def number(self, value: float) -> str:
        return plain(value)


class MetricsRegistry:
    """The metrics that the configuration defines, and those that handlers add."""

    def __init__(
        self,
        server: Mapping[str, Definition] | None = None,
        model: Mapping[str, Definition] | None = None,
        *,
        hostname: str = "",
        auto_detect: bool = False,
    ) -> None:
        self._hostname = hostname
        self._auto_detect = auto_detect
        self._server = {name: DefinedMetric(one) for name, one in (server or {}).items()}
        self._model = {name: DefinedMetric(one, "Hostname") for name, one in (model or {}).items()}
        self._reported: set[str] = set()
        self._undefined: set[str] = set()
        self._num_detected = 0  # metrics without a definition
        self._num_series: dict[str, int] = {}  # by model

    def server_metric(self, name: str, kind: str) -> DefinedMetric | None:
        """One of the server's metrics; None if the configuration omits it."""
        found = self._server.get(name)
        return found if found is not None and found.kind == kind else None

    def take(self, sample: Sample, model: str = "") -> Definition | None:
        """Record a sample of a model's handler; return its definition, or None if it was dropped."""
        name, kind, unit, value, dimensions, _ = sample
        metric = self._model.get(name)
        if metric is None:
            if not self._auto_detect or kind not in KINDS:
                self._report_undefined(name, model)
                return None
            metric = self._detect(Definition(name, kind, unit, tuple(key for key, _ in dimensions)))
            if metric is None:
                return None
        if metric.kind != kind:
            self._report(name, f"metric {name} is a {metric.kind}; a sample of kind {kind} was dropped")
            return None
        labels = metric.to_labels((*(text for _, text in dimensions), self._hostname))
        if labels is None:
            wanted = ", ".join(metric.definition.dimensions)
            given = ", ".join(key for key, _ in dimensions)
            self._report(name, f"metric {name} has the dimensions ({wanted}); a sample with ({given}) was dropped")
            return None
        if labels not in metric.values and not self._admits(metric, labels, model):
            return None
        metric.update(value, labels)
        return metric.definition

    def _admits(self, metric: DefinedMetric, labels: Labels, model: str) -> bool:
        """Whether a handler may add a series; each reason for a rejection is logged once."""
        name, number = metric.definition.name, self._num_series.get(model, 0)
        if any(len(text) > MAX_LABEL_CHARACTERS for _, text in labels):
            text = f"metric {name} has a label of more than {MAX_LABEL_CHARACTERS} characters; the sample was dropped"
            self._report(f"{name} length", text)
        elif number >= MAX_MODEL_SERIES:
            text = f"the handlers of {model} have sent {number} series of metrics; new ones are dropped"
            self._report(f"{model} number", f"{text}. A label must not be different in every request")
        elif len(metric.values) >= MAX_SERIES:
            self._report(f"{name} number", f"metric {name} has {MAX_SERIES} series; new ones are dropped")
        else:
            self._num_series[model] = number + 1
            return True
        return False

    def _detect(self, definition: Definition) -> DefinedMetric | None:
        texts = (definition.name, definition.unit, *definition.dimensions)
        if len(texts) > MAX_LABELS + 2 or any(len(text) > MAX_LABEL_CHARACTERS for text in texts):
            limits = f"{MAX_LABELS} labels and names of {MAX_LABEL_CHARACTERS} characters are allowed"
            self._report("", f"metric {definition.name[:100]} is dropped, and others like it: {limits}")
            return None
        labels = [*map(clean_label, definition.dimensions), "Hostname", "le"]
        if len({*labels}) < len(labels):  # Prometheus would reject the whole text
            self._report("le", f"metric {definition.name} is dropped, and others like it: two labels have one name")
            return None
        self._num_detected += 1
        if self._num_detected > MAX_DETECTED:
            if self._num_detected == MAX_DETECTED + 1:
                logger.warning("%d metrics were detected; %s and later ones are dropped", MAX_DETECTED, definition.name)
            return None
        metric = self._model[definition.name] = DefinedMetric(definition, "Hostname")
        logger.info("Registering auto detected backend metric: %s", definition.name)
        return metric

    def _report_undefined(self, name: str, model: str) -> None:
        """Log once for each metric of a handler; built-in ones may be left out of a metrics.yaml on purpose."""
        if name in self._undefined or len(self._undefined) >= MAX_DETECTED:
            return
        self._undefined.add(name)
        if name not in read_definitions(None).model:
            text = "metric %s of model %s is dropped: metrics.yaml does not define it; add it, or set %s=true"
            logger.warning(text, name[:MAX_LABEL_CHARACTERS], model, "model_metrics_auto_detect")

    def _report(self, name: str, text: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            logger.error("%s", text)

    def all(self) -> Iterable[MetricFamily]:
        """Every metric, including those without samples."""
        return [*self._server.values(), *self._model.values()]


def to_text(metrics: Iterable[MetricFamily], wanted: Collection[str] = ()) -> str:
    """The wanted metrics, or all, in Prometheus' exposition format; of two with one name, the first."""
    by_name: dict[str, MetricFamily] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, metric)
    return "".join(f"{line}\n" for _, metric in sorted(by_name.items()) for line in metric.lines(wanted))


def to_open_metrics(metrics: Iterable[MetricFamily], wanted: Collection[str] = ()) -> str:
    """The wanted metrics, or all, in the format of OpenMetrics; of two with one name, the first."""
    by_name: dict[str, MetricFamily] = {}
    for metric in metrics:
        by_name.setdefault(metric.name.removesuffix("_total"), metric)
    lines = (line for _, metric in sorted(by_name.items()) for line in metric.open_lines(wanted))
    return "".join(f"{line}\n" for line in lines) + OPEN_METRICS_END


def plain(value: float) -> str:
    """A floating point number as text."""
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def in_braces(labels: Labels) -> str:
    return "{" + ",".join(pairs(labels)) + "}" if labels else ""


def escaped(text: str) -> str:
    """A help text, in which OpenMetrics escapes quotation marks too."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def pairs(labels: Labels) -> Iterable[str]:
    """Labels as `name="value"`, escaped."""
    for key, text in labels:
        escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        yield f'{key}="{escaped}"'


def clean(name: str) -> str:
    """A valid Prometheus metric name."""
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    return f"_{name}" if name[:1].isdigit() or not name else name


def clean_label(name: str) -> str:
    """A valid Prometheus label name; two underscores at its start are reserved."""
    return re.sub("^__+", "_", clean(name).replace(":", "_"))
