"""gRPC management: texts, statuses, keys."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from grpc import StatusCode

from flambeau.config.server import Address, GrpcConfig, KeysConfig, Tls
from support.archives import pack_handler
from support.configured import ConfiguredServer
from support.grpc_calls import Client, grpc_flags, refusal, request, stubs
from support.running import HANDLERS, free_ports, path

MODEL = "org.pytorch.serve.archive.model"
HTTP = "org.pytorch.serve.http"
REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


@pytest.fixture
def managed(start, tmp_path):
    """A server with a store of two versions of one model, and a client."""
    store = tmp_path / "store"
    store.mkdir()
    for version in ("1.0", "2.0"):
        pack_handler(store, "orders", version=version, file=f"orders-{version}.mar")
    pack_handler(store, "broken", file="broken.mar")
    flags = grpc_flags()
    server = start("echo.py", "--model-store", store, *flags).wait_ready()
    client = Client(int(flags[1]), int(flags[3]))
    yield server, client
    client.close()


def test_a_model_lives_its_life(managed):
    _, client = managed
    say = client.manage
    none = 'Model "orders" Version: 1.0 registered with 0 initial workers. '
    assert say("RegisterModel", url="orders-1.0.mar") == none + "Use scale workers API to add workers for the model."
    assert (
        say("ScaleWorker", model_name="orders", min_worker=1, synchronous=True)
        == "Workers scaled to 1 for model: orders"
    )
    assert say("RegisterModel", url="orders-2.0.mar", initial_workers=1, synchronous=True, batch_size=3) == (
        'Model "orders" Version: 2.0 registered with 1 initial workers'
    )
    assert say("RegisterModel", url="orders-1.0.mar", model_name="other", initial_workers=1) == (
        "Processing worker updates..."
    )
    assert say(
        "ScaleWorker", model_name="orders", model_version="2.0", min_worker=2, max_worker=3, synchronous=True
    ) == ("Workers scaled to 2 for model: orders, version: 2.0")
    assert say("ScaleWorker", model_name="orders") == "Processing worker updates..."
    assert say("SetDefault", model_name="orders", model_version="2.0") == (
        'Default version successfully updated for model "orders" to "2.0"'
    )
    assert client.predict(order={"do": "answer", "value": "x"}) == b"x"
    assert say("UnregisterModel", model_name="orders", model_version="1.0") == 'Model "orders" unregistered'
    assert say("UnregisterModel", model_name="orders") == 'Model "orders" unregistered'


def test_describe_and_list_say_what_rest_says(managed):
    server, client = managed
    client.manage("RegisterModel", url="orders-1.0.mar", initial_workers=1, synchronous=True)
    client.manage("RegisterModel", url="orders-2.0.mar")
    over_http = server.manage("GET", "/models/orders/all").json
    over_grpc = json.loads(client.manage("DescribeModel", model_name="orders", model_version="all"))
    for document in (*over_http, *over_grpc):
        for worker in document["workers"]:
            worker.pop("memoryUsage")
    assert over_grpc == over_http
    told = json.loads(client.manage("DescribeModel", model_name="orders", customized=True))
    assert told[0]["customizedMetadata"] == {"I am": "told"}
    assert client.manage("ListModels") == server.manage("GET", "/models").text.rstrip()
    page = json.loads(client.manage("ListModels", limit=1, next_page_token=1))
    assert [model["modelName"] for model in page["models"]] == ["orders"]


@pytest.mark.parametrize(
    ("method", "fields", "code", "details"),
    [
        ("RegisterModel", {}, StatusCode.INVALID_ARGUMENT, f"Parameter url is required.\n{HTTP}.BadRequestException"),
        (
            "RegisterModel",
            {"url": "nothing.mar"},
            StatusCode.NOT_FOUND,
            f"Model not found at: nothing.mar\n{MODEL}.ModelNotFoundException",
        ),
        (
            "RegisterModel",
            {"url": "../orders.mar"},
            StatusCode.NOT_FOUND,
            f"Relative path is not allowed in url: ../orders.mar\n{MODEL}.ModelNotFoundException",
        ),
        (
            "RegisterModel",
            {"url": "orders-1.0.mar", "runtime": "cobol"},
            StatusCode.INVALID_ARGUMENT,
            f"Invalid RuntimeType value: cobol\n{HTTP}.BadRequestException",
        ),
        (
            "RegisterModel",
            {"url": "orders-1.0.mar"},
            StatusCode.ALREADY_EXISTS,
            f"Model version 1.0 is already registered for model orders\n{HTTP}.ConflictStatusException",
        ),
        (
            "RegisterModel",
            {"url": "broken.mar", "initial_workers": 1, "synchronous": True},
            StatusCode.INTERNAL,
            f"Failed to start workers for model broken version: 1.0\n{HTTP}.InternalServerException",
        ),
        (
            "UnregisterModel",
            {"model_name": "orders", "model_version": "1.0"},
            StatusCode.FAILED_PRECONDITION,
            f"Cannot remove default version for model orders\n{HTTP}.InvalidModelVersionException",
        ),
        (
            "UnregisterModel",
            {"model_name": "nobody"},
            StatusCode.NOT_FOUND,
            f"Model not found: nobody\n{MODEL}.ModelNotFoundException",
        ),
        (
            "UnregisterModel",
            {},
            StatusCode.INVALID_ARGUMENT,
            f"Parameter model_name is required.\n{HTTP}.BadRequestException",
        ),
        (
            "DescribeModel",
            {"model_name": "orders", "model_version": "9"},
            StatusCode.NOT_FOUND,
            f"Model version: 9 does not exist for model: orders\n{MODEL}.ModelVersionNotFoundException",
        ),
        (
            "DescribeModel",
            {"model_name": "orders", "customized": True},
            StatusCode.INTERNAL,
            'Model "orders" has no worker to serve describe request. Please use scale workers API to add workers.\n'
            f"{HTTP}.ServiceUnavailableException",
        ),
        (
            "ScaleWorker",
            {"model_name": "orders", "min_worker": 3, "max_worker": 2},
            StatusCode.INVALID_ARGUMENT,
            f"max_worker cannot be less than min_worker.\n{HTTP}.BadRequestException",
        ),
        (
            "ScaleWorker",
            {"model_name": "nobody"},
            StatusCode.NOT_FOUND,
            f"Model not found: nobody\n{MODEL}.ModelNotFoundException",
        ),
        (
            "SetDefault",
            {"model_name": "orders", "model_version": "9"},
            StatusCode.NOT_FOUND,
            f"Model version 9 does not exist for model orders\n{MODEL}.ModelVersionNotFoundException",
        ),
    ],
)
def test_each_error_names_its_cause(managed_orders, method, fields, code, details):
    assert refusal(managed_orders.manage, method, **fields) == (code, details)


@pytest.fixture(scope="module")
def managed_orders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("managed")
    for version in ("1.0", "2.0"):
        pack_handler(folder, "orders", version=version, file=f"orders-{version}.mar")
    pack_handler(folder, "broken", file="broken.mar")
    port, management_port = free_ports(2)
    config = GrpcConfig(inference=Address(port=port), management=Address(port=management_port))
    # Not `flambeau serve`, which adds the cause to the texts.
    server = ConfiguredServer(folder, HANDLERS / "echo.py", grpc=config, model_store=folder).wait_ready()
    client = Client(port, management_port)
    for version in ("1.0", "2.0"):
        client.manage("RegisterModel", url=f"orders-{version}.mar")
    yield client
    client.close()
    server.stop()


def test_a_registration_whose_caller_goes_away_is_finished(managed):
    server, client = managed
    asked = stubs().management_pb2.RegisterModelRequest(url="orders-1.0.mar", initial_workers=1, synchronous=True)
    call = client.management.RegisterModel.future(asked)
    server.until(lambda: "registered orders 1.0" in server.log)  # it has begun, and its worker has not
    call.cancel()
    server.until(lambda: server.manage("GET", "/models/orders").status == 200 and server.worker_pids("orders"))


# ---- keys and switches ----


@pytest.fixture
def configured(tmp_path):
    """Start a server with a configuration of its own; gives it and a client."""
    made = []

    def start_server(*, channel=grpc.insecure_channel, env=None, grpc_options=None, **settings):
        port, management_port = free_ports(2)
        addresses = {"inference": Address(port=port), "management": Address(port=management_port)}
        config = GrpcConfig(**addresses, **(grpc_options or {}))
        server = ConfiguredServer(tmp_path, HANDLERS / "orders.py", env=env, grpc=config, **settings)
        client = Client(port, management_port, channel)
        made.append((server, client))
        return server, client

    yield start_server
    for server, client in made:
        client.close()
        server.stop()


def test_each_port_requires_its_own_key(configured, tmp_path):
    server, client = configured(keys=KeysConfig(is_on=True, file=tmp_path / "keys.json"))
    file = tmp_path / "keys.json"  # empty at first
    keys = server.until(lambda: file.exists() and file.read_text() and json.loads(file.read_text()))
    bearers = {kind: [("authorization", f"Bearer {keys[kind]['key']}")] for kind in ("inference", "management", "API")}
    order = {"do": "answer", "value": "in"}

    server.until(lambda: "Model server started." in server.log)
    assert client.predict(order=order, metadata=bearers["inference"]) == b"in"
    assert "orders" in client.manage("ListModels", metadata=bearers["management"])
    wrong = [None, bearers["API"], [("authorization", "Bearer wrong")], [("authorization", keys["inference"]["key"])]]
    for metadata in (*wrong, bearers["management"]):
        assert refusal(client.predict, order=order, metadata=metadata) == (StatusCode.PERMISSION_DENIED, REFUSED)
    for metadata in (*wrong, bearers["inference"]):
        assert refusal(client.manage, "ListModels", metadata=metadata) == (StatusCode.PERMISSION_DENIED, REFUSED)
    streams = client.inference.StreamPredictions2(iter([request(order=order, sequence_id="s")]), timeout=60)
    assert refusal(lambda: [*streams]) == (StatusCode.PERMISSION_DENIED, REFUSED)


def test_model_api_can_be_switched_off(configured):
    server, client = configured(model_api=False)
    server.until(lambda: "Model server started." in server.log)
    for method, fields in (("RegisterModel", {"url": "x.mar"}), ("UnregisterModel", {"model_name": "orders"})):
        assert refusal(client.manage, method, **fields) == (StatusCode.PERMISSION_DENIED, "Model API disabled")
    assert "orders" in client.manage("ListModels")


@pytest.fixture
def without_grpcio(tmp_path):
    """An environment in which it is not installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "grpc.py").write_text("raise ModuleNotFoundError(\"No module named 'grpc'\", name='grpc')\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{path()}"}


def test_without_grpcio_default_ports_stay_closed_with_one_line(configured, without_grpcio):
    server, _ = configured(env=without_grpcio, grpc_options={"is_optional": True})
    server.until(lambda: "Model server started." in server.log)
    assert server.log.count("pip install flambeau[grpc]") == 1
    assert "gRPC inference" not in server.log  # nothing listens there


def test_without_grpcio_ports_that_were_asked_for_are_an_error(configured, without_grpcio):
    server, _ = configured(env=without_grpcio)
    assert server.process.wait(60) == 1
    assert "ConfigError: gRPC needs packages that are not installed: pip install flambeau[grpc]" in server.log


def test_grpc_is_not_loaded_where_it_is_not_used(start):
    server = start("echo.py").wait_ready()
    with open(f"/proc/{server.process.pid}/maps") as maps:
        assert "cygrpc" not in maps.read()


def test_connections_that_are_old_are_renewed_without_losing_calls(configured):
    options = {"inference_max_age_s": 0.5, "inference_max_age_grace_s": 5.0}
    server, client = configured(grpc_options=options)
    server.until(lambda: "Model server started." in server.log)
    states = []
    client.channel.subscribe(states.append)
    with ThreadPoolExecutor(4) as pool:
        while grpc.ChannelConnectivity.IDLE not in states[1:]:
            calls = [pool.submit(client.predict, order={"do": "answer", "value": "x"}) for _ in range(20)]
            assert {call.result() for call in calls} == {b"x"}


def test_connections_on_which_nothing_is_said_are_closed(configured):
    server, client = configured(request_read_timeout_s=0.5)
    server.until(lambda: "Model server started." in server.log)
    port = int(client.channel._channel.target().decode().rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(300)]
    assert client.predict(order={"do": "answer", "value": "x"}) == b"x"
    for connection in silent:
        with connection:
            while connection.recv(4096):  # its settings, then the end
                pass
    assert client.predict(order={"do": "answer", "value": "x"}) == b"x"


# ---- TLS ----


def certificate(folder):
    """A certificate for this machine that signs itself, and its key."""
    from datetime import UTC, datetime, timedelta
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    tls = Tls(certificate_file=folder / "certificate.pem", private_key_file=folder / "key.pem")
    tls.certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    tls.private_key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return tls


def test_tls_with_pem_files(configured, tmp_path):
    tls = certificate(tmp_path)
    trusted = grpc.ssl_channel_credentials(tls.certificate_file.read_bytes())
    server, client = configured(
        tls=tls, grpc_options={"is_tls": True}, channel=lambda target: grpc.secure_channel(target, trusted)
    )
    server.until(lambda: "Model server started." in server.log)
    assert client.predict(order={"do": "answer", "value": "safe"}) == b"safe"
    assert "orders" in client.manage("ListModels")


def test_clients_without_a_certificate_of_the_named_authority_are_refused(configured, tmp_path):
    made = certificate(tmp_path)
    chain, key = made.certificate_file.read_bytes(), made.private_key_file.read_bytes()
    known = grpc.ssl_channel_credentials(chain, key, chain)
    http = {"inference": Address(port=0, is_tls=True), "management": Address(port=0, is_tls=True), "metrics": None}
    targets = []

    def open_channel(target):
        targets.append(target)
        return grpc.secure_channel(target, known)

    tls = replace(made, client_ca_file=made.certificate_file)
    server, client = configured(tls=tls, grpc_options={"is_tls": True}, channel=open_channel, **http)
    server.until(lambda: "Model server started." in server.log)
    assert client.predict(order={"do": "answer", "value": "safe"}) == b"safe"
    for target in targets:
        with grpc.secure_channel(target, grpc.ssl_channel_credentials(chain)) as bare:
            check = bare.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.RpcError) as refused:
                check(b"", timeout=20)
            assert refused.value.code() == StatusCode.UNAVAILABLE


@pytest.mark.parametrize("is_missing", [True, False])
def test_tls_without_its_files_is_an_error(configured, tmp_path, is_missing):
    named = Tls(certificate_file=tmp_path / "nowhere.pem", private_key_file=tmp_path / "nowhere.pem")
    server, _ = configured(tls=named if is_missing else Tls(), grpc_options={"is_tls": True})
    assert server.process.wait(60) == 1
    expected = "nowhere.pem cannot be read" if is_missing else "gRPC over TLS needs certificate_file"
    assert expected in server.log


def test_tls_with_files_that_are_no_certificate_is_an_error(configured, tmp_path):
    (tmp_path / "junk.pem").write_text("junk")
    junk = Tls(certificate_file=tmp_path / "junk.pem", private_key_file=tmp_path / "junk.pem")
    server, _ = configured(tls=junk, grpc_options={"is_tls": True})
    assert server.process.wait(60) == 1
    assert "PEM" in server.log
