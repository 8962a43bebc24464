"""The management API: register, list, describe, scale, set default, unregister."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flambeau.errors import BadRequest
from flambeau.frontend import operations
from flambeau.frontend.http import catalog, describe
from flambeau.frontend.http.app import ANYTHING, Endpoint, not_allowed, not_found, nothing_here, query_of
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.forms import bytes_of, media_type_of, read_lenient
from flambeau.frontend.http.health import health_routes
from flambeau.frontend.http.problems import respond_json
from flambeau.serving.server import Server

LARGEST = 2**31 - 1
WHOLE_NUMBERS = (
    "batch_size",
    "max_batch_delay",
    "response_timeout",
    "startup_timeout",
    "initial_workers",
)


def management_routes(server: Server) -> dict[str, Endpoint]:
    """The paths of the management listener."""
    return {
        "": describe.root(catalog.MANAGEMENT),
        "api-description": describe.always(catalog.MANAGEMENT),
        "models": partial(models, server),
        ANYTHING: nothing_here,
        **health_routes(server),
    }


async def models(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/models, /models/{model}[/{version}] and /models/{model}/{version}/set-default."""
    name = segments[1] if len(segments) > 1 else None
    version = segments[2] if len(segments) > 2 else None
    method = exchange.method
    if name is None:
        collection = {"GET": list_models, "POST": register}.get(method)
        await collection(server, exchange) if collection else not_allowed(exchange)
    elif len(segments) == 4 and segments[3] == "set-default" and version is not None:
        await set_default(server, exchange, name, version) if method == "PUT" else not_allowed(exchange)
    elif len(segments) > 3:
        not_found(exchange)
    else:
        one = {"GET": describe_model, "PUT": scale, "DELETE": unregister, "OPTIONS": options}.get(method)
        await one(server, exchange, name, version) if one else not_allowed(exchange)


async def list_models(server: Server, exchange: Exchange) -> None:
    """GET /models: the default versions, by name, a page at a time."""
    query = query_of(exchange)
    start = integer(query, "next_page_token", 0)
    respond_json(exchange, 200, operations.list_models(server, integer(query, "limit", operations.PAGE), start))


async def register(server: Server, exchange: Exchange) -> None:
    """POST /models: parameters from the query, or from a JSON body."""
    operations.check_model_api(server)
    given = parameters(exchange)
    asked = operations.Registration(
        url=None if given.get("url") is None else str(given["url"]),
        model_name=text(given, "model_name"),
        handler=text(given, "handler"),
        runtime=text(given, "runtime"),
        batch_size=positive(given, "batch_size"),
        max_batch_delay_ms=natural(given, "max_batch_delay"),
        response_timeout_s=natural(given, "response_timeout"),
        startup_timeout_s=positive(given, "startup_timeout"),
        initial_workers=whole(given, "initial_workers"),
        synchronous=boolean(given, "synchronous", True),
        s3_sse_kms=boolean(given, "s3_sse_kms", False),
    )
    status(exchange, await operations.register(server, asked))


async def describe_model(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """GET /models/{model}[/{version}]: settings, workers and their last failures."""
    customized = boolean(query_of(exchange), "customized", False)
    respond_json(exchange, 200, await operations.describe(server, name, version, customized=customized))


async def scale(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """PUT /models/{model}[/{version}]: change the number of workers."""
    query = query_of(exchange)
    minimum = integer(query, "min_worker", 1)
    maximum = integer(query, "max_worker", minimum)
    version = version or query.get("model_version")
    waits = boolean(query, "synchronous", False)
    status(exchange, await operations.scale(server, name, version, minimum, maximum, synchronous=waits))


async def unregister(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """DELETE /models/{model}[/{version}]: answer what was accepted, then let go."""
    status(exchange, await operations.unregister(server, name, version))


async def set_default(server: Server, exchange: Exchange, name: str, version: str) -> None:
    """PUT /models/{model}/{version}/set-default."""
    status(exchange, operations.set_default(server, name, version))


async def options(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """OPTIONS /models/{model}: the description of its management API."""
    server.registry.find(name, version)
    respond_json(exchange, 200, describe.management_document(name))


# ---- parameters: what does not parse takes its default, as in TorchServe ----


def parameters(exchange: Exchange) -> Mapping[str, Any]:
    """The parameters of a call: its JSON body if it has one, else its query."""
    if media_type_of(exchange) != "application/json":
        return query_of(exchange)
    document = read_lenient(bytes_of(exchange))
    for key in WHOLE_NUMBERS:
        if document.get(key) not in (None, "") and whole(document, key) is None:
            raise BadRequest(f"{key} must be a whole number, not {repr_of(document[key])}")
    return document


def repr_of(value: Any) -> str:
    """A value for an error text; Python writes no number of thousands of digits."""
    try:
        return f"{value!r:.100}"
    except ValueError:
        return "so large a one"


def text(given: Mapping[str, Any], key: str) -> str | None:
    """A parameter as text; None when it is absent or empty."""
    value = given.get(key)
    return str(value) if value not in (None, "") else None


def integer(given: Mapping[str, Any], key: str, default: int) -> int:
    """A parameter as a whole number, of 32 bits as in TorchServe."""
    try:
        value = int(given.get(key, default))
    except (TypeError, ValueError, OverflowError):
        return default
    return value if abs(value) <= LARGEST else default


def whole(given: Mapping[str, Any], key: str) -> int | None:
    """A parameter as a whole number; None when it is absent or not one."""
    return integer(given, key, 0) if integer(given, key, 0) == integer(given, key, 1) else None


def natural(given: Mapping[str, Any], key: str) -> int | None:
    """A parameter as a number of at least 0; None when it is absent or not one."""
    value = integer(given, key, -1)
    return value if value >= 0 else None


def positive(given: Mapping[str, Any], key: str) -> int | None:
    """A parameter as a number of at least 1; None when it is absent or not one."""
    return natural(given, key) or None


def boolean(given: Mapping[str, Any], key: str, default: bool) -> bool:
    """A parameter as yes or no: only the text `true` is yes."""
    value = given.get(key)
    return default if value is None else str(value).lower() == "true"


def status(exchange: Exchange, outcome: operations.Outcome) -> None:
    """Answer with a status text."""
    respond_json(exchange, outcome.code, {"status": outcome.text})
