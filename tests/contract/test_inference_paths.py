"""The older and foreign paths that predict: SageMaker's, the legacy ones, and what each hands to the handler."""

from __future__ import annotations

import pytest

from support.archives import pack_handler

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def server(start):
    return start("echo.py").wait_ready()


def test_query_parameters_are_inputs_on_the_old_paths_only(server):
    for path in ("/models/echo/invoke", "/echo/predict", "/echo/1.0/predict", "/invocations"):
        row = server.request("POST", f"{path}?p=1&p=2&q=a%20b", b"a=1", FORM).json["row"]
        assert row == {"p": ["bytearray", "2"], "q": ["bytearray", "a b"], "a": ["bytearray", "1"]}
    assert server.request("POST", "/predictions/echo?p=1", b"a=1", FORM).json["row"] == {"a": ["bytearray", "1"]}


def test_body_wins_over_the_query_and_an_empty_one_is_there_too(server):
    assert server.request("POST", "/echo/predict?a=0", b"a=1", FORM).json["row"] == {"a": ["bytearray", "1"]}
    row = server.request("POST", "/echo/predict?p=1").json["row"]
    assert row == {"p": ["bytearray", "1"], "body": ["bytearray", ""]}
    row = server.request("POST", "/echo/predict?p=1", b"hi", {"Content-Type": "text/plain"}).json["row"]
    assert row == {"p": ["bytearray", "1"], "body": "hi"}


def test_any_method_predicts(server):
    for method in ("GET", "PUT", "POST", "PATCH", "DELETE"):
        assert server.request(method, "/predictions/echo/").status == 200
        assert server.request(method, "/models/echo/invoke/").status == 200


def test_options_describes_the_model_instead(server):
    for path in ("/predictions/echo", "/models/echo/invoke", "/echo/predict", "/v1/models/echo:predict"):
        document = server.request("OPTIONS", path).json
        assert (document["info"]["title"], document["info"]["version"]) == ("RESTful API for: echo", "1.0.0")


@pytest.mark.parametrize(
    "path", ["/models", "/models/echo", "/models/echo/other", "/predictions", "/echo", "/a/b/c/predict"]
)
def test_paths_that_lead_nowhere(server, path):
    reply = server.request("GET", path)
    assert (reply.status, reply.json["type"]) == (404, "ResourceNotFoundException")


def test_invocations_find_their_model(start, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for name in ("one", "two"):
        pack_handler(store, "echo", name=name)
    server = start(store).wait_ready()
    reply = server.request("POST", "/invocations", b"a=1", FORM)
    assert (reply.status, reply.message) == (400, "Parameter model_name is required.")
    assert server.request("POST", "/invocations?model_name=one", b"a=1", FORM).status == 200
    assert server.request("POST", "/invocations", b"a=1&model_name=two", FORM).status == 200
    multipart = b'--b\r\nContent-Disposition: form-data; name="model_name"\r\n\r\ntwo\r\n--b--\r\n'
    reply = server.request("POST", "/invocations", multipart, {"Content-Type": "multipart/form-data; boundary=b"})
    assert reply.json["row"] == {"model_name": ["bytearray", "two"]}
    assert server.request("POST", "/invocations?model_name=nobody").message == "Model not found: nobody"
    broken = server.request(
        "POST", "/invocations", b"--b\r\nbroken", {"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert broken.status == 400
