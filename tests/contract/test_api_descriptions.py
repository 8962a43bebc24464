"""The API descriptions name what TorchServe's name, and no request that they allow is answered with a server error."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.archives import pack_handler
from support.running import RunningServer

IDS = {
    "inference": {"apiDescription", "api-description", "ping", "predictions", "version_predictions", "metrics"},
    "management": {
        "apiDescription",
        "api-description",
        "listModels",
        "registerModel",
        "describeModel",
        "version_describeModel",
        "setAutoScale",
        "version_setAutoScale",
        "unregisterModel",
        "version_unregisterModel",
        "setDefault",
        "metrics",
    },
    "metrics": {"metrics"},
}
PATHS = {
    "inference": {
        "/",
        "/ping",
        "/v1/models/{model_name}:predict",
        "/v2/models/{model_name}/infer",
        "/predictions/{model_name}",
        "/predictions/{model_name}/{model_version}",
        "/api-description",
        "/metrics",
    },
    "management": {
        "/",
        "/models",
        "/models/{model_name}",
        "/models/{model_name}/{model_version}",
        "/models/{model_name}/{model_version}/set-default",
        "/models/{model_name}/{model_version}/traffic",
        "/api-description",
        "/metrics",
    },
    "metrics": {"/metrics"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    store = folder / "store"
    store.mkdir()
    for name in ("echo", "other"):
        pack_handler(store, "echo", name=name)
    running = RunningServer(folder / "log", str(store)).wait_ready()
    yield running
    running.stop()


def port_of(server, listener):
    return {"inference": server.port, "management": server.management_port, "metrics": server.metrics_port}[listener]


@pytest.mark.parametrize("listener", IDS)
def test_description_names_what_generated_clients_know(server, listener):
    document = server.request("OPTIONS", "/", port=port_of(server, listener)).json
    assert (document["openapi"], document["info"]["title"]) == ("3.0.1", "TorchServe APIs")
    found = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert set(found) >= IDS[listener]
    assert len(found) == len(set(found))
    assert document["paths"].keys() >= PATHS[listener]


def test_description_of_one_model(server):
    document = server.manage("OPTIONS", "/models/echo").json
    assert document["info"]["title"] == "RESTful Management API for: echo"
    assert "/models/echo/{model_version}" in document["paths"]
    document = server.request("OPTIONS", "/predictions/echo").json
    assert "/predictions/echo" in document["paths"]
    assert server.request("OPTIONS", "/predictions/nobody").status == 404


@pytest.mark.timeout(300)
@pytest.mark.parametrize("listener", IDS)
def test_no_request_that_is_described_is_a_server_error(server, listener):
    import schemathesis  # here: it takes a second, which the other processes of a test run save
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    port = port_of(server, listener)
    schema = schemathesis.openapi.from_dict(json.loads(server.request("OPTIONS", "/", port=port).body))
    named = st.sampled_from(["echo", "other", "nobody", "1.0", "all", "%00", "a/b"])
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.method == "delete":
            continue  # it would take away the models that the others need

        @settings(
            max_examples=12,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        @given(case=operation.as_strategy(), name=named, is_named=st.booleans())
        def check(case, name, is_named):
            if is_named and "model_name" in (case.path_parameters or {}):
                case.path_parameters["model_name"] = name
            query = case.query or {}
            for key in ("min_worker", "max_worker", "initial_workers"):  # what is asked for is done: not too much
                if isinstance(query.get(key), int):
                    query[key] = min(query[key], 2)
            case.call_and_validate(
                base_url=f"http://127.0.0.1:{port}",
                checks=[not_a_server_error, content_type_conformance, response_schema_conformance],
                timeout=50,
            )

        check()
