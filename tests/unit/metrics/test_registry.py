from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from flambeau.metrics.definitions import Definition
from flambeau.metrics.registry import (
    BUCKETS,
    MAX_MODEL_SERIES,
    MAX_SERIES,
    MetricFamily,
    MetricsRegistry,
    to_open_metrics,
    to_text,
)
from support.log_records import logged

MODEL = [("ModelName", "m"), ("Level", "Model")]


def sample(name, kind="counter", value=1.0, dimensions=MODEL, unit="Count", ids=""):
    return (name, kind, unit, value, dimensions, ids)


@pytest.fixture
def metrics():
    server = {"Requests2XX": Definition("Requests2XX", "counter", "Count", ("Level", "Hostname"))}
    model = {"Hits": Definition("Hits", "counter", "Count", ("ModelName", "Level"))}
    return MetricsRegistry(server, model, hostname="h")


def test_a_line_is_what_torchserve_writes(metrics):
    metrics.take(sample("Hits", value=2))
    metrics.take(sample("Hits", value=1))
    assert to_text(metrics.all()).splitlines() == [
        "# HELP Hits Torchserve prometheus counter metric with unit: Count",
        "# TYPE Hits counter",
        'Hits{ModelName="m",Level="Model",Hostname="h",} 3.0',
        "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count",  # though it has no sample yet
        "# TYPE Requests2XX counter",
    ]


def test_labels_are_filled_by_position_and_must_be_as_many_as_the_metric_has(metrics, caplog):
    assert metrics.take(sample("Hits", dimensions=[("a", "x"), ("b", "y")]))
    assert 'Hits{ModelName="x",Level="y",Hostname="h",} 1.0' in to_text(metrics.all())
    for _ in range(3):
        assert metrics.take(sample("Hits", dimensions=[("a", "x")])) is None
    [(text,)] = logged(caplog, "flambeau.metrics.registry", "ERROR")  # only once
    assert all(name in text for name in ("Hits", "ModelName", "Level"))


def test_a_metric_that_is_not_named_is_dropped_unless_it_may_be_detected(metrics):
    assert metrics.take(sample("Other")) is None
    detecting = MetricsRegistry(hostname="h", auto_detect=True)
    assert detecting.take(sample("Other", "histogram", 0.3, unit="ms")) == Definition(
        "Other", "histogram", "ms", ("ModelName", "Level")
    )
    assert detecting.take(sample("Other", "gauge")) is None  # its first emission has defined it
    assert "# TYPE Other histogram" in to_text(detecting.all())


def test_histograms_have_the_default_buckets_in_order():
    metrics = MetricsRegistry(hostname="h", auto_detect=True)
    for value in (0.005, 0.3, 9999):
        metrics.take(sample("T", "histogram", value, dimensions=[]))
    lines = to_text(metrics.all()).splitlines()
    assert lines[2] == 'T_bucket{Hostname="h",le="0.005",} 1.0'
    assert [line for line in lines if 'le="0.5"' in line] == ['T_bucket{Hostname="h",le="0.5",} 2.0']
    assert lines[-3:] == [
        'T_bucket{Hostname="h",le="+Inf",} 3.0',
        'T_sum{Hostname="h",} 9999.305',
        'T_count{Hostname="h",} 3.0',
    ]
    assert len(lines) == 2 + len(BUCKETS) + 1 + 2


def test_prometheus_reads_it_back():
    metrics = MetricsRegistry(hostname='h"\\\n', auto_detect=True)
    metrics.take(sample("9 lives!", "gauge", math.inf, dimensions=[("a-b", 'q"\\x\ny')]))
    metrics.take(sample("n", "gauge", math.nan))
    metrics.take(sample("h", "histogram", 0.2))
    own = MetricFamily("own_total", "counter", "Ours.")
    own.update(12345678901234, (("model", "m"),))
    families = {family.name: family for family in text_string_to_metric_families(to_text([*metrics.all(), own]))}
    (read,) = families["_9_lives_"].samples
    assert read.labels == {"a_b": 'q"\\x\ny', "Hostname": 'h"\\\n'}
    assert read.value == math.inf
    assert math.isnan(families["n"].samples[0].value)
    assert families["h"].type == "histogram"
    assert families["own"].samples[0].value == 12345678901234


def test_only_the_wanted_names_are_shown(metrics):
    metrics = MetricsRegistry(hostname="h", auto_detect=True)
    metrics.take(sample("a", "histogram", 1))
    metrics.take(sample("b"))
    text = to_text(metrics.all(), {"a_sum", "b"})
    assert [line.partition("{")[0] for line in text.splitlines() if line[0] != "#"] == ["a_sum", "b"]
    assert "# TYPE a histogram" in text
    assert to_text(metrics.all(), {"nothing"}) == ""


def test_the_number_of_detected_metrics_is_limited(caplog):
    metrics = MetricsRegistry(hostname="h", auto_detect=True)
    taken = [metrics.take(sample(f"n{number}")) for number in range(1500)]
    assert [one is not None for one in taken] == [True] * 1000 + [False] * 500
    assert metrics.take(sample("n7")) is not None
    assert len([*metrics.all()]) == 1000
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.args == (1000, "n1000")


def test_the_number_of_series_is_limited(caplog):
    metrics = MetricsRegistry(hostname="h", auto_detect=True)
    for number in range(MAX_MODEL_SERIES + 10):
        metrics.take(sample(f"c{number % 3}", dimensions=[("id", str(number))]), "noisy")
    assert to_text(metrics.all()).count("Hostname") == MAX_MODEL_SERIES
    assert metrics.take(sample("c1", dimensions=[("id", "1")]), "noisy")  # known ones are counted on
    assert metrics.take(sample("c1", dimensions=[("id", "new")]), "other")  # and other models are not concerned
    [(text,)] = logged(caplog, "flambeau.metrics.registry", "ERROR")
    assert "noisy" in text


def test_the_number_of_series_of_one_metric_is_limited(caplog):
    metrics = MetricsRegistry(hostname="h", auto_detect=True)
    for number in range(MAX_SERIES + 10):
        metrics.take(sample("c", dimensions=[("id", str(number))]), f"m{number // 1000}")
    assert to_text(metrics.all()).count("\n") == MAX_SERIES + 2
    [(text,)] = logged(caplog, "flambeau.metrics.registry", "ERROR")
    assert str(MAX_SERIES) in text


@pytest.mark.parametrize(
    "given",
    [
        sample("n" * 300),
        sample("n", unit="u" * 300),
        sample("n", dimensions=[("d" * 300, "x")]),
        sample("n", dimensions=[("d", "x" * 300)]),
        sample("n", dimensions=[(f"d{number}", "x") for number in range(30)]),
    ],
)
def test_long_names_and_labels_are_dropped_with_one_line_in_the_log(given, caplog):
    metrics = MetricsRegistry(hostname="h", auto_detect=True)
    assert [metrics.take(given, "m") for _ in range(3)] == [None] * 3
    assert len(logged(caplog, "flambeau.metrics.registry", "ERROR")) == 1
    assert len(to_text(metrics.all())) < 300


@given(st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=3), st.text(min_size=1))
def test_whatever_a_handler_prints_prometheus_can_read(dimensions, name):
    metrics = MetricsRegistry(hostname="h", auto_detect=True)
    metrics.take(sample(name, dimensions=dimensions), "m")
    for family in text_string_to_metric_families(to_text(metrics.all())):
        assert family.samples


def test_metric_of_a_handler_that_the_file_does_not_define_is_named_once(metrics, caplog):
    for _ in range(3):
        assert metrics.take(sample("Faces"), "m") is None
        assert metrics.take(sample("HandlerTime", "gauge"), "m") is None  # a built-in one may be left out
    assert logged(caplog, "flambeau.metrics.registry") == [("Faces", "m", "model_metrics_auto_detect")]


# ---- OpenMetrics ----


def test_open_metrics_have_exemplars_and_an_end():
    family = MetricFamily("wait_seconds", "histogram", 'A "wait".', (1.0, 2.0))
    labels = (("model", "m"),)
    family.update(1.5, labels)
    family.exemplars[labels] = {1: ((("trace_id", "abc"),), 1.5, 1700000000.0)}
    text = to_open_metrics([family])
    assert 'wait_seconds_bucket{model="m",le="2.0"} 1 # {trace_id="abc"} 1.5 1700000000.000\n' in text
    [parsed] = parse_open_metrics(text)
    exemplars = [sample.exemplar for sample in parsed.samples if sample.exemplar]
    assert [(found.labels, found.value) for found in exemplars] == [({"trace_id": "abc"}, 1.5)]
    assert parsed.documentation == 'A "wait".'


def test_counter_of_another_name_has_an_unknown_type_in_open_metrics():
    old, new = MetricFamily("Requests2XX", "counter", "Old."), MetricFamily("requests_total", "counter", "New.")
    old.update(1, ())
    new.update(2, ())
    kinds = {family.name: family.type for family in parse_open_metrics(to_open_metrics([old, new]))}
    assert kinds == {"Requests2XX": "unknown", "requests": "counter"}
