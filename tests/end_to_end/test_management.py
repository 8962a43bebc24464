"""Register, list, describe, scale, set default, unregister."""

from __future__ import annotations

import json

import pytest

from support.archives import pack_handler
from support.held_requests import HeldRequests


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def echo_store(tmp_path_factory):
    """A store with one model, for tests that share a server."""
    folder = tmp_path_factory.mktemp("store")
    pack_handler(folder, "echo")
    return str(folder)


def test_model_is_registered_used_and_unregistered(start, store):
    pack_handler(store, "echo")
    server = start("--model-store", store).wait_ready()
    assert server.predict("echo", {}).status == 404
    reply = server.manage("POST", "/models?url=echo.mar&initial_workers=2&batch_size=4&max_batch_delay=20")
    assert reply.status == 200
    assert reply.json == {"status": 'Model "echo" Version: 1.0 registered with 2 initial workers'}
    assert server.predict("echo", {"a": 1}).status == 200
    described = server.describe("echo")
    assert (described["batchSize"], described["maxBatchDelay"]) == (4, 20)
    assert [worker["status"] for worker in described["workers"]] == ["READY", "READY"]
    assert described["workers"][0]["id"].isdigit()
    assert described["workers"][0]["memoryUsage"] > 1 << 20
    assert described["loadedAtStartup"] is False
    reply = server.manage("DELETE", "/models/echo")
    assert reply.json == {"status": 'Model "echo" unregistered'}
    assert server.predict("echo", {}).status == 404
    assert server.manage("POST", "/models?url=echo.mar&initial_workers=1").status == 200  # and again


def test_model_registered_without_workers_waits_for_a_scale_call(start, store):
    pack_handler(store, "echo")
    server = start("--model-store", store).wait_ready()
    reply = server.manage("POST", "/models?url=echo.mar")
    assert "registered with 0 initial workers. Use scale workers API" in reply.json["status"]
    reply = server.predict("echo", {})
    assert (reply.status, reply.json["type"]) == (503, "ServiceUnavailableException")
    assert 'Model "echo" has no worker to serve inference request.' in reply.message
    reply = server.manage("PUT", "/models/echo?min_worker=1&synchronous=true")
    assert reply.json == {"status": "Workers scaled to 1 for model: echo"}
    assert server.predict("echo", {}).status == 200


def test_asynchronous_registration_answers_at_once(start, store, tmp_path):
    pack_handler(store, "slow_start")
    gate = tmp_path / "gate"
    server = start("--model-store", store, env={"SLOW_START_S": "0", "SLOW_START_UNTIL": str(gate)}).wait_ready()
    reply = server.manage("POST", "/models?url=slow_start.mar&initial_workers=1&synchronous=false")
    assert (reply.status, reply.json["status"]) == (202, "Processing worker updates...")
    assert server.request("GET", "/readyz").status == 503
    gate.touch()
    assert server.predict("slow_start", {}).body == b"at last"


def test_registration_takes_a_json_body(start, store):
    pack_handler(store, "echo")
    server = start("--model-store", store).wait_ready()
    body = json.dumps({"url": "echo.mar", "model_name": "parrot", "initial_workers": "1", "batch_size": 3}).encode()
    reply = server.manage("POST", "/models", body, headers={"Content-Type": "application/json"})
    assert reply.status == 200
    assert server.describe("parrot")["batchSize"] == 3
    assert server.manage("DELETE", "/models/parrot").status == 200


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{no", 400, "BadRequestException"),
        (b"", 400, "BadRequestException"),
        (b"[1]", 400, "BadRequestException"),
        (b'{"url": "echo.mar", "batch_size": "abc"}', 400, "BadRequestException"),
        (b'{"url": ""}', 404, "ModelNotFoundException"),
        (b"{}", 400, "BadRequestException"),
        (b"{" * 20_000, 400, "BadRequestException"),
        (b"{a: &a [x], url: *a}", 400, "BadRequestException"),
        (b"{'url': 'echo.mar', model_name: \"parrot\", 'initial_workers': '1', 'synchronous': true}", 200, None),
    ],
)
def test_registration_reads_json_leniently(share, echo_store, body, status, kind):
    server = share("--model-store", echo_store)
    reply = server.manage("POST", "/models", body, headers={"Content-Type": "application/json"})
    assert (reply.status, reply.json.get("type")) == (status, kind)


def test_registration_that_cannot_start_says_why_and_leaves_nothing(start, store):
    pack_handler(store, "broken")
    server = start("--model-store", store).wait_ready()
    reply = server.manage("POST", "/models?url=broken.mar&initial_workers=1")
    assert reply.status == 500
    assert reply.message.startswith(
        "Failed to start workers for model broken version: 1.0: the model could not be loaded"
    )
    assert "a_database_that_nobody_has" in reply.cause
    assert server.manage("GET", "/models/broken").status == 404


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("", 400, "Parameter url is required."),
        ("url=nothing.mar", 404, "Model not found at: nothing.mar: the model store "),
        ("url=../echo.mar", 404, "Relative path is not allowed in url: ../echo.mar"),
        ("url=https://example.com/x.mar", 404, "does not match any allowed URL(s): --allow-url PATTERN"),
        ("url=echo.mar&runtime=cobol", 400, "Invalid RuntimeType value: cobol"),
        ("url=absent.mar&runtime=cobol", 400, "Invalid RuntimeType value: cobol"),  # before the archive is looked for
        ("url=echo.mar", 409, "Model version 1.0 is already registered for model echo"),
    ],
)
def test_registration_errors(share, echo_store, query, status, message):
    server = share(echo_store)
    reply = server.manage("POST", f"/models?{query}&initial_workers=1")
    assert reply.status == status
    assert message in reply.message


def test_versions_live_side_by_side_with_a_default(start, store):
    pack_handler(store, "echo", name="m", version="1.0", file="one.mar")
    pack_handler(store, "function", name="m", version="2.0", file="two.mar")
    server = start("--model-store", store).wait_ready()
    for file in ("one.mar", "two.mar"):
        assert server.manage("POST", f"/models?url={file}&initial_workers=1").status == 200
    assert "row" in server.predict("m", {}).json
    assert server.predict("m/2.0", {}).body == b"m: {}"
    assert len(server.manage("GET", "/models/m/all").json) == 2
    reply = server.manage("PUT", "/models/m/2.0/set-default")
    assert reply.json == {"status": 'Default version successfully updated for model "m" to "2.0"'}
    assert server.predict("m", {}).body == b"m: {}"
    reply = server.manage("DELETE", "/models/m/2.0")
    assert (reply.status, reply.message) == (403, "Cannot remove default version for model m")
    assert server.manage("PUT", "/models/m/9/set-default").message == "Model version 9 does not exist for model m"
    assert server.manage("DELETE", "/models/m/1.0").status == 200
    assert server.manage("DELETE", "/models/m").status == 200


def test_list_is_paged(start, store):
    for name in ("a", "b", "c", "d", "e"):
        pack_handler(store, "echo", name=name)
    server = start(store, "--workers", "0").wait_started()
    assert [m["modelName"] for m in server.manage("GET", "/models").json["models"]] == list("abcde")
    page = server.manage("GET", "/models?limit=2").json
    assert (page["nextPageToken"], len(page["models"])) == ("2", 2)
    page = server.manage("GET", "/models?limit=2&next_page_token=4").json
    assert page == {"models": [{"modelName": "e", "modelUrl": "e.mar"}]}


def test_scaling_down_finishes_what_runs(start, tmp_path):
    server = start("faulty.py", "--workers", "2").wait_ready()
    held = HeldRequests(server, tmp_path, 2).wait_running(2)
    assert server.manage("PUT", "/models/faulty?min_worker=1").status == 202
    assert [reply.status for reply in held.release()] == [200, 200]
    server.until(lambda: len(server.worker_pids("faulty")) == 1)
    assert server.manage("PUT", "/models/faulty?min_worker=0&synchronous=true").status == 200
    assert server.predict("faulty", {"do": "answer"}).status == 503


def test_scale_errors(start):
    server = start("echo.py").wait_ready()
    reply = server.manage("PUT", "/models/echo?min_worker=3&max_worker=1")
    assert (reply.status, reply.message) == (400, "max_worker cannot be less than min_worker.")
    assert server.manage("PUT", "/models/echo?min_worker=-1").status == 400
    assert server.manage("PUT", "/models/echo?min_worker=two").status == 400
    assert server.manage("PUT", "/models/nobody?min_worker=1").status == 404
    assert server.manage("PATCH", "/models/echo").status == 405
    assert server.manage("OPTIONS", "/models/echo").json["info"]["title"] == "RESTful Management API for: echo"


def test_handler_describes_itself_on_request(start, tmp_path):
    handler = tmp_path / "selfie.py"
    handler.write_text(
        "def handle(data, context):\n    if data is None:\n        return None\n"
        "    if context.get_request_header(0, 'describe') == 'True':\n        return [{'kind': 'selfie'}]\n"
        "    return ['x' for _ in data]\n"
    )
    server = start(handler, "--batch-size", "4").wait_ready()
    document = server.manage("GET", "/models/selfie?customized=true").json[0]
    assert document["customizedMetadata"] == {"kind": "selfie"}


def test_model_settings_come_from_its_yaml(start, tmp_path):
    config = "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 5\nmaxBatchDelay: 7\nresponseTimeout: 33\nmy_option: {a: 1}\n"
    server = start(pack_handler(tmp_path, "told", config=config)).wait_ready()
    described = server.describe("told")
    assert (described["minWorkers"], described["batchSize"], described["maxBatchDelay"]) == (2, 5, 7)
    assert described["responseTimeout"] == 33
    assert described["loadedAtStartup"] is True
    assert server.predict("told", {}).json["config"]["my_option"] == {"a": 1}


def test_flags_beat_the_models_yaml(start, tmp_path):
    config = "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 5\n"
    server = start(pack_handler(tmp_path, "echo", config=config), "--workers", "1", "--batch-size", "3").wait_ready()
    described = server.describe("echo")
    assert (described["minWorkers"], described["batchSize"]) == (1, 3)


def test_metrics_tell_requests_workers_and_queue(start):
    server = start("echo.py").wait_ready()
    server.predict("echo", {})
    text = server.request("GET", "/metrics", port=server.metrics_port).body.decode()
    assert 'flambeau_requests_total{model="echo",version="1.0",status="200"} 1' in text
    assert 'flambeau_workers_ready{model="echo",version="1.0"} 1' in text
    only = server.request("GET", "/metrics?name[]=flambeau_queue_jobs", port=server.metrics_port).body.decode()
    assert "flambeau_queue_jobs" in only
    assert "flambeau_requests_total" not in only


def test_describe_has_every_setting_of_the_yaml(start, tmp_path):
    config = (
        "useJobTicket: true\nsequenceBatching: true\nsequenceMaxIdleMSec: 2000\nsequenceTimeoutMSec: 500\n"
        "maxNumSequence: 4\nmaxSequenceJobQueueSize: 5\nclientTimeoutInMills: 7000\n"
    )
    server = start(pack_handler(tmp_path, "echo", config=config)).wait_listening()
    server.until(lambda: server.manage("GET", "/models/echo").status == 200)
    described = server.describe("echo")
    assert described["useJobTicket"] is True
    assert described["stateful"] is True
    names = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
    assert [described[name] for name in names] == [2000, 500, 4, 5]
    assert described["clientTimeoutInMills"] == 7000


def test_handler_that_does_not_describe_itself_in_time_is_an_error(start, tmp_path):
    handler = tmp_path / "silent.py"
    handler.write_text(
        "import time\n\n\ndef handle(data, context):\n    if data is None:\n        return None\n    time.sleep(60)\n"
    )
    server = start(handler, "--response-timeout", "1").wait_ready()
    reply = server.manage("GET", "/models/silent?customized=true")
    assert reply.status == 500
    assert reply.message.startswith(("Failed to get customized model matadata.", "Worker died: "))
