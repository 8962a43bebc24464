from __future__ import annotations

import sys

import pytest

from flambeau.errors import ConfigError
from flambeau.serving.traces import open_tracing
from flambeau.span_export import exporter_names, new_processors, new_resource


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            ["otlp_proto_http"],
        ),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "none"}, []),
    ],
)
def test_standard_variables_choose_the_exporters(variables, names):
    assert exporter_names(variables) == names


def test_unknown_protocol_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; write one of: http/protobuf"):
        exporter_names({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_exporter_that_is_not_installed_is_named_with_its_package(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin_json")
    with pytest.raises(ConfigError, match="pip install opentelemetry-exporter-zipkin-json"):
        new_processors()


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"pip install 'flambeau\[otel\]'"):
        open_tracing(is_on=True, sampling=1.0)


def test_variables_come_before_the_name_of_the_service(monkeypatch):
    assert new_resource({"a": 1}).attributes["service.name"] == "flambeau"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    found = new_resource({"a": 1}).attributes
    assert (found["service.name"], found["a"]) == ("mine", 1)


def test_tracing_is_off_where_opentelemetry_is_disabled(monkeypatch, caplog):
    assert open_tracing(is_on=False, sampling=1.0) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing(is_on=True, sampling=1.0) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
