"""The management API: register, list, describe, scale, set default, unregister."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from flambeau.config.model import ModelConfig
from flambeau.errors import BadRequest, FlambeauError, Unavailable
from flambeau.frontend.http import describe
from flambeau.frontend.http.app import Endpoint, not_allowed, not_found, query_of
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.health import health_routes
from flambeau.frontend.http.model_document import model_document
from flambeau.frontend.http.problems import respond_json
from flambeau.serving.job import Body, Job
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Part

PAGE = 100


def management_routes(server: Server) -> dict[str, Endpoint]:
    """The paths of the management listener."""
    return {
        "": describe.root(describe.MANAGEMENT),
        "api-description": describe.always(describe.MANAGEMENT),
        "models": partial(models, server),
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
    limit, start = integer(query, "limit", PAGE), max(0, integer(query, "next_page_token", 0))
    limit = limit if 0 <= limit <= PAGE else PAGE
    everything = server.registry.defaults()
    page = everything[start : start + limit]
    document: dict[str, Any] = {}
    if start + limit < len(everything):
        document["nextPageToken"] = str(start + limit)
    document["models"] = [{"modelName": model.name, "modelUrl": model.source.url} for model in page]
    respond_json(exchange, 200, document)


async def register(server: Server, exchange: Exchange) -> None:
    """POST /models: parameters from the query, or from a JSON body."""
    given = parameters(exchange)
    url = text(given, "url")
    if not url:
        raise BadRequest("Parameter url is required.")
    defaults = server.config
    workers = max(0, integer(given, "initial_workers", defaults.default_workers))
    config = ModelConfig(
        min_workers=workers,
        max_workers=workers,
        response_timeout_s=seconds(given, "response_timeout", defaults.default_response_timeout_s),
        startup_timeout_s=seconds(given, "startup_timeout", defaults.default_startup_timeout_s),
        queue_size=defaults.job_queue_size,
    )
    wishes: dict[str, Any] = {}  # these two beat the model's own YAML, as in TorchServe
    if (size := integer(given, "batch_size", 0)) > 0:
        wishes["batch_size"] = size
    if (delay_ms := integer(given, "max_batch_delay", -1)) >= 0:
        wishes["batch_delay_s"] = delay_ms / 1000
    waits = boolean(given, "synchronous", True)
    # Shielded: a registration that has begun is finished even if its caller goes away.
    model = await asyncio.shield(
        server.register(
            url,
            name=text(given, "model_name"),
            handler=text(given, "handler"),
            runtime=text(given, "runtime"),
            config=config,
            wishes=wishes,
            wait=waits,
        )
    )
    named = f'Model "{model.name}" Version: {model.version} registered with'
    if not model.config.min_workers:
        status(exchange, 200, f"{named} 0 initial workers. Use scale workers API to add workers for the model.")
    elif waits:
        status(exchange, 200, f"{named} {model.config.min_workers} initial workers")
    else:
        status(exchange, 202, "Processing worker updates...")


async def describe_model(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """GET /models/{model}[/{version}]: settings, workers and their last failures."""
    details = server.config.tells_details
    if version == "all":
        documents = [model_document(model, details=details) for model in server.registry.versions(name)]
        respond_json(exchange, 200, documents)
        return
    model = server.registry.find(name, version)
    document = model_document(model, details=details)
    if boolean(query_of(exchange), "customized", False):
        metadata = await ask_handler(model, exchange)
        if metadata:
            document["customizedMetadata"] = metadata
    respond_json(exchange, 200, [document])


async def scale(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """PUT /models/{model}[/{version}]: change the number of workers."""
    query = query_of(exchange)
    for key in ("min_worker", "max_worker"):
        if key in query and not query[key].removeprefix("-").isdigit():
            raise BadRequest(f"{key} must be a whole number, not {query[key]!r}")
    minimum = integer(query, "min_worker", 1)
    maximum = integer(query, "max_worker", minimum)
    version = version or query.get("model_version")
    waits = boolean(query, "synchronous", False)
    await asyncio.shield(server.scale(name, version, minimum, maximum, wait=waits))
    if waits:
        status(
            exchange,
            200,
            f"Workers scaled to {minimum} for model: {name}" + (f", version: {version}" if version else ""),
        )
    else:
        status(exchange, 202, "Processing worker updates...")


async def unregister(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """DELETE /models/{model}[/{version}]: answer what was accepted, then let go."""
    await asyncio.shield(server.unregister(name, version))
    status(exchange, 200, f'Model "{name}" unregistered')


async def set_default(server: Server, exchange: Exchange, name: str, version: str) -> None:
    """PUT /models/{model}/{version}/set-default."""
    server.registry.set_default(name, version)
    status(exchange, 200, f'Default version successfully updated for model "{name}" to "{version}"')


async def options(server: Server, exchange: Exchange, name: str, version: str | None) -> None:
    """OPTIONS /models/{model}: the description of its management API."""
    server.registry.find(name, version)
    respond_json(exchange, 200, describe.management_document(name))


class Answer:
    """Collects a job's whole reply."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []

    def on_parts(self, parts: list[Part]) -> None:
        """Take parts."""
        self._parts += [part.body for part in parts]
        if parts[-1].last and not self.done.done():
            self.done.set_result(b"".join(self._parts))

    def on_error(self, error: FlambeauError) -> None:
        """Take an error."""
        if not self.done.done():
            self.done.set_exception(error)


async def ask_handler(model: Model, exchange: Exchange) -> Any:
    """What the handler says about itself; nothing when it is not a JSON object."""
    if not model.supervisor.has_hope:
        raise Unavailable(
            f'Model "{model.name}" has no worker to serve describe request. '
            "Please use scale workers API to add workers."
        )
    answer = Answer()
    now = asyncio.get_running_loop().time()
    job = Job(answer, request_id=exchange.request_id, headers=[], body=Body(b""), arrived=now, kind="describe")
    model.add(job)
    try:
        document = json.loads(await answer.done)
    except ValueError:
        return {}
    finally:
        job.cancel()
    return document if isinstance(document, dict) else {}


# ---- parameters: what does not parse takes its default, as in TorchServe ----


def parameters(exchange: Exchange) -> Mapping[str, Any]:
    """The parameters of a call: its JSON body if it has one, else its query."""
    if (exchange.header("content-type") or "").partition(";")[0].strip().lower() != "application/json":
        return query_of(exchange)
    body = exchange.body
    if body is None:
        raw = b""
    else:
        raw = body.content if body.segment is None else body.segment.memory[: body.size_bytes]
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest("the body must be a JSON object")
    return document


def text(given: Mapping[str, Any], key: str) -> str | None:
    """A parameter as text; None when it is absent or empty."""
    value = given.get(key)
    return str(value) if value not in (None, "") else None


def integer(given: Mapping[str, Any], key: str, default: int) -> int:
    """A parameter as a whole number."""
    try:
        return int(given.get(key, default))
    except (TypeError, ValueError, OverflowError):
        return default


def seconds(given: Mapping[str, Any], key: str, default: float) -> float:
    """A parameter as a time-out; only a positive one counts."""
    value = integer(given, key, 0)
    return value if value > 0 else default


def boolean(given: Mapping[str, Any], key: str, default: bool) -> bool:
    """A parameter as yes or no: only the text `true` is yes."""
    value = given.get(key)
    return default if value is None else str(value).lower() == "true"


def status(exchange: Exchange, code: int, message: str) -> None:
    """Answer with a status text."""
    respond_json(exchange, code, {"status": message})
