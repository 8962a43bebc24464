"""Where spans go: OpenTelemetry's exporters, as the standard OTEL_* variables choose them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flambeau.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor


EXPORTERS = "opentelemetry_traces_exporter"  # the entry points of packages with exporters
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
SERVICE = "flambeau"


def is_disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry is switched off for every program."""
    return environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def exporter_names(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The entry points of OTEL_TRACES_EXPORTER: `otlp` by default, in the protocol of OTEL_EXPORTER_OTLP_PROTOCOL."""
    given = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    names = [name for part in given.split(",") if (name := part.strip()) and name != "none"]
    return [otlp_name(environment) if name == "otlp" else name for name in names]


def otlp_name(environment: Mapping[str, str]) -> str:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environment.get(variable, "").strip():
            if protocol not in PROTOCOLS:
                raise ConfigError(f"{variable} is {protocol!r}; write one of: {', '.join(PROTOCOLS)}")
            return PROTOCOLS[protocol]
    return PROTOCOLS["http/protobuf"]


def new_processors() -> list[BatchSpanProcessor]:
    """One processor for each exporter; each sends from a thread of its own. Raises ConfigError with the remedy."""
    try:
        from importlib.metadata import entry_points

        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError("tracing needs packages that are not installed: pip install 'flambeau[otel]'") from None
    processors = []
    for name in exporter_names():
        [found] = [*entry_points(group=EXPORTERS, name=name)][:1] or [None]
        if found is None:
            known = ", ".join(sorted({one.name for one in entry_points(group=EXPORTERS)}))
            raise ConfigError(
                f"no installed package exports spans as {name!r}, which OTEL_TRACES_EXPORTER or "
                f"OTEL_EXPORTER_OTLP_PROTOCOL asks for (installed: {known or 'none'}); "
                f"pip install {package_of(name)}, or change the variable"
            )
        processors.append(BatchSpanProcessor(found.load()()))
    return processors


def package_of(name: str) -> str:
    return "opentelemetry-exporter-" + name.replace("_", "-")


def new_resource(attributes: Mapping[str, str | int]) -> Resource:
    """What all spans of a process have in common; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    from opentelemetry.sdk.resources import Resource

    given = Resource.create()
    own = Resource({**attributes, "process.pid": os.getpid()})
    if str(given.attributes.get("service.name", "")).startswith("unknown_service"):
        own = own.merge(Resource({"service.name": SERVICE}))
        return given.merge(own)
    return own.merge(given)
