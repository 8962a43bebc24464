"""Token authorization over HTTP: which key opens which path, and what needs none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from flambeau.config.server import Address, KeysConfig
from support.configured import ConfiguredServer
from support.running import HANDLERS, free_ports

REFUSED = {
    "code": 400,
    "type": "InvalidKeyException",
    "message": "Token Authorization failed. Token either incorrect, expired, or not provided correctly",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def server(folder):
    with ConfiguredServer(folder, HANDLERS / "echo.py", keys=KeysConfig(is_on=True)) as running:
        yield running


def bearer(folder, kind):
    return {"Authorization": "Bearer " + json.loads((folder / "key_file.json").read_text())[kind]["key"]}


@pytest.mark.parametrize(
    "path",
    ["/ping", "/predictions/echo", "/predictions/nobody", "/v1/models/echo:predict", "/nowhere", "/echo/predict"],
)
def test_inference_needs_the_inference_key(server, folder, path):
    assert server.request("GET", path).json == REFUSED
    for wrong in ({"Authorization": "Bearer x"}, bearer(folder, "management"), bearer(folder, "API")):
        assert server.request("GET", path, headers=wrong).json == REFUSED
    assert server.request("GET", path, headers=bearer(folder, "inference")).status in (200, 404) or "v1" in path


@pytest.mark.parametrize(
    "path", ["/models", "/models/echo", "/models/tokenizer", "/models?url=/token", "/v1/models/echo"]
)
def test_management_needs_the_management_key(server, folder, path):
    assert server.manage("GET", path).json == REFUSED
    assert server.manage("GET", path, headers=bearer(folder, "inference")).json == REFUSED
    assert server.manage("GET", path, headers=bearer(folder, "management")).status in (200, 404)


def test_descriptions_probes_and_metrics_need_none(server):
    for path in ("/livez", "/readyz", "/startupz", "/api-description"):
        assert server.request("GET", path).status == 200
    assert server.request("OPTIONS", "/").status == 200
    assert server.manage("OPTIONS", "/").status == 200
    assert server.request("GET", "/metrics", port=server.metrics_port).status == 200


def test_api_key_renews_a_key_and_the_old_one_ends_at_once(server, folder):
    old = bearer(folder, "inference")
    reply = server.manage("GET", "/token?type=inference", headers=bearer(folder, "API"))
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"\n", "application/json")
    assert server.predict("echo", {}, headers=old).json == REFUSED
    assert server.predict("echo", {}, headers=bearer(folder, "inference")).status == 200


@pytest.mark.parametrize("query", ["", "?type=", "?type=API", "?type=other"])
def test_renewal_that_makes_no_sense_is_refused(server, folder, query):
    message = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"
    for headers in (bearer(folder, "API"), bearer(folder, "management"), {}):
        reply = server.manage("GET", f"/token{query}", headers=headers)
        assert reply.json == {"code": 400, "type": "InvalidKeyException", "message": message}


def test_only_the_exact_path_renews(server, folder):
    reply = server.manage("GET", "/token/inference?type=inference", headers=bearer(folder, "API"))
    assert reply.status == 404


def test_expired_key_is_refused(tmp_path):
    keys = KeysConfig(is_on=True, expiry_s=0)
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", keys=keys) as server:
        assert server.predict("echo", {}, headers=bearer(tmp_path, "inference")).json == REFUSED


def test_supplied_keys_are_used_and_ping_may_be_let_through(tmp_path):
    keys = KeysConfig(is_on=True, ping_needs_key=False)
    own = {"FLAMBEAU_INFERENCE_KEY": "i" * 40, "FLAMBEAU_MANAGEMENT_KEY": "m" * 40, "FLAMBEAU_API_KEY": "a" * 40}
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", keys=keys, env=own) as server:
        assert server.request("GET", "/ping").status == 200
        assert server.predict("echo", {}).json == REFUSED
        assert server.predict("echo", {}, headers={"Authorization": "Bearer " + "i" * 40}).status == 200
        list_models = ["models", "ls", "--json", "--url", server.management_url]
        command = [sys.executable, "-m", "flambeau.cli.main", *list_models]
        assert b"Token Authorization failed" in subprocess.run(command, capture_output=True).stderr
        done = subprocess.run(command, capture_output=True, env={**os.environ, **own})
        assert b'"echo"' in done.stdout, done.stderr


def test_metrics_may_need_a_key_and_probes_beside_them_never_do(tmp_path):
    keys = KeysConfig(is_on=True, metrics_needs_key=True)
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", keys=keys) as server:

        def status(path, **headers):
            return server.request("GET", path, port=server.metrics_port, headers=headers).status

        assert (status("/metrics"), status("/metrics", Authorization="Bearer wrong")) == (400, 400)
        assert status("/metrics", **bearer(tmp_path, "inference")) == 200
        assert status("/livez") == 200


def test_without_authorization_there_is_no_token_api(start):
    server = start("echo.py").wait_ready()
    assert server.manage("GET", "/token?type=inference").status == 404
    assert server.predict("echo", {}, headers={"Authorization": "Bearer x"}).status == 200


def test_one_port_for_both_apis_keeps_their_keys_apart(tmp_path):
    address = Address(port=free_ports(1)[0])
    settings = {"inference": address, "management": address, "metrics": address, "keys": KeysConfig(is_on=True)}
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", **settings) as server:
        inference, management = bearer(tmp_path, "inference"), bearer(tmp_path, "management")
        for path in ("/models", "/models/echo", "/models/echo/1.0"):
            assert server.request("GET", path, headers=management).status == 200
            assert server.request("GET", path, headers=inference).json == REFUSED
        assert server.request("PUT", "/models/echo/1.0?min_worker=1&synchronous=true", headers=management).status == 200
        for path in ("/ping", "/predictions/echo", "/models/echo/invoke", "/v1/models/echo"):
            assert server.request("GET", path, headers=inference).status == 200
            assert server.request("GET", path, headers=management).json == REFUSED
        assert server.request("GET", "/token?type=management", headers=bearer(tmp_path, "API")).status == 200
        assert b"flambeau_workers_ready" in server.request("GET", "/metrics").body


def test_preflight_needs_no_key_and_runs_nothing(tmp_path):
    cors = (("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Methods", "*"))
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", keys=KeysConfig(is_on=True), cors=cors) as server:
        for path in ("/predictions/echo", "/predictions/nobody", "/wfpredict/any", "/v2/repository/index", "/v2"):
            reply = server.request("OPTIONS", path)
            assert (reply.status, reply.body) == (200, b"")
            assert reply.headers["access-control-allow-origin"] == "*"
        for path in ("/models", "/models/echo", "/models/nobody", "/workflows"):
            assert (server.manage("OPTIONS", path).status, server.manage("OPTIONS", path).body) == (200, b"")
        described = server.request("OPTIONS", "/predictions/echo", headers=bearer(tmp_path, "inference"))
        assert described.json["info"]["title"] == "RESTful API for: echo"
        assert server.request("OPTIONS", "/predictions/echo", headers={"Authorization": "Bearer x"}).json == REFUSED


def first_answer(port, message):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.settimeout(20)
        client.sendall(message)
        return client.recv(65536)


def test_large_body_is_refused_before_it_is_sent_unless_it_has_a_key(server, folder):
    head = b"POST /predictions/echo HTTP/1.1\r\nContent-Type: application/octet-stream\r\n"
    size = b"Content-Length: 5000000\r\n"
    for path in (b"/predictions/echo", b"/predictions/nobody", b"/livez", b"/", b"/nowhere"):
        refusal = first_answer(server.port, head.replace(b"/predictions/echo", path) + size + b"\r\nx")
        assert refusal.startswith(b"HTTP/1.1 400"), refusal
        assert b"connection: close" in refusal
    assert first_answer(server.metrics_port, b"POST /metrics HTTP/1.1\r\n" + size + b"\r\nx").startswith(
        b"HTTP/1.1 400"
    )
    assert first_answer(server.management_port, b"POST /models HTTP/1.1\r\n" + size + b"\r\n").startswith(
        b"HTTP/1.1 400"
    )
    waits = first_answer(server.port, head + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert b"InvalidKeyException" in waits
    assert b"100 Continue" not in waits
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n20000\r\n" + b"x" * 0x20000
    assert first_answer(server.port, chunked).startswith(b"HTTP/1.1 400")
    key = f"Authorization: {bearer(folder, 'inference')['Authorization']}\r\n".encode()
    assert b"100 Continue" in first_answer(server.port, head + key + b"Expect: 100-continue\r\n" + size + b"\r\n")
    whole = server.request("POST", "/predictions/echo", b"x" * 1_000_000, bearer(folder, "inference"))
    assert whole.status == 200


def test_probes_tell_nothing_that_is_behind_a_key(tmp_path):
    (tmp_path / "secret.py").write_text("raise RuntimeError('password')\n")
    settings = {"keys": KeysConfig(is_on=True), "error_details": False}
    server = ConfiguredServer(tmp_path, tmp_path / "secret.py", **settings)
    try:
        server.until(lambda: "password" in server.log and is_listening(server.port), timeout=30)
        for path in ("/readyz", "/startupz"):
            assert [*server.request("GET", path).json] == ["status"]
            shown = server.request("GET", path, None, bearer(tmp_path, "inference")).json["models"]
            assert [model["modelName"] for model in shown] == ["secret"]
    finally:
        server.stop()


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
