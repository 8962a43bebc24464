"""Where the time of a request went: Server-Timing, x-flambeau-explain, /slow, and the metrics about it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_metrics

from flambeau.archive.pack import Recipe, pack
from support.grpc_calls import Client, grpc_flags, request
from support.language_models import ONE_THREAD, write_language_model
from support.running import HANDLERS, RunningServer

BATCHES = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 3\nmaxBatchDelay: 300\n"
# Two sequences fit until they have grown: then one is preempted.
GENERATES = """
minWorkers: 1
maxWorkers: 1
handler:
  model_path: {folder}
  compile: false
  max_num_seqs: 4
  num_blocks: 9
  block_size: 16
"""
GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
EXPLAIN = {"x-flambeau-explain": "true"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timing")
    store = folder / "store"
    store.mkdir()
    texts = {"batches": BATCHES, "tiny": GENERATES.format(folder=write_language_model(folder / "model"))}
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    slow_stages = str(HANDLERS / "slow_stages.py")
    for name, handler in (("batches", slow_stages), ("tiny", "gpt_handler")):
        recipe = Recipe(model_name=name, handler=handler, config_file=folder / f"{name}.yaml")
        pack(recipe, store, format="no-archive")
    words = [str(store), slow_stages, str(HANDLERS / "streamer.py"), "--metrics-vllm-names"]
    flags = grpc_flags()
    running = RunningServer(folder / "log", *words, *flags, env=ONE_THREAD).wait_listening()
    running.grpc_port = int(flags[1])
    running.until(lambda: running.is_ready, timeout=90)  # it loads torch
    yield running
    running.stop()


def timing(reply):
    """Server-Timing in milliseconds, by name."""
    return parse_timing(reply.headers["server-timing"])


def parse_timing(text):
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", text)}


def milliseconds(explanation):
    return {part["name"]: part["ms"] for part in explanation["parts"]}


def explained(server, model, order, **options):
    reply = server.predict(model, order, headers=EXPLAIN, **options)
    assert reply.status == 200, reply.text
    return json.loads(reply.headers["x-flambeau-explain"])


def raw(server, model, order, *headers):
    """A whole response as it is on the wire."""
    body = json.dumps(order).encode()
    lines = [
        f"POST /predictions/{model} HTTP/1.1",
        "Host: x",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        chunks = []
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
    return b"".join(chunks).decode()


# ---- a header for every response ----


def test_every_prediction_has_the_parts_of_its_time(server):
    parts = timing(server.predict("slow_stages", {"prepare_s": 0.02, "compute_s": 0.05}))
    total = parts.pop("total")
    assert [*parts] == ["queue", "transfer", "preprocess", "inference", "postprocess", "other"]
    assert parts["preprocess"] >= 20
    assert parts["inference"] >= 50
    assert sum(parts.values()) == pytest.approx(total, abs=0.01)


def test_failed_prediction_has_them_too(server):
    reply = server.predict("slow_stages", {"compute_s": 0.01, "fail": True})
    assert (reply.status, timing(reply)["worker"] >= 10) == (503, True)


def test_head_of_a_stream_has_what_is_known_then(server):
    reply = server.predict("streamer", {"n": 3, "pause": 0.01})
    assert [*timing(reply)] == ["queue", "worker", "total"]


def test_response_without_a_job_has_no_times(server):
    assert "server-timing" not in server.predict("no_such_model", {}).headers
    assert "server-timing" not in server.request("GET", "/ping").headers


def test_generation_has_the_time_of_its_first_token(server):
    reply = server.predict("tiny", {"prompt": "To be", "max_new_tokens": 5, "ignore_eos": True})
    parts = timing(reply)
    total = parts.pop("total")
    assert [*parts] == ["queue", "transfer", "first_token", "generate"]
    assert sum(parts.values()) == pytest.approx(total, abs=0.01)


# ---- explanations ----


def test_explanation_has_the_parts_in_order_and_the_worker(server):
    found = explained(server, "slow_stages", {"compute_s": 0.02})
    assert [part["name"] for part in found["parts"]][:3] == ["queue", "to_worker", "read"]
    assert sum(milliseconds(found).values()) == pytest.approx(found["total_ms"], abs=0.02)
    assert (found["model"], found["version"], found["status"], found["batch_size"]) == ("slow_stages", "1.0", 200, 1)
    assert found["worker"].endswith("-slow_stages_1.0")


def test_explanation_of_a_stream_is_its_trailer(server):
    text = raw(server, "streamer", {"n": 2}, "x-flambeau-explain: true")
    head, _, rest = text.partition("\r\n\r\n")
    assert "trailer: x-flambeau-explain" in head
    trailer = rest.rpartition("\r\n0\r\n")[2]
    assert trailer.endswith("\r\n\r\n")
    name, _, value = trailer.strip().partition(": ")
    assert (name, json.loads(value)["model"]) == ("x-flambeau-explain", "streamer")


def test_explanation_of_events_is_the_last_but_the_end(server):
    text = raw(server, "streamer", {"n": 2}, "x-flambeau-explain: true", "Accept: text/event-stream")
    assert "trailer:" not in text
    names = re.findall(r"event: (\w+)", text)
    assert names == ["explain", "end"]
    assert json.loads(re.search(r"event: explain\ndata: (.*)", text)[1])["model"] == "streamer"


def test_stream_without_the_question_has_no_trailer(server):
    text = raw(server, "streamer", {"n": 1})
    assert "explain" not in text
    assert text.endswith("\r\n0\r\n\r\n")


def test_openai_clients_get_it_as_a_chunk_without_choices(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        options = {"model": "tiny", "prompt": "To be", "max_tokens": 4, "extra_headers": EXPLAIN}
        chunks = [*client.completions.create(**options, stream=True)]
        whole = client.completions.with_raw_response.create(**options, extra_body={"ignore_eos": True})
    assert chunks[-1].choices == []
    assert chunks[-1].flambeau_explain["generation"]["prompt_tokens"] > 0
    found = json.loads(whole.headers["x-flambeau-explain"])
    assert found["generation"]["output_tokens"] == 4
    assert 0 < found["generation"]["first_token_ms"] <= found["total_ms"]
    assert "first_token" in parse_timing(whole.headers["server-timing"])


def test_grpc_calls_have_both_in_their_trailing_metadata(server):
    client = Client(server.grpc_port, server.grpc_port)
    try:
        ask = request("slow_stages", inputs={"body": b'{"compute_s": 0.01}'})
        asked = [*EXPLAIN.items()]
        _, unary = client.inference.Predictions.with_call(ask, timeout=60, metadata=asked)
        stream = client.inference.StreamPredictions(ask, timeout=60)
        assert len([*stream]) == 1
        for found in (dict(unary.trailing_metadata()), dict(stream.trailing_metadata())):
            assert parse_timing(found["server-timing"])["inference"] >= 10
        assert json.loads(dict(unary.trailing_metadata())["x-flambeau-explain"])["model"] == "slow_stages"
        assert "x-flambeau-explain" not in dict(stream.trailing_metadata())
    finally:
        client.close()


def test_requests_of_a_batch_know_each_other_and_their_wait(server):
    def call(name):
        return explained(server, "batches", {"name": name, "compute_s": 0.01}, timeout=60)

    alone = call("alone")
    assert milliseconds(alone)["batch_wait"] > 250
    assert alone["shared_with"] == []
    found = [future.result() for future in server.at_once(call, ["a", "b", "c"])]
    assert {each["batch_size"] for each in found} == {3}
    ids = {each["request_id"] for each in found}
    assert len(ids) == 3
    for each in found:
        assert {*each["shared_with"]} == ids - {each["request_id"]}


def test_collection_in_the_worker_is_reported(server):
    [event] = explained(server, "slow_stages", {"collect": True})["meanwhile"][:1]
    assert event["what"] == "garbage collection"
    assert event["ms"] >= 1


def test_retry_and_the_load_of_the_next_worker_are_reported(server, tmp_path):
    found = explained(server, "slow_stages", {"die_once": str(tmp_path / "died")})
    assert milliseconds(found)["lost"] > 0
    told = [event["what"] for event in found["meanwhile"]]
    assert told == ["retry after 1 worker exited", "loading the model"]
    assert milliseconds(found)["queue"] >= found["meanwhile"][1]["ms"] / 2


def test_preemption_and_neighbors_of_a_generation_are_reported(server):
    def call(prompt):
        return explained(server, "tiny", {"prompt": prompt, "max_new_tokens": 90, "ignore_eos": True})

    found = [future.result() for future in server.at_once(call, ["To be", "or not"])]
    assert sum(each["generation"]["preemptions"] for each in found) >= 1
    victim = max(found, key=lambda each: each["generation"]["preemptions"])
    assert any("preemption" in event["what"] for event in victim["meanwhile"])
    ids = {each["request_id"] for each in found}
    assert any({*each["shared_with"]} & ids for each in found)


# ---- the slowest of the last hour ----


def test_slowest_requests_come_first(server):
    for seconds in (0.3, 0.5, 0.4):
        headers = {"x-request-id": f"took-{seconds}"}
        assert server.predict("slow_stages", {"compute_s": seconds}, headers=headers).status == 200
    found = server.manage("GET", "/slow?model=slow_stages&limit=500").json["requests"]
    totals = [each["total_ms"] for each in found]
    assert totals == sorted(totals, reverse=True)
    names = [each["request_id"] for each in found if each["request_id"].startswith("took-")]
    assert names == ["took-0.5", "took-0.4", "took-0.3"]
    assert len(server.manage("GET", "/slow?model=slow_stages&limit=2").json["requests"]) == 2
    models = {each["model"] for each in server.manage("GET", "/slow").json["requests"]}
    assert {"slow_stages"} <= models


def test_wrong_questions_about_slow_requests_are_refused(server):
    assert server.manage("GET", "/slow?model=nobody").status == 404
    assert "limit" in server.manage("GET", "/slow?limit=none").message
    assert server.manage("POST", "/slow").status == 405


def test_command_shows_the_slowest(server):
    server.predict("slow_stages", {"compute_s": 0.2}, headers={"x-request-id": "shown"})
    done = run_command("slow", "slow_stages", "--limit", "100", "--url", server.management_url)
    assert "shown" in done.stdout
    assert "inference 2" in done.stdout
    as_json = run_command("slow", "--json", "--url", server.management_url)
    assert json.loads(as_json.stdout)["requests"]


def run_command(*words):
    return subprocess.run([sys.executable, "-m", "flambeau", *words], capture_output=True, text=True, check=True)


# ---- metrics ----


def samples(server):
    text = server.request("GET", "/metrics", port=server.metrics_port).text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse_metrics(text)
        for sample in family.samples
    }


def test_histograms_of_stages_and_tokens_are_filled(server):
    server.predict("slow_stages", {"compute_s": 0.01})
    server.predict("batches", {})
    server.predict("tiny", {"prompt": "To be", "max_new_tokens": 5, "ignore_eos": True})
    found = samples(server)

    def value(name, model, **labels):
        return found[(name, *sorted({"model": model, "version": "1.0", **labels}.items()))]

    for stage in ("preprocess", "inference", "postprocess"):
        assert value("flambeau_stage_seconds_count", "slow_stages", stage=stage) >= 1
    assert value("flambeau_stage_seconds_sum", "slow_stages", stage="inference") >= 0.01
    assert value("flambeau_handler_seconds_count", "slow_stages") >= 1
    assert value("flambeau_batch_wait_seconds_sum", "batches") > 0.25
    for name in ("first_token_seconds", "prefill_seconds", "decode_seconds", "prompt_tokens", "output_tokens"):
        assert value(f"flambeau_{name}_count", "tiny") >= 1
    assert value("flambeau_inter_token_seconds_count", "tiny") >= 4
    assert value("flambeau_output_tokens_sum", "tiny") >= 5
    assert value("flambeau_engine_steps_total", "tiny") >= 5
    assert value("flambeau_choices_finished_total", "tiny", reason="length") >= 1
    assert (value("flambeau_sequences_running", "tiny"), value("flambeau_kv_cache_usage_ratio", "tiny")) == (0, 0)
    assert found[("process_resident_memory_bytes",)] > 10e6
    assert found[("process_open_fds",)] > 5
    tiny = (("model_name", "tiny"), ("version", "1.0"))
    assert found[("vllm:generation_tokens_total", *tiny)] == value("flambeau_output_tokens_sum", "tiny")
    assert found[("vllm:time_to_first_token_seconds_count", *tiny)] >= 1
    assert found[("vllm:request_success_total", *sorted((("finished_reason", "length"), *tiny)))] >= 1
    for name in ("prefill_time", "decode_time", "time_per_output_token"):
        assert found[(f"vllm:request_{name}_seconds_count", *tiny)] >= 1


def expressions():
    """Every query of the dashboard and of the alert rules."""
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield pytest.param(variable["query"], id=f"${variable['name']}")
    for group in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield pytest.param(rule["expr"], id=rule["alert"])


METRIC = re.compile(r"\b((?:flambeau|process)_\w+)(?:\{(.*?)\})?")
FROM_PROMETHEUS = {"job", "instance"}  # labels that the scraper adds


@pytest.fixture(scope="module")
def labels(server):
    """The labels of each metric of the server."""
    server.predict("slow_stages", {"fail": True})
    server.predict("slow_stages", {"compute_s": 0.001})
    known = {}
    for name, *pairs in samples(server):
        known.setdefault(name, set()).update(key for key, _ in pairs)
    return known


@pytest.mark.parametrize("expression", [*expressions()])
def test_dashboard_and_alerts_use_metrics_and_labels_that_exist(labels, expression):
    found = METRIC.findall(expression)
    assert found
    for name, matchers in found:
        assert name in labels
        used = {*re.findall(r"(\w+)\s*=~?", matchers)}
        for grouping in re.findall(r"\b(?:by|on) \(([\w, ]+)\)", expression):
            used |= {*grouping.split(", ")} if name.startswith("flambeau_") else set()
        if not name.endswith("_bucket"):
            used.discard("le")
        assert used - FROM_PROMETHEUS <= labels[name], name


BASE_UNITS = {"seconds", "bytes", "ratio"}
OTHER_UNITS = {"milliseconds", "microseconds", "minutes", "hours", "kilobytes", "megabytes", "percent", "ms", "us", "s"}


def test_names_keep_the_rules_of_prometheus(server):
    """The rules of `promtool check metrics`, for our own names; those of existing dashboards are as they are."""
    text = server.request("GET", "/metrics", port=server.metrics_port).text
    kinds = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    ours = {name: kind for name, kind in kinds.items() if name.startswith(("flambeau_", "process_"))}
    assert len(ours) > 25
    for name, kind in ours.items():
        words = name.split("_")
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), "no capitals, no colons"
        assert (kind == "counter") == name.endswith("_total"), name
        assert not name.endswith(("_count", "_sum", "_bucket", "_info")), name
        assert not {*words} & {"counter", "gauge", "histogram", "summary"}, name
        assert not {*words} & OTHER_UNITS, f"{name}: write one of {BASE_UNITS}"
        units = [i for i, word in enumerate(words) if word in BASE_UNITS]
        assert all(i == len(words) - 1 - (kind == "counter") for i in units), f"{name}: the unit comes last"
        [help_text] = re.findall(rf"# HELP {name} (.*)", text)
        assert help_text.endswith("."), name


def test_open_metrics_are_sent_to_those_that_ask(server):
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
    reply = server.request("GET", "/metrics", headers={"accept": accept}, port=server.metrics_port)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_open_metrics(reply.text)}
    assert families["flambeau_requests"].type == "counter"
    assert families["flambeau_stage_seconds"].type == "histogram"
    plain = server.request("GET", "/metrics", port=server.metrics_port)
    assert plain.headers["content-type"].startswith("text/plain")
