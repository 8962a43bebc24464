"""Two versions of a model share the requests that name none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families as parse_metrics

from flambeau.archive.pack import Recipe, pack
from support.archives import pack_handler
from support.grpc_calls import Client, grpc_flags, request
from support.language_models import ONE_THREAD, write_language_model
from support.running import RunningServer

VERSION = "x-flambeau-model-version"
JSON = {"content-type": "application/json"}
GENERATES = """
minWorkers: 1
maxWorkers: 1
handler:
  model_path: {folder}
  compile: false
  num_blocks: 20
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    store = folder / "store"
    store.mkdir()
    for version in ("1.0", "2.0"):
        pack_handler(store, "echo", name="m", version=version, file=f"m-{version}.mar")
    flags = grpc_flags()
    running = RunningServer(folder / "log", "--model-store", str(store), *flags, env=ONE_THREAD).wait_ready()
    running.grpc_port, running.store = int(flags[1]), store
    for version in ("1.0", "2.0"):
        assert running.manage("POST", f"/models?url=m-{version}.mar&initial_workers=1").status == 200
    yield running
    running.stop()


@pytest.fixture
def shared(server):
    """Half of the requests go to the second version."""
    reply = server.manage("PUT", "/models/m/2.0/traffic?percent=50")
    assert reply.json == {"status": 'Version "2.0" of model "m" gets 50 % of the requests that name no version'}
    yield server
    assert server.manage("PUT", "/models/m/2.0/traffic", b'{"percent": 0}', headers=JSON).status == 200


def versions(server, path, number=10, headers=None):
    replies = [server.request("POST", path, b'{"instances": [1]}', {**JSON, **(headers or {})}) for _ in range(number)]
    assert {reply.status for reply in replies} == {200}
    return Counter(reply.headers.get(VERSION) for reply in replies)


@pytest.mark.parametrize("path", ["/predictions/m", "/m/predict", "/models/m/invoke", "/v1/models/m:predict"])
def test_every_path_without_a_version_shares_requests(shared, path):
    assert versions(shared, path) == {"1.0": 5, "2.0": 5}


def test_paths_with_a_version_and_keys_of_traffic_do_not_alternate(shared):
    assert versions(shared, "/predictions/m/1.0") == {None: 10}
    for user in ("ann", "bob", "cy"):
        assert len(versions(shared, "/predictions/m", headers={"x-flambeau-traffic-key": user})) == 1


def test_descriptions_and_metrics_tell_the_versions_apart(shared):
    documents = shared.manage("GET", "/models/m/all").json
    assert {one["modelVersion"]: one["trafficPercent"] for one in documents} == {"1.0": 50, "2.0": 50}
    assert all(one["errors"] == 0 and one["latencyMs"]["p99"] > 0 for one in documents)
    words = ["models", "traffic", "m", "--url", shared.management_url]
    command = [sys.executable, "-m", "flambeau.cli.main", *words]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1:]] == [
        [one["modelVersion"], "50", "%"] for one in documents
    ]
    assert shared.describe("m")["modelVersion"] == "1.0"  # descriptions are those of the default
    command[3:6] = ["models", "ls"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    rows = [line.split()[:4] for line in listed.stdout.splitlines() if line.startswith("m ")]
    assert sorted(rows) == [["m", "1.0", "(default)", "50"], ["m", "2.0", "50", "%"]]

    def requests():
        families = parse_metrics(shared.request("GET", "/metrics", port=shared.metrics_port).text)
        return {
            sample.labels["model_version"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "ts_inference_requests_total" and sample.labels["model_name"] == "m"
        }

    before = requests()
    versions(shared, "/predictions/m", 20)
    after = requests()
    assert [after[version] - before.get(version, 0) for version in ("1.0", "2.0")] == [10, 10]


def test_a_version_without_workers_that_answer_gets_no_requests(shared):
    pid = shared.manage("GET", "/models/m/2.0").json[0]["workers"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    shared.until(lambda: shared.manage("GET", "/models/m/2.0").json[0]["workers"][0]["status"] != "READY")
    # Every answer is a good one, whether the worker has been started again by then or not.
    versions(shared, "/predictions/m", 10)
    shared.until(lambda: versions(shared, "/predictions/m", 10) == {"1.0": 5, "2.0": 5})


def test_grpc_shares_requests(shared):
    client = Client(shared.grpc_port, shared.grpc_port)
    found = Counter()
    for _ in range(10):
        _, call = client.inference.Predictions.with_call(request("m", {}), timeout=60)
        found[dict(call.trailing_metadata())[VERSION]] += 1
    assert found == {"1.0": 5, "2.0": 5}
    chosen = set()
    for _ in range(6):
        metadata = [("x-flambeau-traffic-key", "ann")]
        _, call = client.inference.Predictions.with_call(request("m", {}), timeout=60, metadata=metadata)
        chosen.add(dict(call.trailing_metadata())[VERSION])
    assert len(chosen) == 1
    metadata = [("x-flambeau-traffic-key", "ann")]
    requests = [request("m", {}, sequence_id="s")] * 6
    call = client.inference.StreamPredictions2(iter(requests), timeout=60, metadata=metadata)
    assert len([*call]) == 6
    assert {dict(call.trailing_metadata())[VERSION]} == chosen
    client.close()


def test_chats_share_requests_and_streams_say_which_version_writes(server, tmp_path):
    (tmp_path / "tiny.yaml").write_text(GENERATES.format(folder=write_language_model(tmp_path / "model")))
    for version in ("1.0", "2.0"):
        config = tmp_path / "tiny.yaml"
        pack(Recipe(model_name="tiny", version=version, handler="gpt_handler", config_file=config), tmp_path)
        (tmp_path / "tiny.mar").rename(server.store / f"tiny-{version}.mar")
        assert server.manage("POST", f"/models?url=tiny-{version}.mar&initial_workers=1").status == 200
    server.manage("PUT", "/models/tiny/2.0/traffic?percent=50")
    openai = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    found, prints = Counter(), {}
    for is_streamed in (False, False, True, True):
        reply = openai.completions.with_raw_response.create(model="tiny", prompt="ab", max_tokens=3, stream=is_streamed)
        found[reply.headers[VERSION]] += 1
        if is_streamed:
            assert [*reply.parse()]
        else:
            prints[reply.headers[VERSION]] = reply.parse().system_fingerprint
    assert len({*prints.values()}) == len(prints)  # each version has a fingerprint of its own
    assert found == {"1.0": 2, "2.0": 2}
    server.manage("PUT", "/models/tiny/2.0/traffic?percent=0&mirror=100")
    reply = openai.completions.create(model="tiny", prompt="ab", max_tokens=5, temperature=0, stream=True)
    assert [*reply]
    server.until(lambda: mirrored(server, "tiny")["equal"] == 1)
    assert VERSION not in openai.completions.with_raw_response.create(model="tiny@2.0", prompt="ab").headers
    openai.close()


SCORES = """
import json, time
class Scores:
    def initialize(self, context):
        self.version = context.manifest["model"]["modelVersion"]
    def handle(self, data, context):
        asked = data[0]["body"]
        if self.version == "2.0":
            time.sleep(asked.get("sleep", 0))
            assert not asked.get("fails"), "no"
        more = asked.get("more", 0) * (self.version == "2.0")
        return [{"score": 0.5 + more, "text": "x" * asked.get("size", 0)}]
"""


def mirrored(server, model):
    return server.manage("GET", f"/models/{model}/2.0/traffic").json["mirror"]


def test_copies_are_compared_and_do_not_delay_or_fail_the_requests_of_clients(server, tmp_path):
    (tmp_path / "scores.py").write_text(SCORES)
    for version in ("1.0", "2.0"):
        pack(Recipe(model_name="scores", version=version, handler=str(tmp_path / "scores.py")), tmp_path)
        (tmp_path / "scores.mar").rename(server.store / f"scores-{version}.mar")
        assert server.manage("POST", f"/models?url=scores-{version}.mar&initial_workers=1").status == 200
    reply = server.manage("PUT", "/models/scores/2.0/traffic?mirror=100")
    assert reply.json["status"].endswith("gets copies of 100 % of the requests that name no version")
    bodies = [{"more": 1e-6}, {"size": 300_000}, {"more": 0.1}, {"fails": True}, {"size": 50_000}]
    for body in bodies:
        reply = server.predict("scores", body)
        assert (reply.status, reply.headers[VERSION]) == (200, "1.0")
    expected = {"percent": 100, "mirrored": 5, "equal": 2, "different": 1, "failed": 1, "dropped": 1}
    server.until(lambda: mirrored(server, "scores") == expected)
    differences = server.manage("GET", "/models/scores/2.0/traffic").json["differences"]
    assert [one["difference"].partition(",")[0] for one in differences] == ["score: 0.5", "status 200"]
    text = server.request("GET", "/metrics", port=server.metrics_port).text
    assert 'flambeau_mirror_requests_total{model="scores",version="2.0",result="equal"} 2' in text
    assert 'flambeau_requests_total{model="scores",version="2.0"' not in text
    started = time.monotonic()
    assert server.predict("scores", {"sleep": 30}).status == 200
    assert server.predict("scores", {}).status == 200
    assert time.monotonic() - started < 20
    server.until(lambda: mirrored(server, "scores")["mirrored"] == 7)
    os.kill(server.manage("GET", "/models/scores/2.0").json[0]["workers"][0]["pid"], signal.SIGKILL)
    server.until(lambda: mirrored(server, "scores")["failed"] == 2)  # it is not retried
    assert server.manage("PUT", "/models/scores/2.0/traffic?mirror=0").status == 200
    assert "mirror" not in server.describe("scores")


def test_requests_that_wait_for_a_version_without_workers_go_to_the_default(server, tmp_path):
    (tmp_path / "scores.py").write_text(SCORES)
    for version in ("1.0", "2.0"):
        pack(Recipe(model_name="shared", version=version, handler=str(tmp_path / "scores.py")), tmp_path)
        (tmp_path / "shared.mar").rename(server.store / f"shared-{version}.mar")
        assert server.manage("POST", f"/models?url=shared-{version}.mar&initial_workers=1").status == 200
    server.manage("PUT", "/models/shared/2.0/traffic?percent=100")
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(server.predict, "shared", {"sleep": 1}) for _ in range(8)]
        described = "/models/shared/2.0"
        server.until(lambda: server.manage("GET", described).json[0]["jobQueueStatus"]["pendingRequests"] > 3)
        assert server.manage("PUT", f"{described}?min_worker=0&max_worker=0").status == 202
        replies = [call.result() for call in calls]
    assert [reply.status for reply in replies] == [200] * 8
    assert {reply.headers[VERSION] for reply in replies} == {"1.0", "2.0"}  # some had begun
    assert server.manage("DELETE", "/models/shared/2.0").status == 200


def test_a_version_that_fails_too_often_is_rolled_back(server, tmp_path):
    (tmp_path / "scores.py").write_text(SCORES)
    for version in ("1.0", "2.0"):
        pack(Recipe(model_name="limited", version=version, handler=str(tmp_path / "scores.py")), tmp_path)
        (tmp_path / "limited.mar").rename(server.store / f"limited-{version}.mar")
        assert server.manage("POST", f"/models?url=limited-{version}.mar&initial_workers=1").status == 200
    traffic = "/models/limited/2.0/traffic"
    reply = server.manage("PUT", f"{traffic}?percent=50&max_errors=10")
    assert reply.json["status"].endswith("and none once more than 10 % of its answers are errors of the server")
    assert all(server.predict("limited", {}).status == 200 for _ in range(40))
    assert server.manage("GET", traffic).json["maxErrors"] == 10
    statuses = [server.predict("limited", {"fails": True}).status for _ in range(40)]
    assert sum(status >= 500 for status in statuses) == 3  # of 23 answers
    found = server.manage("GET", traffic).json
    assert (found["percent"], "maxErrors" in found) == (0, False)
    assert found["rolledBack"] == "3 of its last 23 answers were errors of the server, more than 10 %"
    words = ["models", "traffic", "limited", "--url", server.management_url]
    listed = subprocess.run(
        [sys.executable, "-m", "flambeau.cli.main", *words], capture_output=True, text=True, timeout=100, check=True
    )
    assert f"2.0 gets no requests any more: {found['rolledBack']}" in listed.stdout
    assert server.manage("PUT", f"{traffic}?percent=50").status == 200  # begins anew, without a limit
    assert {"rolledBack", "maxErrors"}.isdisjoint(server.manage("GET", traffic).json)


BREAKS = """
class Breaks:
    def initialize(self, context):
        self.version = context.manifest["model"]["modelVersion"]
    def handle(self, data, context):
        return [self.words(row["body"]) for row in data]
    def words(self, asked):
        yield "once "
        assert self.version == "1.0" or not asked.get("fails"), "no"
        yield "upon"
"""


def test_a_version_whose_streams_break_off_is_rolled_back(server, tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    for version in ("1.0", "2.0"):
        pack(Recipe(model_name="breaks", version=version, handler=str(tmp_path / "breaks.py")), tmp_path)
        (tmp_path / "breaks.mar").rename(server.store / f"breaks-{version}.mar")
        assert server.manage("POST", f"/models?url=breaks-{version}.mar&initial_workers=1").status == 200
    traffic, path = "/models/breaks/2.0/traffic", "/predictions/breaks"
    server.manage("PUT", f"{traffic}?percent=50&max_errors=10")
    events = {**JSON, "accept": "text/event-stream"}
    for body, end in ((b"{}", "event: end"), (b'{"fails": true}', "event: error")):
        texts = [server.request("POST", path, body, events).text for _ in range(40)]
        assert any(end in text for text in texts)
    found = server.manage("GET", traffic).json
    assert found["rolledBack"] == "3 of its last 23 answers were errors of the server, more than 10 %"
    assert (found["answers"], found["errors"]) == (23, 3)


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ("/models/m/2.0/traffic", 400, "Parameter percent is required, or mirror"),
        ("/models/m/2.0/traffic?mirror=-1", 400, "mirror is '-1'; it must be a whole number from 0 to 100"),
        ("/models/m/2.0/traffic?max_errors=10", 400, "Parameter max_errors needs percent"),
        (
            "/models/m/2.0/traffic?percent=10&max_errors=100",
            400,
            "max_errors is '100'; it must be a whole number from 0",
        ),
        ("/models/m/1.0/traffic?mirror=10", 400, "version 1.0 of m is the default"),
        ("/models/m/2.0/traffic?percent=101", 400, "percent is '101'; it must be a whole number from 0 to 100"),
        ("/models/m/2.0/traffic?percent=ten", 400, "percent is 'ten'"),
        ("/models/m/1.0/traffic?percent=10", 400, "version 1.0 of m is the default"),
        ("/models/m/9/traffic?percent=10", 404, "Model version: 9 does not exist"),
        ("/models/nobody/1/traffic?percent=10", 404, "Model not found: nobody"),
    ],
)
def test_invalid_shares_are_refused(server, call, status, message):
    reply = server.manage("PUT", call)
    assert (reply.status, message in reply.message) == (status, True)
    assert server.manage("POST", "/models/m/2.0/traffic").status == 405
    assert VERSION not in server.predict("m", {}).headers
