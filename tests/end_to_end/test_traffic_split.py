"""Two versions of a model share the requests that name none."""

from __future__ import annotations

import os
import signal
from collections import Counter

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
    assert shared.describe("m")["modelVersion"] == "1.0"  # descriptions are those of the default

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
    found = Counter()
    for is_streamed in (False, True, False, True):
        reply = openai.completions.with_raw_response.create(model="tiny", prompt="ab", max_tokens=3, stream=is_streamed)
        found[reply.headers[VERSION]] += 1
        if is_streamed:
            assert [*reply.parse()]
    assert found == {"1.0": 2, "2.0": 2}
    assert VERSION not in openai.completions.with_raw_response.create(model="tiny@2.0", prompt="ab").headers


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ("/models/m/2.0/traffic", 400, "Parameter percent is required"),
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
    assert server.manage("GET", "/models/m/2.0/traffic").status == 405
    assert VERSION not in server.predict("m", {}).headers
