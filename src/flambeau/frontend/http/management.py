"""ManagementApi: register, list, describe, scale, set default, unregister. TokenApi: keys."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from flambeau.config.server import ServerConfig
from flambeau.frontend import operations
from flambeau.frontend.authorization import Keys
from flambeau.frontend.cluster_document import cluster_document
from flambeau.frontend.http.api_descriptions import management_document
from flambeau.frontend.http.bodies import bytes_of, check_parameters, media_type_of, read_fields, read_lenient
from flambeau.frontend.http.errors import JSON_TYPE, respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.router import ANYTHING, Endpoint, not_allowed, not_found, query_of, unknown_path
from flambeau.frontend.key_file import Kind
from flambeau.frontend.management_parameters import (
    DESCRIBE,
    LIST,
    LOAD_ADAPTER,
    REGISTER,
    SCALE,
    SLOW,
    TRAFFIC,
    UNLOAD_ADAPTER,
    read_parameters,
    registration_of,
)
from flambeau.serving.server import Server

OPEN_ROUTES = frozenset(
    {
        "",
        "api-description",
        "console",
        "docs",
        "favicon.ico",
        "health",
        "livez",
        "openapi.json",
        "readyz",
        "startupz",
        "token",
    }
)


class ManagementApi:
    """/models, /models/{model}[/{version}] and /models/{model}/{version}/set-default or /traffic."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._strict = server.config.strict_calls
        self._collection = {"GET": self.list_models, "POST": self.register}
        self._model = {
            "GET": self.describe_model,
            "PUT": self.scale,
            "DELETE": self.unregister,
            "OPTIONS": self.options,
        }
        self._version = {
            ("PUT", "set-default"): self.set_default,
            ("PUT", "traffic"): self.set_traffic,
            ("GET", "traffic"): self.traffic,
        }

    def routes(self) -> dict[str, Endpoint]:
        return {"models": self.models, "slow": self.slow, "cluster": self.cluster, ANYTHING: unknown_path}

    def slow(self, exchange: Exchange, segments: list[str]) -> None:
        """GET /slow: the slowest requests of the last hour."""
        if len(segments) > 1:
            not_found(exchange)
        elif exchange.method not in ("GET", "HEAD"):
            not_allowed(exchange)
        else:
            values = read_parameters(SLOW, query_of(exchange))
            respond_json(exchange, 200, operations.slow_requests(self._server, values["model"], values["limit"]))

    async def cluster(self, exchange: Exchange, segments: list[str]) -> None:
        """GET /cluster: the other machines of this server, and its workers there."""
        if len(segments) > 1:
            not_found(exchange)
        elif exchange.method not in ("GET", "HEAD"):
            not_allowed(exchange)
        else:
            respond_json(exchange, 200, await cluster_document(self._server))

    async def models(self, exchange: Exchange, segments: list[str]) -> None:
        name = segments[1] if len(segments) > 1 else None
        version = segments[2] if len(segments) > 2 else None
        method = exchange.method
        if name is None:
            collection = self._collection.get(method)
            await collection(exchange) if collection else not_allowed(exchange)
        elif len(segments) == 4 and segments[3] in ("set-default", "traffic") and version is not None:
            change = self._version.get((method, segments[3]))
            await change(exchange, name, version) if change else not_allowed(exchange)
        elif len(segments) > 3:
            not_found(exchange)
        else:
            one = self._model.get(method)
            await one(exchange, name, version) if one else not_allowed(exchange)

    async def list_models(self, exchange: Exchange) -> None:
        """GET /models: the default versions by name, in pages."""
        values = read_parameters(LIST, query_of(exchange), strict=self._strict)
        document = operations.list_models(self._server, values["limit"], values["next_page_token"])
        respond_json(exchange, 200, document)

    async def register(self, exchange: Exchange) -> None:
        """POST /models, with parameters in the query, in a JSON body or in a form."""
        operations.check_model_api(self._server)
        # A number in a JSON body has a type of its own: what is wrong there is an error, as it always was.
        strict = self._strict or media_type_of(exchange) == "application/json"
        registration = registration_of(read_parameters(REGISTER, parameters(exchange), strict=strict))
        respond_status(exchange, await operations.register(self._server, registration))

    async def describe_model(self, exchange: Exchange, name: str, version: str | None) -> None:
        """GET /models/{model}[/{version}]: settings, workers and their last failures."""
        customized = read_parameters(DESCRIBE, query_of(exchange), strict=self._strict)["customized"]
        document = await operations.describe(self._server, name, version, customized=customized)
        respond_json(exchange, 200, document)

    async def scale(self, exchange: Exchange, name: str, version: str | None) -> None:
        """PUT /models/{model}[/{version}]: change the number of workers."""
        values = read_parameters(SCALE, query_of(exchange), strict=self._strict)
        minimum, maximum = values["min_worker"], values["max_worker"]
        result = await operations.scale(
            self._server,
            name,
            version or values["model_version"],
            minimum,
            minimum if maximum is None else maximum,
            synchronous=values["synchronous"],
        )
        respond_status(exchange, result)

    async def unregister(self, exchange: Exchange, name: str, version: str | None) -> None:
        """DELETE /models/{model}[/{version}]: finish the accepted requests, then remove the model."""
        respond_status(exchange, await operations.unregister(self._server, name, version))

    async def set_default(self, exchange: Exchange, name: str, version: str) -> None:
        """PUT /models/{model}/{version}/set-default."""
        respond_status(exchange, await operations.set_default(self._server, name, version))

    async def set_traffic(self, exchange: Exchange, name: str, version: str) -> None:
        """PUT /models/{model}/{version}/traffic: its share of the requests that name no version."""
        values = read_parameters(TRAFFIC, parameters(exchange))
        shares = values["percent"], values["mirror"], values["max_errors"]
        respond_status(exchange, await operations.set_traffic(self._server, name, version, *shares))

    async def traffic(self, exchange: Exchange, name: str, version: str) -> None:
        """GET /models/{model}/{version}/traffic: its share, its answers, and how they differ from the default's."""
        respond_json(exchange, 200, operations.traffic_document(self._server, name, version))

    async def options(self, exchange: Exchange, name: str, version: str | None) -> None:
        """OPTIONS /models/{model}: the description of its management API."""
        self._server.registry.find(name, version)
        respond_json(exchange, 200, management_document(name))


class AdapterApi:
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them; other paths below /v1 go on."""

    def __init__(self, server: Server, otherwise: Endpoint) -> None:
        self._server, self._otherwise = server, otherwise
        self._calls = {"load_lora_adapter": self.load, "unload_lora_adapter": self.unload}

    def routes(self) -> dict[str, Endpoint]:
        return {"v1": self.v1}

    def v1(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        if not is_adapter_call(segments):
            return self._otherwise(exchange, segments)
        if exchange.method != "POST":
            not_allowed(exchange)
            return None
        return self._calls[segments[1]](exchange)

    async def load(self, exchange: Exchange) -> None:
        values = read_parameters(LOAD_ADAPTER, parameters(exchange))
        name, path, model = values["lora_name"], values["lora_path"], values["model"]
        respond_status(exchange, await operations.load_adapter(self._server, model, name, path))

    async def unload(self, exchange: Exchange) -> None:
        values = read_parameters(UNLOAD_ADAPTER, parameters(exchange))
        respond_status(exchange, await operations.unload_adapter(self._server, values["model"], values["lora_name"]))


def is_adapter_call(segments: list[str]) -> bool:
    return len(segments) == 2 and segments[1] in ("load_lora_adapter", "unload_lora_adapter")


def parameters(exchange: Exchange) -> Mapping[str, Any]:
    """The JSON body, as existing clients send it; without one, the query, and the fields of a form that it lacks."""
    query, media_type = query_of(exchange), media_type_of(exchange)
    if media_type not in ("application/json", "application/x-www-form-urlencoded"):
        return query
    body = bytes_of(exchange)
    check_parameters(body)
    if media_type == "application/json":
        return (body.strip() and read_lenient(body)) or query
    return {**read_fields(body), **query}


def respond_status(exchange: Exchange, result: operations.OperationResult) -> None:
    respond_json(exchange, result.code, {"status": result.text})


def guard(routes: Mapping[str, Endpoint], keys: Keys | None, kind: Kind, config: ServerConfig) -> dict[str, Endpoint]:
    """The same routes behind a key, except descriptions and probes; without keys, unchanged."""
    if keys is None:
        return dict(routes)
    open_routes = OPEN_ROUTES if config.keys.ping_needs_key else OPEN_ROUTES | {"ping"}
    has_preflights = bool(config.cors)
    return {
        name: endpoint if name in open_routes else KeyGuard(endpoint, keys, kind, has_preflights=has_preflights)
        for name, endpoint in routes.items()
    }


def authorization_of(exchange: Exchange) -> str | None:
    """The Authorization header; Anthropic's clients send the key as x-api-key instead."""
    given = exchange.header("authorization")
    if given is None and (key := exchange.header("x-api-key")):
        return f"Bearer {key}"
    return given


class KeyGuard:
    """An endpoint for callers with the key. A browser's preflight cannot carry one, so it gets an empty 200."""

    __slots__ = ("_endpoint", "_has_preflights", "_keys", "_kind")

    def __init__(self, endpoint: Endpoint, keys: Keys, kind: Kind, *, has_preflights: bool) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._kind: Kind = kind
        self._has_preflights = has_preflights

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        if exchange.method == "OPTIONS" and self._has_preflights and authorization_of(exchange) is None:
            exchange.respond(200, b"")  # every response has the CORS headers
            return None
        exchange.tenant = self._keys.check(self._kind, authorization_of(exchange))
        return self._endpoint(exchange, segments)

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Note whose key the caller has sent; raise InvalidKey if it is not valid."""
        exchange.tenant = self._keys.check(self._kind, authorization_of(exchange))


class TokenApi:
    """/token?type=…: a caller with the API key renews another key; the key file holds the new one."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    def routes(self) -> dict[str, Endpoint]:
        return {"token": self.token, "keys": self.keys}

    def keys(self, exchange: Exchange, segments: list[str]) -> None:
        """GET /keys: the keys without their secrets, their limits, and what was used with them."""
        if self._keys is None or len(segments) > 1:
            not_found(exchange)
        elif exchange.method not in ("GET", "HEAD"):
            not_allowed(exchange)
        else:
            respond_json(exchange, 200, {"keys": self._keys.describe()})

    def token(self, exchange: Exchange, segments: list[str]) -> None:
        if self._keys is None or len(segments) > 1:
            not_found(exchange)
            return
        self._keys.renew(query_of(exchange).get("type"), exchange.header("authorization"))
        exchange.respond(200, b"\n", (JSON_TYPE,))
