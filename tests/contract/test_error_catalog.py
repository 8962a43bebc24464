"""Every error that clients can meet: status, code, type and message, as TorchServe has them.

The table is checked against this server, and, where FLAMBEAU_TORCHSERVE_VENV names an environment with TorchServe,
against TorchServe itself.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from flambeau.config.server import ServerConfig
from support.archives import pack_handler
from support.configured import ConfiguredServer
from support.running import HANDLERS
from support.torchserve import CommandServer, torchserve_environment

VENV = os.environ.get("FLAMBEAU_TORCHSERVE_VENV")
NO_PATH = "Requested resource is not found, please refer to API document."
NO_METHOD = "Requested method is not allowed, please refer to API document."
NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence "
    "inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
JSON = {"Content-Type": "application/json"}
P, M = "inference", "management"

OUR_OWN = b"cuda code"  # TorchServe answers another status
# (listener, method, path, body, status, type, message); models: echo, erring, and idle and m, which have no workers
ROWS = [
    # paths and methods
    (P, "GET", "/", None, 405, "MethodNotAllowedException", NO_METHOD),
    (M, "GET", "/", None, 405, "MethodNotAllowedException", NO_METHOD),
    (P, "GET", "/nowhere", None, 404, "ResourceNotFoundException", NO_PATH),
    (M, "GET", "/nowhere", None, 404, "ResourceNotFoundException", NO_PATH),
    (M, "GET", "/token", None, 404, "ResourceNotFoundException", NO_PATH),
    (P, "POST", "/predictions", None, 404, "ResourceNotFoundException", NO_PATH),
    (P, "POST", "/explanations", None, 404, "ResourceNotFoundException", NO_PATH),
    (P, "POST", "/models/echo", None, 404, "ResourceNotFoundException", NO_PATH),
    (M, "PUT", "/models/m/1.0/other", None, 404, "ResourceNotFoundException", NO_PATH),
    (M, "PATCH", "/models", None, 405, "MethodNotAllowedException", NO_METHOD),
    (M, "DELETE", "/models", None, 405, "MethodNotAllowedException", NO_METHOD),
    (M, "POST", "/models/m", None, 405, "MethodNotAllowedException", NO_METHOD),
    (M, "POST", "/v1/models/m", None, 405, "MethodNotAllowedException", NO_METHOD),
    # predictions
    (P, "POST", "/predictions/nobody", b"x", 404, "ModelNotFoundException", "Model not found: nobody"),
    (P, "POST", "/explanations/nobody", b"x", 404, "ModelNotFoundException", "Model not found: nobody"),
    (P, "POST", "/nobody/predict", b"x", 404, "ModelNotFoundException", "Model not found: nobody"),
    (P, "POST", "/models/nobody/invoke", b"x", 404, "ModelNotFoundException", "Model not found: nobody"),
    (P, "POST", "/v1/models/nobody:predict", b"x", 404, "ModelNotFoundException", "Model not found: nobody"),
    (P, "OPTIONS", "/predictions/nobody", None, 404, "ModelNotFoundException", "Model not found: nobody"),
    (
        P,
        "POST",
        "/predictions/echo/7",
        b"x",
        404,
        "ModelVersionNotFoundException",
        "Model version: 7 does not exist for model: echo",
    ),
    (P, "POST", "/invocations", b"x", 400, "BadRequestException", "Parameter model_name is required."),
    (P, "POST", "/predictions/idle", b"x", 503, "ServiceUnavailableException", f'Model "idle" {NO_WORKER}'),
    (
        P,
        "POST",
        "/predictions/idle/1.0",
        b"x",
        503,
        "ServiceUnavailableException",
        f'Model "idle" Version 1.0" {NO_WORKER}',
    ),
    # what handlers do
    (P, "POST", "/predictions/erring", b"memory", 507, "InternalServerException", "Out of resources"),
    (P, "POST", "/predictions/erring", b"cuda", 507, "InternalServerException", "Out of resources"),
    # A deliberate difference (docs/migrate.md): only a lack of memory is reported as one.
    (P, "POST", "/predictions/erring", OUR_OWN, 503, "InternalServerException", "Prediction failed"),
    (P, "POST", "/predictions/erring", b"prediction", 418, "InternalServerException", "no such thing"),
    (P, "POST", "/predictions/erring", b"too large", 507, "InternalServerException", "too large for me"),
    (P, "POST", "/predictions/erring", b"raise", 503, "InternalServerException", "Prediction failed"),
    (P, "POST", "/predictions/erring", b"no list", 503, "InternalServerException", "Invalid model predict output"),
    (
        P,
        "POST",
        "/predictions/erring",
        b"mismatch",
        503,
        "InternalServerException",
        "number of batch response mismatched",
    ),
    (
        P,
        "POST",
        "/predictions/erring",
        b"object",
        503,
        "InternalServerException",
        "Unsupported model output data type.",
    ),
    (P, "POST", "/predictions/erring", b"die", 500, "InternalServerException", "Worker died."),
    # registration
    (M, "POST", "/models", None, 400, "BadRequestException", "Parameter url is required."),
    (M, "POST", "/models?url=", None, 404, "ModelNotFoundException", "empty url"),
    (M, "POST", "/models?url=no.mar", None, 404, "ModelNotFoundException", "Model not found at: no.mar"),
    (
        M,
        "POST",
        "/models?url=..%2Fm.mar",
        None,
        404,
        "ModelNotFoundException",
        "Relative path is not allowed in url: ../m.mar",
    ),
    (
        M,
        "POST",
        "/models?url=other.mar&runtime=cobol",
        None,
        400,
        "BadRequestException",
        "Invalid RuntimeType value: cobol",
    ),
    (
        M,
        "POST",
        "/models?url=echo.mar",
        None,
        409,
        "ConflictStatusException",
        "Model version 1.0 is already registered for model echo",
    ),
    (
        M,
        "POST",
        "/models?url=broken.mar&initial_workers=1",
        None,
        500,
        "InternalServerException",
        "Failed to start workers for model broken version: 1.0",
    ),
    # the others
    (M, "GET", "/models/nobody", None, 404, "ModelNotFoundException", "Model not found: nobody"),
    (
        M,
        "GET",
        "/models/m/9",
        None,
        404,
        "ModelVersionNotFoundException",
        "Model version: 9 does not exist for model: m",
    ),
    (
        M,
        "GET",
        "/models/idle?customized=true",
        None,
        503,
        "ServiceUnavailableException",
        'Model "idle" has no worker to serve describe request. Please use scale workers API to add workers.',
    ),
    (M, "GET", "/v1/models/nobody", None, 404, "ModelNotFoundException", "Model not found: nobody"),
    (M, "PUT", "/models/nobody?min_worker=1", None, 404, "ModelNotFoundException", "Model not found: nobody"),
    (
        M,
        "PUT",
        "/models/m/9?min_worker=1",
        None,
        404,
        "ModelVersionNotFoundException",
        "Model version: 9 does not exist for model: m",
    ),
    (
        M,
        "PUT",
        "/models/m?min_worker=2&max_worker=1",
        None,
        400,
        "BadRequestException",
        "max_worker cannot be less than min_worker.",
    ),
    (
        M,
        "PUT",
        "/models/m/9/set-default",
        None,
        404,
        "ModelVersionNotFoundException",
        "Model version 9 does not exist for model m",
    ),
    (M, "PUT", "/models/nobody/1/set-default", None, 404, "ModelNotFoundException", "Model not found: nobody"),
    (M, "DELETE", "/models/nobody", None, 404, "ModelNotFoundException", "Model not found: nobody"),
    (
        M,
        "DELETE",
        "/models/m",
        None,
        403,
        "InvalidModelVersionException",
        "Cannot remove default version for model m",
    ),
    (
        M,
        "DELETE",
        "/models/m/9",
        None,
        404,
        "ModelVersionNotFoundException",
        "Model version: 9 does not exist for model: m",
    ),
]


def pack_all(store):
    for handler in ("echo", "erring", "broken"):
        pack_handler(store, handler)
    for name in ("idle", "other"):
        pack_handler(store, "echo", name=name)
    for version in ("1.0", "2.0"):
        pack_handler(store, "echo", name="m", version=version, file=f"m{version[0]}.mar")


def register_all(server):
    for query in ("echo.mar&initial_workers=1", "erring.mar&initial_workers=1", "idle.mar", "m1.mar", "m2.mar"):
        workers = "" if "initial" in query else "&initial_workers=0"
        assert server.manage("POST", f"/models?url={query}{workers}").status == 200


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    store = folder / "store"
    store.mkdir()
    pack_all(store)
    with ConfiguredServer(folder, model_store=store, error_details=False) as server:
        register_all(server)
        yield server


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    store = folder / "store"
    store.mkdir()
    pack_all(store)
    command, environment = [str(Path(VENV) / "bin" / "torchserve")], torchserve_environment(Path(VENV))
    lines = ["enable_model_api=true"]
    server = CommandServer(command, folder / "server", store, lines, environment, models=None)
    try:
        server.until(lambda: "Model server started." in server.log, 60)
        register_all(server)
        yield server
    finally:
        server.stop()


def ask(server, row):
    listener, method, path, body, *expected = row
    port = server.port if listener == P else server.management_port
    reply = server.request(method, path, body, port=port)
    document = reply.json
    assert document.pop("code") == reply.status
    return [reply.status, document.pop("type"), document.pop("message")], expected, document


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]} {row[2]} {(row[3] or b'').decode()}")
def test_error_is_answered_as_the_table_says(ours, row):
    found, expected, more = ask(ours, row)
    assert found == expected
    assert more == {}
    if row[3] == b"die":
        ours.until(lambda: ours.request("POST", "/predictions/erring", b"fine").status == 200)


@pytest.mark.skipif(not VENV, reason="FLAMBEAU_TORCHSERVE_VENV does not name an environment with TorchServe")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]} {row[2]} {(row[3] or b'').decode()}")
def test_torchserve_answers_as_the_table_says(theirs, row):
    found, expected, _ = ask(theirs, row)
    assert found == ([507, "InternalServerException", "Out of resources"] if row[3] == OUR_OWN else expected)


def test_handlers_own_status_is_no_error_document(ours):
    reply = ours.request("POST", "/predictions/erring", b"own status")
    assert (reply.status, reply.body) == (507, b"Invalid response")


def test_undecodable_http(ours):
    with socket.create_connection(("127.0.0.1", ours.port)) as client:
        client.sendall(b"\x00\x01\x02\r\n\r\n")
        reply = client.recv(65536)
    assert reply.startswith(b"HTTP/1.1 400")
    assert b'"BadRequestException"' in reply
    assert b'"Invalid HTTP message."' in reply


def test_model_control_is_refused_unless_it_is_on(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    pack_handler(store, "echo")
    with ConfiguredServer(tmp_path, store / "echo.mar", model_store=store, model_api=False) as server:
        refused = {"code": 405, "type": "MethodNotAllowedException", "message": NO_METHOD}
        assert server.manage("POST", "/models?url=echo.mar").json == refused
        assert server.manage("POST", "/models", b'{"url": "echo.mar"}', headers=JSON).json == refused
        assert server.manage("POST", "/models", b"{no", headers=JSON).json == refused
        assert server.manage("DELETE", "/models/echo").json == refused
        assert server.manage("DELETE", "/models/echo/1.0").json == refused
        assert server.manage("PUT", "/models/echo?min_worker=1&synchronous=true").status == 200
        assert server.manage("GET", "/models/echo").status == 200


def test_queue_full_extends_the_known_text(tmp_path):
    with ConfiguredServer(tmp_path, HANDLERS / "faulty.py", job_queue_size=1) as server:
        futures = server.at_once(lambda order: server.predict("faulty", order), [{"do": "sleep", "s": 1}] * 12)
        refused = [reply for reply in (future.result() for future in futures) if reply.status == 503]
    assert refused
    assert all(reply.message.startswith(f'Model "faulty" {NO_WORKER}') for reply in refused)
    assert all(reply.json["type"] == "ServiceUnavailableException" for reply in refused)


def test_server_starts_with_a_store_that_holds_a_broken_archive(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    pack_handler(store, "echo")
    (store / "rubbish.mar").write_bytes(b"this is no zip")
    with ConfiguredServer(tmp_path, store, model_store=store, allow_missing=True) as server:
        assert server.predict("echo", {}).status == 200
        assert server.manage("POST", "/models?url=rubbish.mar&model_name=empty").status == 200
        assert "rubbish.mar is neither a zip nor a gzipped tar" in server.log


def test_defaults_are_those_of_torchserve():
    config = ServerConfig()
    assert (config.inference.port, config.management.port, config.max_request_bytes) == (8080, 8081, 6553500)
