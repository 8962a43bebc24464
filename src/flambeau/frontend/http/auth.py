"""Token authorization of the HTTP APIs: who needs which key, settled when the routes are built."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from flambeau.config.server import ServerConfig
from flambeau.frontend.authorization import Keys, Kind
from flambeau.frontend.http.app import Endpoint, not_found, query_of
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.problems import JSON_TYPE

NEVER = frozenset({"", "api-description", "livez", "readyz", "startupz", "token"})


def guard(routes: Mapping[str, Endpoint], keys: Keys | None, kind: Kind, config: ServerConfig) -> dict[str, Endpoint]:
    """The same routes behind a key, but for descriptions and probes; without keys, just the same routes."""
    if keys is None:
        return dict(routes)
    free = NEVER if config.keys.ping_needs_key else NEVER | {"ping"}
    has_preflights = bool(config.cors)
    return {
        name: endpoint if name in free else behind_key(endpoint, keys, kind, has_preflights=has_preflights)
        for name, endpoint in routes.items()
    }


def behind_key(endpoint: Endpoint, keys: Keys, kind: Kind, *, has_preflights: bool) -> Endpoint:
    """An endpoint that only callers with the key reach; a browser's preflight request cannot carry one."""

    def check(exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        if exchange.method != "OPTIONS" or not has_preflights:
            keys.check(kind, exchange.header("authorization"))
        return endpoint(exchange, segments)

    return check


def token_route(keys: Keys | None) -> Endpoint:
    """`/token?type=…`: whoever has the API key renews another; it is found in the key file, not in the answer."""

    def token(exchange: Exchange, segments: list[str]) -> None:
        if keys is None or len(segments) > 1:
            not_found(exchange)
            return
        keys.renew(query_of(exchange).get("type"), exchange.header("authorization"))
        exchange.respond(200, b"\n", (JSON_TYPE,))

    return token
