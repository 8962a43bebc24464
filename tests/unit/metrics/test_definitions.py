from __future__ import annotations

import pytest

from flambeau.errors import ConfigError
from flambeau.metrics.definitions import Definition, parse_definitions, read_definitions

SERVER = "Requests2XX Requests4XX Requests5XX ts_inference_requests_total ts_inference_latency_microseconds"
SERVER += " ts_queue_latency_microseconds QueueTime WorkerThreadTime WorkerLoadTime CPUUtilization MemoryUsed"
SERVER += " MemoryAvailable MemoryUtilization DiskUsage DiskUtilization DiskAvailable GPUMemoryUtilization"
SERVER += " GPUMemoryUsed GPUUtilization"
GENERATION = "PromptTokens CachedPromptTokens GeneratedTokens DraftedTokens AcceptedTokens DraftAcceptance"
GENERATION += " TimeToFirstToken TokensPerSecond"  # ours


def test_the_bundled_file_names_torchserves_metrics():
    found = read_definitions(None)
    assert [*found.server] == SERVER.split()
    assert {"HandlerTime", "PredictionTime"} <= found.model.keys()
    assert found.model.keys() - {"HandlerTime", "PredictionTime"} == set(GENERATION.split())
    assert found.server["WorkerLoadTime"] == Definition(
        "WorkerLoadTime", "gauge", "Milliseconds", ("WorkerName", "Level", "Hostname")
    )
    assert found.server["GPUMemoryUsed"].dimensions == ("Level", "DeviceId", "Hostname")
    assert found.model["HandlerTime"] == Definition("HandlerTime", "gauge", "ms", ("ModelName", "Level"))


def test_anchors_and_empty_dimensions():
    found = parse_definitions(
        "dimensions: [&m ModelName]\nmodel_metrics:\n  counter:\n"
        "    - {name: a, unit: Count, dimensions: [*m, Level]}\n    - {name: b, unit: ms, dimensions: }\n"
    )
    assert found.server == {}
    assert found.model["a"].dimensions == ("ModelName", "Level")
    assert found.model["b"].dimensions == ()


MODEL = "model_metrics:\n  gauge:\n    - {name: a, unit: ms, dimensions: []}\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "sections ts_metrics and model_metrics"),
        ("ts_metrics: {}", "model_metrics is missing or empty"),
        ("model_metrics:", "model_metrics is missing or empty"),
        ("model_metrics: [a]", "model_metrics must hold counter"),
        ("model_metrics: {summary: []}", "'summary', which is not a kind of metric"),
        ("model_metrics: {gauge: {name: a}}", "model_metrics.gauge must be a list"),
        ("model_metrics: {gauge: [a]}", r"model_metrics.gauge\[0\] is not a metric"),
        ("model_metrics: {gauge: [{name: '', unit: ms, dimensions: []}]}", "name is missing or empty"),
        ("model_metrics: {gauge: [{name: a, dimensions: []}]}", "unit is missing or empty"),
        ("model_metrics: {gauge: [{name: a, unit: ms}]}", "dimensions is missing"),
        ("model_metrics: {gauge: [{name: a, unit: ms, dimensions: [1]}]}", "must be a list of names"),
        (MODEL + "ts_metrics: {counter: [{name: a}]}", r"ts_metrics.counter\[0\]: unit"),
    ],
)
def test_errors_name_their_place(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_definitions(text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_definitions(tmp_path / "none.yaml")
