"""Workflows: registered, described, run and let go as TorchServe 0.12.0 did."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path

import pytest

from support.archives import pack_handler
from support.configured import problem
from support.file_server import serving_files
from support.flows import pack_flow
from support.torchserve import CommandServer, torchserve_environment


@pytest.fixture
def place(tmp_path):
    """A model store with one model, a workflow store, and a folder for the functions to meet in."""
    for name in ("models", "flows", "meeting"):
        (tmp_path / name).mkdir()
    pack_handler(tmp_path / "models", "flow_model")
    return tmp_path


@pytest.fixture
def server(place, configured):
    def start(**settings):
        return configured(
            model_store=place / "models",
            workflow_store=place / "flows",
            env={"FLOW_FOLDER": str(place / "meeting")},
            **settings,
        )

    return start


def flow(place, name, dag, models=None, **options):
    return pack_flow(place / "flows", name, dag, models, **options).name


def predict(server, name, body=b"x", method="POST", *, timeout=30, **headers):
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return server.request(method, f"/wfpredict/{name}", body, named, timeout=timeout)


MODEL = {"url": "flow_model.mar"}


def test_life_of_a_workflow(place, server):
    settings = {"min-workers": 1, "max-workers": 2, "batch-size": 3, "max-batch-delay": 40, "m1": MODEL}
    flow(place, "seq", {"begin": ["m1"], "m1": ["report"]}, settings)
    running = server()
    reply = running.manage("POST", "/workflows?url=seq.war")
    assert (reply.status, reply.json) == (
        200,
        {"status": "Workflow seq has been registered and scaled successfully."},
    )
    assert running.manage("GET", "/workflows").json == {
        "workflows": [{"workflowName": "seq", "workflowUrl": "seq.war"}]
    }
    assert running.manage("GET", "/workflows/seq").json == [
        {
            "workflowName": "seq",
            "workflowUrl": "seq.war",
            "minWorkers": 1,
            "maxWorkers": 2,
            "batchSize": 3,
            "maxBatchDelay": 40,
            "workflowDag": "{begin=[m1], m1=[report]}",
        }
    ]
    reply = predict(running, "seq")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == {"body": ["bytearray", "seq__m1(begin(x))"]}
    # Models are models, functions are models that nobody lists.
    assert running.manage("GET", "/models").json["models"] == [{"modelName": "seq__m1", "modelUrl": "flow_model.mar"}]
    node = running.describe("seq__m1")
    assert (node["minWorkers"], node["maxWorkers"], node["batchSize"], node["maxBatchDelay"]) == (2, 2, 3, 40)
    function = running.describe("seq__begin")
    assert (function["maxWorkers"], function["batchSize"], function["maxBatchDelay"]) == (1, 1, 0)
    assert "modelUrl" not in function
    assert problem(running.manage("POST", "/workflows?url=seq.war")) == (
        409,
        "ConflictStatusException",
        "Workflow seq is already registered.",
    )
    reply = running.manage("DELETE", "/workflows/seq")
    assert (reply.status, reply.json) == (200, {"status": 'Workflow "seq" unregistered'})
    gone = (404, "WorkflowNotFoundException", "Workflow not found: seq")
    assert problem(running.manage("DELETE", "/workflows/seq")) == gone
    assert problem(running.manage("GET", "/workflows/seq")) == gone
    assert problem(predict(running, "seq")) == gone
    assert running.manage("GET", "/models/seq__begin").status == 404
    assert running.manage("GET", "/models").json == {"models": []}
    assert (place / "flows" / "seq.war").exists()  # it was not downloaded, so it is not ours to delete


def test_data_flows_by_the_names_of_the_nodes(place, server):
    flow(place, "join", {"begin": ["left", "m1"], "left": ["report"], "m1": ["report"]}, {"m1": MODEL})
    flow(place, "leaves", {"begin": ["left", "right"]})
    flow(place, "mixed", {"begin": ["left", "text"]})
    flow(place, "header", {"begin": ["header"]})
    flow(place, "only", {"begin": []})
    running = server()
    for name in ("join", "leaves", "mixed", "header", "only"):
        assert running.register_workflow(f"{name}.war").status == 200, running.log
    joined = predict(running, "join").json
    assert joined["m1"] == ["bytearray", "join__m1(begin(x))"]
    assert json.loads(joined["left"][1]) == {"left": "begin(x)"}
    assert predict(running, "leaves").json == {"left": {"left": "begin(x)"}, "right": {"right": "begin(x)"}}
    assert problem(predict(running, "mixed"))[:2] == (500, "InternalServerException")
    assert predict(running, "header", x_mine="passed on").text == "passed on"
    # The first node gets what a model would get: forms, JSON, nothing.
    assert predict(running, "only", b"data=abc", content_type="application/x-www-form-urlencoded").text == "begin(abc)"
    assert predict(running, "only", b'{"k": 1}', "PUT", content_type="application/json").text == 'begin({"k": 1})'
    assert predict(running, "only", None, "GET").text == "begin()"
    assert predict(running, "only/and/more").text == "begin(x)"
    assert predict(running, "only", bytes(300_000)).body == b"begin(" + bytes(300_000) + b")"
    assert running.request("POST", "/wfpredict").status == 404


def test_a_name_of_its_own_and_json_parameters(place, server):
    flow(place, "seq", {"begin": []})
    running = server()
    assert running.register_workflow("sub/seq.war", workflow_name="other", response_timeout=7).status == 200
    assert running.describe("other__begin")["responseTimeout"] == 7
    assert predict(running, "other").text == "begin(x)"
    assert running.register_workflow("seq.war", workflow_name="another").status == 200
    listed = running.manage("GET", "/workflows?limit=1").json
    assert listed == {"nextPageToken": "1", "workflows": [{"workflowName": "another", "workflowUrl": "seq.war"}]}
    assert running.manage("GET", "/workflows?limit=1&next_page_token=1").json == {
        "workflows": [{"workflowName": "other", "workflowUrl": "sub/seq.war"}]
    }
    assert running.manage("PUT", "/workflows").status == 405
    assert running.manage("PUT", "/workflows/other").status == 405


def test_branches_run_side_by_side(place, server):
    flow(place, "sides", {"begin": ["meets", "meets_too"]})
    running = server()
    assert running.register_workflow("sides.war").status == 200
    assert predict(running, "sides").json == {"meets": {"one": "met"}, "meets_too": {"two": "met"}}


def test_nodes_are_tried_again_and_limited_in_time(place, server):
    flow(place, "again", {"begin": ["fails_once"]})
    flow(place, "failing", {"begin": ["fails"]}, {"retry-attempts": 2})
    flow(place, "slow", {"waits": []}, {"retry-attempts": 0, "timeout-ms": 200})
    running = server()
    for name in ("again", "failing", "slow"):
        assert running.register_workflow(f"{name}.war").status == 200
    assert predict(running, "again").text == "at last"
    reply = predict(running, "failing")
    assert problem(reply) == (500, "InternalServerException", "Error executing fails")
    assert "Failed to execute workflow Node after 2 attempts : Error executing fails" in reply.cause
    assert "no luck" in reply.cause
    assert len(running.logged("node fails,", "attempt")) == 3
    reply = predict(running, "slow")
    assert problem(reply) == (500, "InternalServerException", "Error executing waits")
    assert "no answer within 200 ms (timeout-ms)" in reply.cause
    running.until((place / "meeting" / "cancelled").exists)  # the handler was told


def test_client_that_goes_cancels_the_nodes(place, server):
    flow(place, "wait", {"waits": []})
    running = server()
    assert running.register_workflow("wait.war").status == 200
    connection = http.client.HTTPConnection("127.0.0.1", running.port)
    connection.request("POST", "/wfpredict/wait", b"x")
    running.until((place / "meeting" / "waiting").exists)
    connection.close()
    running.until((place / "meeting" / "cancelled").exists)


def test_what_was_accepted_is_answered_before_the_workflow_goes(place, server):
    flow(place, "wait", {"waits": ["report"]})
    running = server()
    assert running.register_workflow("wait.war").status == 200
    [answer] = running.at_once(lambda body: predict(running, "wait", body), [b"x"])
    running.until((place / "meeting" / "waiting").exists)
    [gone] = running.at_once(lambda _: running.manage("DELETE", "/workflows/wait"), [b""])
    running.until(lambda: running.manage("GET", "/workflows/wait").status == 404)
    (place / "meeting" / "go").touch()
    assert gone.result().status == 200
    assert answer.result().json == {"body": ["bytearray", "went on"]}


def test_failed_registration_leaves_nothing(place, server):
    flow(place, "nomodel", {"begin": ["m1"]}, {"m1": {"url": "nothere.mar"}})
    flow(place, "broken", {"begin": ["cannot_load", "nofunction"]})
    running = server()
    reply = running.register_workflow("nomodel.war")
    assert problem(reply) == (
        500,
        "WorkflowException",
        "Workflow nomodel has failed to register. Failures: [Workflow Node nomodel__m1 failed to register. "
        "Details: Model not found at: nothere.mar]",
    )
    reply = running.register_workflow("broken.war")
    failures = [
        f"Failed to start workers for model broken__{node} version: 1.0" for node in ("cannot_load", "nofunction")
    ]
    assert problem(reply) == (
        500,
        "WorkflowException",
        f"Workflow broken has failed to register. Failures: [{', '.join(failures)}]",
    )
    assert "ValueError: never" in reply.cause
    assert "has no function 'nofunction'" in reply.cause
    for model in ("nomodel__begin", "broken__begin", "broken__cannot_load"):
        assert running.manage("GET", f"/models/{model}").status == 404
    assert running.manage("GET", "/workflows").json == {"workflows": []}
    pack_handler(place / "models", "flow_model", file="nothere.mar")
    assert running.register_workflow("nomodel.war").status == 200  # no name was left taken


def test_what_cannot_be_registered(place, server):
    flow(place, "cycle", {"begin": ["left"], "left": ["right"], "right": ["left"]})
    flow(place, "starts", {"left": ["report"], "right": ["report"]})
    flow(place, "itself", {"begin": ["begin"]})
    flow(place, "yaml", {}, spec="models: [")
    levels = [f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)]
    flow(place, "merged", {}, spec="\n".join(["a0: &a0 {k: v}", *levels]))
    flow(place, "unnamed", {"begin": []}, manifest={"createdOn": "x", "archiverVersion": "1", "workflow": {}})
    flow(place, "undated", {"begin": []}, manifest={"workflow": {"workflowName": "u", "specFile": "spec.yaml"}})
    (place / "flows" / "rubbish.war").write_text("no archive")
    (place / "flows" / "folder").mkdir()
    running = server()

    def refused(url):
        return problem(running.register_workflow(url))

    assert refused("cycle.war") == (400, "InvalidDAGException", "Not a valid DAG")
    assert refused("starts.war") == (400, "InvalidDAGException", "DAG should have only one start node")
    assert refused("itself.war") == (400, "InvalidDAGException", "Self loop exception")
    assert refused("yaml.war") == (500, "InvalidWorkflowException", "Failed to parse yaml.")
    assert refused("merged.war") == (500, "InvalidWorkflowException", "Failed to parse yaml.")
    assert refused("unnamed.war") == (500, "InvalidWorkflowException", "Workflow name is not defined.")
    assert refused("undated.war") == (500, "InvalidWorkflowException", "Workflow archive createdOn is not defined.")
    assert refused("rubbish.war") == (500, "InvalidWorkflowException", "Workflow name is not defined.")
    missing = "WorkflowNotFoundException"
    assert refused("none.war") == (404, missing, "Workflow not found in workflow store: none.war")
    assert refused("folder") == (404, missing, "Workflow not found at: folder")
    assert refused("") == (404, missing, "Workflow not found at: ")
    assert refused("../x.war") == (404, missing, "Relative path is not allowed in url: ../x.war")
    assert refused("a\0b")[:2] == (404, missing)
    assert refused("x" * 5000)[:2] == (404, missing)
    url = "http://127.0.0.1:9/x.war"
    assert refused(url) == (404, missing, f"Given URL {url} does not match any allowed URL(s)")
    reply = running.manage("POST", "/workflows")
    assert problem(reply) == (400, "BadRequestException", "Parameter url is required.")


def test_workflow_from_a_url_goes_with_its_file(place, server, tmp_path):
    with serving_files() as web:
        web.files["/down.war"] = pack_flow(tmp_path, "down", {"begin": []}).read_bytes()
        web.files["/bad.war"] = pack_flow(tmp_path, "bad", {"begin": ["begin"]}).read_bytes()
        running = server(allowed_urls=[rf"{web.url}/.*"], allow_private_urls=True)
        assert running.register_workflow(f"{web.url}/down.war").status == 200
        assert predict(running, "down").text == "begin(x)"
        assert running.manage("GET", "/workflows/down").json[0]["workflowUrl"] == f"{web.url}/down.war"
        taken = running.register_workflow(f"{web.url}/down.war", workflow_name="other")
        assert problem(taken) == (500, "InternalServerException", "Model file already exists down.war")
        assert running.register_workflow(f"{web.url}/bad.war").status == 400
        failed = running.register_workflow(f"{web.url}/none.war")
        text = f"Failed to download archive from: {web.url}/none.war"
        assert problem(failed) == (400, "DownloadArchiveException", text)
        assert os.listdir(place / "flows") == ["down.war"]
        assert running.manage("DELETE", "/workflows/down").status == 200
        assert os.listdir(place / "flows") == []


def test_node_that_was_unregistered_is_named(place, server):
    flow(place, "seq", {"begin": ["m1"]}, {"m1": MODEL, "retry-attempts": 0})
    running = server()
    assert running.register_workflow("seq.war").status == 200
    assert running.manage("DELETE", "/models/seq__m1").status == 200
    reply = predict(running, "seq")
    assert problem(reply) == (500, "InternalServerException", "Error executing m1")
    assert "Model not found: seq__m1" in reply.cause
    assert running.manage("DELETE", "/workflows/seq").status == 200
    assert json.loads(running.manage("GET", "/models").body) == {"models": []}


VENV = os.environ.get("FLAMBEAU_TORCHSERVE_VENV")


@pytest.mark.timeout(240)
@pytest.mark.skipif(not VENV, reason="FLAMBEAU_TORCHSERVE_VENV does not name an environment with TorchServe")
def test_same_answers_as_torchserve(place, server):
    patient = {"retry-attempts": 0, "timeout-ms": 60_000}  # each node is a process of its own, also on a busy machine
    flow(place, "join", {"begin": ["left", "m1"], "left": ["report"], "m1": ["report"]}, {**patient, "m1": MODEL})
    flow(place, "leaves", {"begin": ["left", "right"]}, patient)
    flow(place, "failing", {"begin": ["fails"]}, patient)
    flow(place, "nomodel", {"begin": ["m1"]}, {"m1": {"url": "nothere.mar"}})
    flow(place, "starts", {"left": ["report"], "right": ["report"]})
    venv = Path(VENV)
    (place / "empty").mkdir()
    theirs = CommandServer(
        [str(venv / "bin" / "torchserve")],
        place / "theirs",
        place / "models",
        [f"workflow_store={place / 'flows'}"],
        {**torchserve_environment(venv), "TEMP": str(place / "empty")},
    )
    try:
        theirs.wait_for_models(["flow_model"], timeout=120)
        ours = server()
        for ask in (register_all, look_at_all, run_all):
            for our, their in zip(ask(ours), ask(theirs), strict=True):
                assert our == their
    finally:
        theirs.stop()


def without_cause(reply):
    """An answer, less what only this server tells."""
    document = reply.json
    if isinstance(document, dict):
        document.pop("cause", None)
    return reply.status, document


def register_all(running):
    for name in ("join", "leaves", "failing", "nomodel", "starts", "missing", "join"):
        yield without_cause(running.manage("POST", f"/workflows?url={name}.war", timeout=120))


def look_at_all(running):
    for path in ("", "?limit=2", "/join", "/leaves", "/none"):
        yield without_cause(running.manage("GET", f"/workflows{path}"))
    node = running.describe("join__m1")
    yield {key: node[key] for key in ("modelUrl", "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")}


def run_all(running):
    for name in ("join", "leaves", "failing", "none"):
        for body, headers in ((b"x", {}), (b'{"k": 1}', {"content_type": "application/json"})):
            reply = predict(running, name, body, timeout=120, **headers)
            yield name, reply.headers["content-type"], without_cause(reply)
    for _ in range(2):
        yield without_cause(running.manage("DELETE", "/workflows/join", timeout=120))


def test_options_describes_and_runs_nothing(place, server):
    flow(place, "once", {"begin": []})
    running = server()
    assert running.register_workflow("once.war").status == 200, running.log
    reply = running.request("OPTIONS", "/wfpredict/once", b"x")
    assert reply.json["info"]["title"] == "RESTful API for: once"
    assert running.request("OPTIONS", "/wfpredict/nobody").status == 404
    assert (running.request("OPTIONS", "/v2/repository/index").status, predict(running, "once").text) == (
        200,
        "begin(x)",
    )
    assert running.request("OPTIONS", "/v2/repository/index").body == b""
