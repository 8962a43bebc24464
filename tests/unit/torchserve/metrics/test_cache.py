"""`context.metrics`, as handlers and their own tests use it."""

from __future__ import annotations

import copy
import json
import logging
from types import SimpleNamespace

import pytest

from flambeau.metrics.definitions import BUNDLED, Definition
from flambeau.torchserve.metrics.cache import WorkerMetrics
from ts.metrics import metric_cache_errors as errors
from ts.metrics.caching_metric import CachingMetric
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_abstract import MetricAbstract
from ts.metrics.metric_cache_abstract import MetricCacheAbstract
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.metrics.metric_encoder import MetricEncoder
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.metrics_store import MetricsStore
from ts.metrics.unit import Units

YAML = """
model_metrics:
  counter:
    - {name: Hits, unit: count, dimensions: [model_name]}
  gauge:
    - {name: Depth, unit: ms, dimensions: }
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "metrics.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture
def metrics(file, caplog):
    caplog.set_level(logging.INFO)
    found = MetricsCacheYamlImpl(str(file))
    found.initialize_cache()
    found.model_name = "m"
    return found


def test_the_file_names_metrics(metrics, file):
    assert isinstance(metrics, MetricCacheAbstract)
    assert metrics.config_file_path == str(file)
    assert metrics.cache_keys() == ["counter:Hits", "gauge:Depth"]
    assert metrics.store == []
    hits = metrics.get_metric("Hits")
    assert isinstance(hits, CachingMetric)
    assert isinstance(hits, MetricAbstract)
    assert (hits.metric_name, hits.unit, hits.dimension_names, hits.metric_type) == (
        *("Hits", "Count", ["model_name"], MetricTypes.COUNTER),
    )
    assert metrics.get_metric("Depth", MetricTypes.GAUGE).dimension_names == []


def test_outside_a_worker_measurements_are_log_lines(metrics, caplog):
    metrics.get_metric("Hits").add_or_update(4, ["bert"], "r-1")
    assert "[METRICS]Hits.Count:4|#model_name:bert|#type:COUNTER|#hostname:" in caplog.text
    assert caplog.messages[-1].endswith(",r-1")
    metrics.add_size("Size", 25, unit="GB", dimensions=[Dimension("ModelName", "x")])
    assert "[METRICS]Size.Gigabytes:25|#ModelName:x,Level:Error|#type:GAUGE" in caplog.text  # there is no request id
    metrics.set_request_ids({0: "r-0", 1: "r-1"})
    metrics.add_percent("Share", 11, 1)
    assert "[METRICS]Share.Percent:11|#ModelName:m,Level:Model|#type:GAUGE" in caplog.text
    assert caplog.messages[-1].endswith(",r-1")
    metrics.add_counter("All", 1)
    assert caplog.messages[-1].endswith(",r-0,r-1")
    metrics.add_error("Lost", 2)
    assert "[METRICS]Lost.unit:2|#Level:Error|#type:COUNTER" in caplog.text
    metrics.get_metric("Share", MetricTypes.GAUGE).update(22, "r-9", [Dimension("Other", "y")])
    assert "Overriding existing dimensions" in caplog.text
    assert "[METRICS]Share.Percent:22|#Other:y|" in caplog.text


def test_a_given_list_has_the_default_dimensions_too_but_no_other_call(metrics, caplog):
    mine = [Dimension("MethodName", "preprocess")]
    metrics.request_ids = {0: "r"}
    for _ in range(2):
        metrics.add_time("T", 1, dimensions=mine)
    assert [dimension.name for dimension in mine] == ["MethodName", "ModelName", "Level"]
    metrics.get_metric("T", MetricTypes.GAUGE).update(3, "r", mine)
    assert "[METRICS]T.Milliseconds:3|#MethodName:preprocess,ModelName:m,Level:Model|" in caplog.text
    metrics.add_time("U", 2)
    assert "[METRICS]U.Milliseconds:2|#ModelName:m,Level:Model|" in caplog.text


def test_invalid_values_are_logged_and_dropped(metrics, caplog):
    metrics.get_metric("Hits").add_or_update(-1, ["m"])
    metrics.get_metric("Hits").add_or_update(1, ["m", "n"])
    metrics.get_metric("Hits").add_or_update("much", ["m"])
    assert caplog.text.count("[METRICS]Failed to update metric with name:Hits and dimensions: ") == 3
    assert "with value: -1: Counter metric update value cannot be negative" in caplog.text
    assert "#type:" not in caplog.text


def test_errors_by_their_names(metrics, file, tmp_path):
    with pytest.raises(errors.MetricsCacheKeyError, match=r"'MetricTypes\.GAUGE' and name 'Hits' doesn't exist"):
        metrics.get_metric("Hits", MetricTypes.GAUGE)
    for call in (
        lambda: metrics.get_metric(None),
        lambda: metrics.get_metric("a", "gauge"),
        lambda: metrics.add_metric_to_cache(42, "ms"),
        lambda: metrics.add_metric_to_cache("a", ["ms"]),
        lambda: metrics.add_metric_to_cache("a", "ms", "ModelName"),
        lambda: metrics.add_metric_to_cache("a", "ms", metric_type={}),
        lambda: MetricsCacheYamlImpl(None),
        lambda: MetricsCacheYamlImpl(""),
    ):
        with pytest.raises(errors.MetricsCacheTypeError):
            call()
    with pytest.raises(errors.MetricsCacheValueError, match=r"one of \['ms', 's'\]"):
        metrics.add_time("t", 1, unit="h")
    with pytest.raises(ValueError, match=r"one of \['MB','kB', 'GB', 'B'\]"):
        metrics.add_size("t", 1, unit="TB")
    with pytest.raises(errors.MetricsCacheIOError, match="No such file"):
        MetricsCacheYamlImpl(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(errors.MetricsCachePyYamlError, match="Error parsing file"):
        MetricsCacheYamlImpl(tmp_path / "bad.yaml")
    (tmp_path / "empty.yaml").write_text("model_metrics:")
    with pytest.raises(errors.MetricsCacheValueError, match="Missing `model_metrics`"):
        MetricsCacheYamlImpl(tmp_path / "empty.yaml").initialize_cache()
    (tmp_path / "half.yaml").write_text("model_metrics: {gauge: [{name: a, dimensions: []}]}")
    with pytest.raises(errors.MetricsCacheKeyError, match="Key not found in cache spec: 'unit'"):
        MetricsCacheYamlImpl(tmp_path / "half.yaml").initialize_cache()
    (tmp_path / "kind.yaml").write_text("model_metrics: {sum: []}")
    with pytest.raises(errors.MetricsCacheKeyError, match="Invalid metric type"):
        MetricsCacheYamlImpl(tmp_path / "kind.yaml").initialize_cache()
    with pytest.raises(errors.MetricsCacheKeyError, match="'ts_metrics' key not found in yaml file"):
        MetricsCacheYamlImpl(file)._parse_metrics_section("ts_metrics")
    assert issubclass(errors.GeneralMetricsCacheError, Exception)


def requests(*ids):
    return [SimpleNamespace(request_id=one) for one in ids]


def test_in_a_worker_measurements_are_samples():
    worker = WorkerMetrics("m", str(BUNDLED), [Definition("HandlerTime", "gauge", "ms", ("ModelName", "Level"))])
    assert isinstance(worker, MetricsCacheYamlImpl)
    worker.add_counter("Loads", 1)
    [(name, kind, unit, value, dimensions, ids)] = worker.take()
    assert (name, kind, unit, value, dimensions) == (
        *("Loads", "counter", "Count", 1.0, [("ModelName", "m"), ("Level", "Model")]),
    )
    assert len(ids) == 36  # an id of no request: `initialize` has none
    worker.follow(requests("a", "b"))
    worker.add_time("HandlerTime", 1.5)
    worker.add_counter("Mine", 2, 1, [Dimension("Level", "Mine")])
    kept = worker.add_metric_to_cache("Kept", "MB", ["k"], MetricTypes.HISTOGRAM)
    kept.add_or_update(3, [7])
    assert worker.take() == [
        ("HandlerTime", "gauge", "Milliseconds", 1.5, [("ModelName", "m"), ("Level", "Model")], "a,b"),
        ("Mine", "counter", "Count", 2.0, [("Level", "Mine"), ("ModelName", "m")], "b"),
        ("Kept", "histogram", "Megabytes", 3.0, [("k", "7")], ""),
    ]
    assert worker.take() == []


def test_batches_that_run_beside_each_other_measure_for_their_own_requests():
    first = WorkerMetrics("m")
    second = copy.copy(first)
    first.follow(requests("a"))
    second.follow(requests("b"))
    first.add_counter("c", 1)
    second.add_counter("c", 1)
    assert [sample[5] for sample in first.take()] == ["a", "b"]


def test_the_old_store(caplog):
    caplog.set_level(logging.INFO)
    store = MetricsStore({0: "abc", 1: "xyz"}, "old model")
    store.add_counter("Seen", 1, 1)
    store.add_counter("Seen", 1, 1)
    metric = store.cache["Seen-count-xyz-ModelName:old model-Level:Model"]
    assert (metric.name, metric.value, metric.unit, metric.request_id) == ("Seen", 1, "Count", "xyz")
    assert "[METRICS]Seen.Count:1|#ModelName:old model,Level:Model" in caplog.text  # the second one is recorded
    store.add_time("Took", 20)
    assert store.cache["Took-ms-abc,xyz-ModelName:old model-Level:Model"].unit == "Milliseconds"
    store.add_size("Big", 10, 0, "kB", [Dimension("a", "b")])
    store.add_percent("Share", 50.0)
    store.add_metric("Any", 1, "furlong")
    store.add_error("Failed", "a text")
    assert store.cache["Failed--None-Level:Error"].value == "a text"
    assert [one.name for one in store.store] == ["Seen", "Took", "Big", "Share", "Any", "Failed"]
    with pytest.raises(ValueError, match="one of"):
        store.add_time("Took", 1, unit="ns")
    with pytest.raises(ValueError, match="one of"):
        store.add_size("Big", 1, unit="TB")
    with pytest.raises(ValueError, match="list of dimensions"):
        store.add_counter("Seen", 1, dimensions="x")


def test_metrics_as_text_and_json(caplog):
    caplog.set_level(logging.INFO)
    metric = Metric("Seen", 3, "count", [Dimension("Level", "Host")], "r-1")
    assert str(metric).startswith("Seen.Count:3|#Level:Host|#hostname:")
    assert str(metric).endswith(",r-1")
    read = json.loads(json.dumps(metric, cls=MetricEncoder))
    assert read["MetricName"] == "Seen"
    assert read["Dimensions"] == [{"Name": "Level", "Value": "Host"}]
    metric.update(4)
    metric.reset()
    assert metric.value == 3  # as in TorchServe 0.12, values are recorded and not kept
    assert ["Seen.Count:4|" in caplog.text, "Seen.Count:0|" in caplog.text] == [True, True]
    assert Units().units["kB"] == "Kilobytes"
    assert str(Dimension("a", 1)) == "a:1"
