"""`strict_calls=false`, which is `torchserve`'s default: calls are read as TorchServe 0.12 reads them."""

from __future__ import annotations

import json

import pytest
from grpc import StatusCode

from flambeau.config.server import Address, GrpcConfig
from support.archives import pack_handler
from support.configured import ConfiguredServer, problem
from support.grpc_calls import Client, refusal
from support.running import HANDLERS, free_ports

VERSIONS = ("1.11", "1.2.1", "2.0", "10", "0.9")
FORM = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lenient")
    store = folder / "store"
    store.mkdir()
    for version in VERSIONS:
        pack_handler(store, "echo", name="many", version=version, file=f"many-{version}.mar")
    pack_handler(store, "broken")
    pack_handler(store, "echo")
    ports = free_ports(2)
    grpc = GrpcConfig(inference=Address(port=ports[0]), management=Address(port=ports[1]))
    settings = {"strict_calls": False, "allowed_urls": ("file://.*", "https?://.*"), "grpc": grpc}
    with ConfiguredServer(folder, HANDLERS / "echo.py", model_store=store, **settings) as server:
        client = Client(*ports)
        yield server, client
        client.close()


@pytest.fixture(scope="module")
def server(running):
    return running[0]


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ("batch_size=dd", "batchSize", 1),
        ("batch_size=-5", "batchSize", 1),
        ("batch_size=2&max_batch_delay=junk", "batchSize", 2),
        ("initial_workers=-1", "minWorkers", 0),
        ("initial_workers=x&synchronous=-1", "minWorkers", 0),
        ("response_timeout=junk&startup_timeout=-7", "startupTimeout", 120),
    ],
)
def test_parameter_that_is_not_understood_counts_as_absent(server, query, key, value):
    assert server.manage("POST", f"/models?url=echo.mar&model_name=one&{query}").status == 200
    assert server.describe("one")[key] == value
    assert server.manage("DELETE", "/models/one?synchronous=nan&timeout=true").status == 200
    name, _, given = query.rpartition("&")[2].partition("=")
    assert given.startswith("-1") or server.logged(name, repr(given), level="WARNING")


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("min_worker=1&synchronous=Nan", 202),
        ("min_worker=nan&synchronous=nan", 202),
        ("number_gpu=-1", 202),
        ("timeout=-5", 202),
        ("min_worker=-5&max_worker=2", 202),
        ("max_worker=-1", 400),
        ("min_worker=2&max_worker=1", 400),
        ("min_worker=99999", 400),
        ("min_worker=-1", 500),
        ("min_worker=-1&synchronous=true", 500),
    ],
)
def test_scaling(server, query, status):
    assert server.manage("PUT", f"/models/echo?{query}").status == status


def test_runtime_that_is_not_supported_is_reported(server):
    assert server.manage("POST", "/models?url=echo.mar&model_name=native&runtime=LSP").status == 200
    assert server.logged("native asks for the runtime LSP", level="WARNING")
    assert server.manage("DELETE", "/models/native").status == 200


def test_start_that_may_take_no_time_fails(server):
    reply = server.manage("POST", "/models?url=echo.mar&model_name=hasty&initial_workers=1&startup_timeout=0")
    assert problem(reply)[::2] == (500, "Failed to start workers for model hasty version: 1.0")


def test_failed_scaling_names_the_version_of_the_call(server):
    assert server.manage("POST", "/models?url=broken.mar").status == 200
    for path, version in (("/models/broken", "null"), ("/models/broken/1.0", "1.0")):
        reply = server.manage("PUT", f"{path}?min_worker=1&synchronous=true")
        assert problem(reply)[::2] == (500, f"Failed to start workers for model broken version: {version}")


def test_wrong_number_in_a_json_body_is_an_error(server):
    body = json.dumps({"url": "echo.mar", "model_name": "j", "initial_workers": "x"}).encode()
    reply = server.manage("POST", "/models", body, headers={"Content-Type": "application/json"})
    assert (reply.status, "initial_workers" in reply.json["message"]) == (400, True)


def test_all_versions_are_described_in_the_order_that_clients_know(server):
    for version in VERSIONS:
        assert server.manage("POST", f"/models?url=many-{version}.mar").status == 200
    described = server.manage("GET", "/models/many/all").json
    assert [one["modelVersion"] for one in described] == ["1.2.1", "2.0", "1.11", "0.9", "10"]


@pytest.mark.parametrize("path", ["/v1/models/echo:predict", "/v2/models/echo/infer"])
@pytest.mark.parametrize(
    ("body", "kind", "row"),
    [
        (b"data=test", FORM, {"data": ["bytearray", "test"]}),
        (b"hello", "text/plain", {"body": "hello"}),
        (b"\0\1", "application/octet-stream", {"body": ["bytearray", "\0\1"]}),
        (b'{"a": 1}', "application/json", {"body": {"a": 1}}),
        (b" " * 200_000, "application/octet-stream", {"body": ["bytearray", " " * 200_000]}),  # in shared memory
    ],
)
def test_kserve_path_passes_a_body_that_is_no_document_of_the_protocol(server, path, body, kind, row):
    reply = server.request("POST", path, body, headers={"Content-Type": kind})
    assert (reply.status, reply.json["row"]) == (200, row)


def test_kserve_documents_are_understood_as_before(server):
    reply = server.request("POST", "/v1/models/echo:predict", b'  {"instances": [1]}')
    assert reply.json["predictions"][0]["row"] == {"data": 1}
    assert server.request("POST", "/v1/models/echo:predict", b'{"instances": [1}').status == 400
    inputs = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]}
    assert server.request("POST", "/v2/models/echo/infer", json.dumps(inputs).encode()).json["outputs"]


@pytest.mark.parametrize(
    "url",
    ["http://localhost:aaaa", "http://localhost:18888/f.mar", "http://169.254.169.254/f.mar", "file:///Nobody.mar"],
)
def test_url_that_cannot_be_fetched_is_a_failed_download(server, url):
    reply = server.manage("POST", f"/models?url={url}")
    assert problem(reply) == (400, "DownloadArchiveException", f"Failed to download archive from: {url}")


@pytest.mark.parametrize("slashes", ["//", "///"])
def test_file_url_is_copied_into_the_store_and_removed_with_its_model(server, tmp_path, slashes):
    archive = pack_handler(tmp_path, "echo", name="elsewhere")
    store = server.log_path.parent / "store"
    reply = server.manage("POST", f"/models?url=file:{slashes}{archive}")
    assert (reply.status, (store / archive.name).exists()) == (200, True)
    assert server.manage("DELETE", "/models/elsewhere").status == 200
    assert not (store / archive.name).exists()


def test_grpc_conflicts_have_the_code_that_clients_know(running):
    server, client = running
    for version in VERSIONS[:2]:
        server.manage("POST", f"/models?url=many-{version}.mar")
    code, details = refusal(client.manage, "RegisterModel", url="many-1.11.mar")
    assert code is StatusCode.UNKNOWN
    assert details.startswith("Model version 1.11 is already registered for model many\n")
    code, details = refusal(client.manage, "UnregisterModel", model_name="many")
    assert (code, details.partition("\n")[0]) == (StatusCode.UNKNOWN, "Cannot remove default version for model many")
