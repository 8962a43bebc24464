"""Errors of `flambeau serve`: the cause in the message, a type that fits, and no frames of our own."""

from __future__ import annotations

import json

import pytest

from flambeau.config.server import ErrorStyle
from flambeau.errors import BadRequest, FileTaken, InvalidKey, JobFailed, WorkerDied
from flambeau.frontend.http.errors import message_of, status_and_type
from support.grpc_calls import Client, grpc_flags, refusal
from support.running import RunningServer

HANDLER = """
from ts.utils.util import PredictionException
class Mine:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        body = data[0]["body"]
        if body.get("refuse"):
            raise PredictionException("no such customer", body["refuse"])
        return [{"length": len(body["text"])}]
"""
JSON = {"content-type": "application/json"}
GRPC = grpc_flags()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    (folder / "mine.py").write_text(HANDLER)
    running = RunningServer(folder / "log", str(folder / "mine.py"), *GRPC, "--model-store", str(folder)).wait_ready()
    yield running
    running.stop()


def test_message_holds_the_cause_and_the_traceback_has_the_authors_frames_only(server):
    reply = server.predict("mine", {"words": "x"})
    assert (reply.status, reply.message) == (
        503,
        "Prediction failed: KeyError: 'text' (mine.py:10): the body of the request has no 'text'",
    )
    assert "mine.py" in reply.cause
    assert "/flambeau/" not in reply.cause


def test_grpc_details_hold_the_cause_too(server):
    client = Client(int(GRPC[1]), int(GRPC[3]))
    code, details = refusal(client.predict, "mine", inputs={"body": b"{}"})
    assert code.name == "UNAVAILABLE"
    assert details.startswith("Prediction failed: AttributeError: 'bytearray' object has no attribute 'get' (mine.py")
    code, details = refusal(client.manage, "RegisterModel", url="org/name")
    assert code.name == "NOT_FOUND"
    assert "if it is a model of the Hugging Face hub, start the server with it" in details
    client.close()


@pytest.mark.parametrize(("status", "kind"), [(404, "ResourceNotFoundException"), (422, "BadRequestException")])
def test_mistake_of_a_client_is_not_called_an_internal_error(server, status, kind):
    reply = server.predict("mine", {"refuse": status})
    assert (reply.status, reply.json["type"], reply.message) == (status, kind, "no such customer")


@pytest.mark.parametrize(
    ("path", "kind", "body", "words"),
    [
        ("/predictions/mine", "application/json", b'{"text": "a",\n "b" 1}', "line 2, column 6"),
        ("/predictions/mine", "", b'{"text": "a"}', "without a content type; add the header content-type: application"),
        ("/predictions/mine", "application/x-www-form-urlencoded", b'{"text": "a"}', "the default of curl -d"),
        ("/v1/models/mine:predict", "application/json", b'{"instances": [}', "line 1, column 16"),
        ("/v2/models/mine/infer", "application/json", b"{", "line 1, column 2"),
        ("/v1/chat/completions", "application/json", b'{"model" "mine"}', "line 1, column 10"),
    ],
)
def test_malformed_json_is_a_400_that_says_where(server, path, kind, body, words):
    reply = server.request("POST", path, body, {"content-type": kind} if kind else {})
    assert reply.status == 400, reply.text
    assert words in reply.text
    assert "cause" not in reply.json


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/predictions/mine", {"text": "a"}),
        ("POST", "/predictions/mine", {}),
        ("POST", "/predictions/none", {}),
        ("POST", "/v1/models/mine:predict", {"instances": [{"text": "a"}]}),
        ("POST", "/v1/chat/completions", {}),
        ("GET", "/v1/models", None),
        ("GET", "/v2", None),
        ("GET", "/ping", None),
        ("GET", "/nowhere", None),
    ],
)
def test_answer_ends_with_a_newline(server, method, path, body):
    reply = server.request(method, path, None if body is None else json.dumps(body).encode(), JSON)
    assert reply.body.endswith(b"\n"), reply.body


def test_plain_style_is_one_of_two():
    plain, matched = ErrorStyle(is_plain=True), ErrorStyle()
    hidden = ErrorStyle(is_plain=True)
    shown = ErrorStyle(is_plain=True, has_details=True)
    secret = JobFailed("Prediction failed", reason="KeyError: 'the password'")
    assert message_of(secret, hidden) == "Prediction failed: KeyError"
    assert message_of(secret, shown) == "Prediction failed: KeyError: 'the password'"
    assert message_of(JobFailed("Invalid output", reason="handle (a.py:1) returned 3"), hidden) == "Invalid output"
    died = WorkerDied(cause="killed by SIGKILL (signal 9)\n  | last words")
    assert message_of(died, matched) == "Worker died."
    assert message_of(died, plain) == "Worker died: killed by SIGKILL (signal 9)"
    failed = JobFailed("Prediction failed", status=429, reason="KeyError: 'a'")
    assert (message_of(failed, plain), message_of(failed, matched)) == (
        "Prediction failed: KeyError",
        "Prediction failed",
    )
    assert [status_and_type(failed, style) for style in (plain, matched)] == [
        (429, "TooManyRequestsException"),
        (429, "InternalServerException"),
    ]
    refused = InvalidKey("Token Authorization failed.", plain="This call needs a key.")
    assert (message_of(refused, plain), status_and_type(refused, plain)[0]) == ("This call needs a key.", 401)
    assert (message_of(refused, matched), status_and_type(refused, matched)[0]) == ("Token Authorization failed.", 400)
    assert status_and_type(FileTaken("m.mar"), plain) == (409, "ConflictStatusException")
    assert status_and_type(BadRequest("x"), plain) == (400, "BadRequestException")
