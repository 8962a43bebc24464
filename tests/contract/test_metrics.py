"""Metrics as dashboards, scrapers and scripts know them from TorchServe."""

from __future__ import annotations

import re
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.snippets import snippets

HOST = re.escape(socket.gethostname())
LEGACY = ["ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"]
YAML = """
dimensions: [&model ModelName, &level Level]
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [Stufe, Rechner]}
    - {name: ts_inference_requests_total, unit: Count, dimensions: [model_name, model_version, hostname]}
model_metrics:
  counter:
    - {name: RequestCount, unit: Count, dimensions: [*model, *level]}
  gauge:
    - {name: StageTime, unit: ms, dimensions: [Stage, *model, *level]}
    - {name: PredictionTime, unit: ms, dimensions: [*model, *level]}
"""


def scrape(server, query=""):
    reply = server.request("GET", f"/metrics{query}", port=server.metrics_port)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return reply.text


def test_default_metrics_have_torchserves_names_labels_and_form(start):
    server = start("measuring.py", "--name", "m").wait_ready()
    assert server.predict("m", b"x").status == 200
    assert server.predict("m", b"x", version="1.0").status == 200
    assert server.predict("nobody", b"x").status == 404
    server.until(lambda: "CPUUtilization{" in scrape(server))
    text = scrape(server)
    number = r"\d+\.\d+(e-\d+)?"
    for pattern in (
        rf'Requests2XX{{Level="Host",Hostname="{HOST}",}} {number}',
        rf'Requests4XX{{Level="Host",Hostname="{HOST}",}} 1\.0',
        rf'ts_inference_requests_total{{model_name="m",model_version="default",hostname="{HOST}",}} 1\.0',
        rf'ts_inference_requests_total{{model_name="m",model_version="1.0",hostname="{HOST}",}} 1\.0',
        rf'ts_inference_latency_microseconds{{model_name="m",model_version="default",hostname="{HOST}",}} {number}',
        rf'ts_queue_latency_microseconds{{model_name="m",model_version="1.0",hostname="{HOST}",}} {number}',
        rf'QueueTime{{Level="Host",Hostname="{HOST}",}} {number}',
        rf'WorkerThreadTime{{Level="Host",Hostname="{HOST}",}} {number}',
        rf'WorkerLoadTime{{WorkerName="W-9000-m_1.0",Level="Host",Hostname="{HOST}",}} {number}',
        rf'CPUUtilization{{Level="Host",Hostname="{HOST}",}} {number}',
        rf'MemoryUsed{{Level="Host",Hostname="{HOST}",}} {number}',
        rf'DiskAvailable{{Level="Host",Hostname="{HOST}",}} {number}',
        rf'PredictionTime{{ModelName="m",Level="Model",Hostname="{HOST}",}} {number}',
        rf'RequestCount{{ModelName="m",Level="Model",Hostname="{HOST}",}} 2\.0',
        rf'InitializeCount{{ModelName="m",Level="Model",Hostname="{HOST}",}} 1\.0',
        rf'StageTime{{Stage="one",ModelName="m",Level="Model",Hostname="{HOST}",}} 2\.5',
        rf'KeptSize_count{{ModelName="m",Hostname="{HOST}",}} 2\.0',
        rf'PrintedTime{{Level="Model",Hostname="{HOST}",}} 12\.0',
        "# HELP HandlerTime Torchserve prometheus gauge metric with unit: ms",
        "# TYPE GPUUtilization gauge",
    ):
        assert len(re.findall(f"^{pattern}$", text, re.MULTILINE)) == 1, pattern


def test_what_is_shown_is_valid_and_has_histograms_of_our_own(start):
    server = start("measuring.py", "--name", "m").wait_ready()
    for _ in range(3):
        assert server.predict("m", b"x").status == 200
    families = {family.name: family for family in text_string_to_metric_families(scrape(server))}
    for name, count in (("flambeau_request_seconds", 3), ("flambeau_queue_seconds", 3), ("flambeau_batch_size", 3)):
        assert families[name].type == "histogram"
        counted = [one for one in families[name].samples if one.name == f"{name}_count"]
        assert sum(one.value for one in counted) == count
    request = next(one for one in families["flambeau_request_seconds"].samples)
    assert {"model": "m", "version": "1.0", "status": "2xx"}.items() <= request.labels.items()
    times = {one.name: one.value for one in families["flambeau_request_seconds"].samples if "le" not in one.labels}
    micros = next(one.value for one in families["ts_inference_latency_microseconds"].samples)
    assert times["flambeau_request_seconds_sum"] * 1e6 == pytest.approx(micros, rel=0.01)


def test_the_filter_restricts_what_is_shown(start):
    server = start("measuring.py", "--name", "m").wait_ready()
    server.predict("m", b"x")
    text = scrape(server, "?name[]=Requests2XX&name%5B%5D=KeptSize_sum")
    assert {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")} == {
        *("Requests2XX", "KeptSize_sum"),
    }


def test_a_file_of_the_operators_decides_what_there_is(start, tmp_path):
    (tmp_path / "metrics.yaml").write_text(YAML)
    folder = tmp_path / "logs"
    words = ("--metrics-config", tmp_path / "metrics.yaml", "--metrics-mode", "both", "--log-folder", folder)
    server = start("measuring.py", "--name", "m", *words).wait_ready()
    assert server.predict("m", b"x").status == 200
    text = scrape(server)
    assert re.search(rf'^Requests2XX{{Stufe="Host",Rechner="{HOST}",}} ', text, re.MULTILINE)
    assert "Requests4XX" not in text
    assert "QueueTime" not in text
    assert "WorkerLoadTime" not in (folder / "ts_metrics.log").read_text()


def test_a_broken_file_is_a_clear_error(start, tmp_path):
    (tmp_path / "metrics.yaml").write_text("model_metrics: {gauge: [{name: a}]}")
    server = start("measuring.py", "--metrics-config", tmp_path / "metrics.yaml")
    assert server.process.wait(60) == 1
    assert "model_metrics.gauge[0]: unit is missing or empty" in server.log


def lines_of(folder, name):
    return (folder / name).read_text().splitlines()


def test_log_mode_writes_lines_and_shows_nothing(start, tmp_path):
    folder = tmp_path / "logs"
    server = start("measuring.py", "--name", "m", "--metrics-mode", "log", "--log-folder", folder).wait_ready()
    request_id = server.predict("m", b"x").headers["x-request-id"]
    assert scrape(server) == ""
    wanted = [*LEGACY, "QueueTime", "WorkerThreadTime", "WorkerLoadTime", "Requests2XX", "MemoryUsed"]
    server.until(lambda: all(name in (folder / "ts_metrics.log").read_text() for name in wanted))
    server.until(lambda: "PredictionTime" in (folder / "model_metrics.log").read_text())
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - "
    server_lines = "\n".join(lines_of(folder, "ts_metrics.log"))
    for pattern in (
        rf"Requests2XX\.Count:1\.0\|#Level:Host\|#hostname:{HOST},timestamp:\d+",
        rf"ts_inference_requests_total\.Count:1\.0\|#model_name:m,model_version:default\|#hostname:{HOST},timestamp:\d+",
        rf"QueueTime\.Milliseconds:[\d.]+\|#Level:Host\|#hostname:{HOST},timestamp:\d+",
        rf"WorkerLoadTime\.Milliseconds:\d+\.0\|#WorkerName:W-9000-m_1\.0,Level:Host\|#hostname:{HOST},timestamp:\d+",
    ):
        assert re.search(f"^{time}{pattern}$", server_lines, re.MULTILINE), pattern
    model_lines = "\n".join(lines_of(folder, "model_metrics.log"))
    for pattern in (
        rf"PredictionTime\.ms:[\d.]+\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:{request_id},timestamp:\d+",
        rf"StageTime\.Milliseconds:2\.5\|#Stage:one,ModelName:m,Level:Model\|#hostname:{HOST},requestID:{request_id},.*",
        rf"InitializeCount\.Count:1\.0\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:[\w-]{{36}},.*",
        rf"PrintedTime\.ms:12\.0\|#Level:Model\|#hostname:{HOST},requestID:some-id,timestamp:\d+",
    ):
        assert re.search(f"^{time}{pattern}$", model_lines, re.MULTILINE), pattern


def test_prometheus_mode_leaves_the_two_files_empty(start, tmp_path):
    folder = tmp_path / "logs"
    server = start("measuring.py", "--name", "m", "--log-folder", folder).wait_ready()
    server.predict("m", b"x")
    server.stop()
    assert lines_of(folder, "ts_metrics.log") == lines_of(folder, "model_metrics.log") == []


def test_legacy_mode_splits_them(start, tmp_path):
    folder = tmp_path / "logs"
    server = start("measuring.py", "--name", "m", "--metrics-mode", "legacy", "--log-folder", folder).wait_ready()
    server.predict("m", b"x")
    shown = {line.split("{")[0] for line in scrape(server).splitlines() if not line.startswith("#")}
    assert shown == {*LEGACY}
    server.stop()
    logged = (folder / "ts_metrics.log").read_text()
    assert "QueueTime.Milliseconds" in logged
    assert not any(name in logged for name in LEGACY)
    assert "PredictionTime" in (folder / "model_metrics.log").read_text()


def test_the_documented_handler_and_file_go_together(start, tmp_path):
    [handler] = snippets("docs/metrics-and-logs.md", "python")
    [file] = snippets("docs/metrics-and-logs.md", "yaml")
    (tmp_path / "documented.py").write_text(handler)
    (tmp_path / "metrics.yaml").write_text(file)
    server = start(tmp_path / "documented.py", "--metrics-config", tmp_path / "metrics.yaml").wait_ready()
    assert server.predict("documented", b"x").status == 200
    text = scrape(server)
    assert re.search(
        rf'^CacheHits{{ModelName="documented",Level="Model",Hostname="{HOST}",}} 1\.0$', text, re.MULTILINE
    )
    assert re.search(
        rf'^TokenizeTime{{Stage="one",ModelName="documented",Level="Model",Hostname="{HOST}",}} 1\.2$',
        text,
        re.MULTILINE,
    )
    assert "InputSize_count" in text
