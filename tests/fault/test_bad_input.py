"""Bad input gets a sentence: no server error, no traceback, no wrong cause, whatever a parameter or a body holds."""

from __future__ import annotations

import json

import pytest
from grpc import StatusCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.archives import pack_handler
from support.bad_input import JSON, body_calls, call, parameter_calls, race
from support.grpc_calls import Client, grpc_flags, refusal
from support.running import RunningServer

SUMMING = """
def handle(data, context):
    if data is None:
        return None
    return [sum(next(iter(row.values()))["values"]) for row in data]
"""
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="x"; filename="f"\r\nContent-Type: application/json\r\n\r\n'
    b"{\r\n--b--\r\n"
)
PATHS = (
    *("/predictions/echo", "/explanations/echo", "/invocations?model_name=echo", "/models/echo/invoke"),
    *("/v1/models/echo:predict", "/v2/models/echo/infer", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
    *("/wfpredict/nothing", "/v2/repository/index", "/echo/predict"),
)
LIMIT_S = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad-input")
    store = folder / "store"
    store.mkdir()
    pack_handler(store, "echo", version="2.0", file="echo2.mar")
    pack_handler(store, "echo")
    (folder / "summing.py").write_text(SUMMING)
    flags = grpc_flags()
    files = [str(store / "echo.mar"), str(folder / "summing.py")]
    running = RunningServer(folder / "log", *files, "--model-store", str(store), *flags).wait_ready()
    running.grpc, running.store = Client(int(flags[1]), int(flags[3])), store
    yield running
    running.grpc.close()
    running.stop()


@pytest.fixture(autouse=True)
def healthy(server):
    """After each test the server answers, and its log holds no traceback."""
    before = server.log.count("Traceback")
    yield
    assert server.manage("PUT", "/models/echo?min_worker=1&synchronous=true").status == 200
    assert server.predict("echo", b"still there").status == 200
    assert server.log.count("Traceback") == before, server.log


def problem(reply):
    return reply.status, reply.json["type"], reply.message


# ---- management ----


@pytest.mark.parametrize("key", ["min_worker", "max_worker"])
@pytest.mark.parametrize("value", ["abc", "1e3", "2000000000", "-1", "1.5", "99999999999999999999", "1_0"])
def test_number_of_workers_that_is_none_is_named(server, key, value):
    reply = server.manage("PUT", f"/models/echo?{key}={value}")
    text = f"{key} is {value!r}; it must be a whole number from 0 to 10000"
    assert problem(reply) == (400, "BadRequestException", text)


@pytest.mark.parametrize("value", ["abc", "1e3", "-1", "0", "-3", "2000000000"])
def test_batch_size_that_is_none_is_named_in_query_json_and_form(server, value):
    text = f"batch_size is {value!r}; it must be a whole number from 1 to 65536"
    refused = (400, "BadRequestException", text)
    assert problem(server.manage("POST", f"/models?url=echo.mar&batch_size={value}")) == refused
    body = json.dumps({"url": "echo.mar", "batch_size": value}).encode()
    assert problem(server.manage("POST", "/models", body, headers=JSON)) == refused
    fields = {"Content-Type": "application/x-www-form-urlencoded"}
    form = f"url=echo.mar&batch_size={value}".encode()
    assert problem(server.manage("POST", "/models", form, headers=fields)) == refused


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "line 1, column 2"),
        (b'{"url":\n "a" "b"}', "line 2, column 6"),
        (b'{"url":' * 5000, "nested too deeply"),
        (b"[" * 50_000, "nested too deeply"),
        (b"\xff", "byte 1 is not valid UTF-8"),
        (b"[1]", "a JSON object, not a list"),
    ],
)
def test_malformed_json_of_a_registration_names_the_place(server, body, reason):
    reply = server.manage("POST", "/models?url=echo.mar", body, headers=JSON)
    assert (reply.status, reply.json["type"]) == (400, "BadRequestException")
    assert reason in reply.message


@pytest.mark.parametrize("body", [b"", b" \n", b"{}"])
def test_query_counts_if_the_json_body_is_empty(server, body):
    path = "/models?url=echo.mar&model_name=asked"
    assert server.manage("POST", path, body, headers=JSON).status == 200
    assert server.manage("DELETE", "/models/asked").status == 200


def test_form_registers_a_model(server):
    fields = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.manage("POST", "/models", b"url=echo.mar&model_name=formed", headers=fields).status == 200
    assert server.manage("DELETE", "/models/formed").status == 200


def test_no_value_of_a_parameter_is_a_server_error(server):
    document = server.request("OPTIONS", "/", port=server.management_port).json
    num_calls = 0
    for method, path, body in parameter_calls(document):
        reply = call(server, method, path, body, server.management_port)
        assert reply.status < 500, (method, path[:200], body, reply.body)
        num_calls += 1
    assert num_calls > 1000


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_json_of_a_registration_is_a_server_error(server, data):
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=3,
    )
    names = st.sampled_from(["url", "model_name", "handler", "runtime", "batch_size", "initial_workers", "synchronous"])
    document = data.draw(st.dictionaries(names, values, max_size=4))
    reply = server.manage("POST", "/models", json.dumps(document).encode(), headers=JSON, timeout=LIMIT_S)
    assert reply.status in (400, 404), (document, reply.body)


def test_grpc_has_the_same_limits(server):
    manage = server.grpc.manage
    for message, fields in [
        ("RegisterModel", {"url": "echo.mar", "initial_workers": 2_000_000_000}),
        ("RegisterModel", {"url": "echo.mar", "batch_size": 2_000_000_000}),
        ("RegisterModel", {"url": "echo.mar", "handler": "a\0b"}),
        ("RegisterModel", {"url": "echo.mar", "model_name": "n" * 5000}),
        ("ScaleWorker", {"model_name": "echo", "max_worker": 2_000_000_000}),
    ]:
        code, text = refusal(lambda message=message, fields=fields: manage(message, **fields))
        assert code == StatusCode.INVALID_ARGUMENT, (message, fields, text)
        assert "it m" in text  # "it must be …" or "it may have …"


@pytest.mark.parametrize("url", ["%00", "a%00b.mar", "echo.mar%00", "file:///%00", "%ff", "n" * 5000])
def test_location_that_no_file_can_have_is_not_found(server, url):
    assert server.manage("POST", f"/models?url={url}").status == 404


def test_archive_of_nothing_but_nul_is_no_model(server):
    (server.store / "nul.mar").write_bytes(b"\0" * 100)
    reply = server.manage("POST", "/models?url=nul.mar&initial_workers=1")
    assert (reply.status, reply.json["type"]) == (400, "InvalidModelException")
    assert reply.message.startswith("Model name is not defined: ")


def test_racing_calls_get_the_true_cause(server):
    answers = race(server, threads=6, seconds=4)
    assert len(answers) > 20
    for method, path, reply in answers:
        assert not isinstance(reply, Exception), (method, path, reply)
        assert reply.status in (200, 202, 403, 404, 409), (method, path, reply.body)
    assert server.manage("PUT", "/models/summing?min_worker=1&synchronous=true").status == 200
    for version in ("1.0", "2.0"):  # for the tests that follow
        server.manage("POST", f"/models?url=echo{'' if version == '1.0' else '2'}.mar")
    assert server.manage("PUT", "/models/echo/1.0/set-default").status == 200
    assert server.manage("DELETE", "/models/echo/2.0").status == 200


# ---- inference ----


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b'{"values": [1,\n 2', "application/json", "(line 2, column 3)"),
        (b"", "application/json", "it is empty"),
        (b"\xff", "application/json", "byte 1 is not valid UTF-8"),
        (b"[" * 100_000, "application/json; charset=utf-8", "nested too deeply"),
        (b"\xff", "text/plain", "byte 1 is not valid UTF-8"),
        (FORM, "multipart/form-data; boundary=b", "x was sent as application/json"),
    ],
)
def test_malformed_body_is_the_client_s_error_where_the_handler_cannot_use_it(server, body, kind, reason):
    reply = server.predict("summing", body, kind=kind)
    assert (reply.status, reply.json["type"]) == (400, "BadRequestException"), reply.body
    assert reason in reply.message
    assert "cause" not in reply.json


def test_handler_that_takes_bytes_still_gets_a_malformed_body(server):
    assert server.predict("echo", b"{", kind="application/json").json["row"] == {"body": ["bytearray", "{"]}


def test_malformed_request_of_a_batch_fails_alone(server):
    assert server.predict("summing", {"values": [1, 2]}).json == 3
    replies = server.at_once(
        lambda body: server.predict("summing", body, kind="application/json"), [b"{", b'{"values": [4]}'] * 4
    )
    assert [reply.result().status for reply in replies] == [400, 200] * 4


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=b"),
        (b"a=1&" * 1001, "application/x-www-form-urlencoded"),
    ],
)
def test_form_error_is_a_bad_request(server, body, kind):
    assert server.predict("echo", body, kind=kind).json["type"] == "BadRequestException"


def test_no_body_of_any_type_is_a_server_error(server):
    for path, body, headers in body_calls(PATHS):
        reply = server.request("POST", path, body, headers, timeout=LIMIT_S)
        assert reply.status < 500, (path, body[:30], headers, reply.body[:500])
