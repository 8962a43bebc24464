"""Token authorization of the HTTP APIs."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from flambeau.config.server import ServerConfig
from flambeau.frontend.common.authorization import Keys, Kind
from flambeau.frontend.http.errors import JSON_TYPE
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.router import Endpoint, not_found, query_of

OPEN_ROUTES = frozenset({"", "api-description", "livez", "readyz", "startupz", "token"})


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


class KeyGuard:
    """An endpoint for callers with the key. A browser's preflight cannot carry one, so it gets an empty 200."""

    __slots__ = ("_endpoint", "_has_preflights", "_keys", "_kind")

    def __init__(self, endpoint: Endpoint, keys: Keys, kind: Kind, *, has_preflights: bool) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._kind: Kind = kind
        self._has_preflights = has_preflights

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        if exchange.method == "OPTIONS" and self._has_preflights and exchange.header("authorization") is None:
            exchange.respond(200, b"")  # every response has the CORS headers
            return None
        self._keys.check(self._kind, exchange.header("authorization"))
        return self._endpoint(exchange, segments)

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Raise InvalidKey unless the caller has the key."""
        self._keys.check(self._kind, exchange.header("authorization"))


class TokenApi:
    """/token?type=…: a caller with the API key renews another key; the key file holds the new one."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    def routes(self) -> dict[str, Endpoint]:
        return {"token": self.token}

    def token(self, exchange: Exchange, segments: list[str]) -> None:
        if self._keys is None or len(segments) > 1:
            not_found(exchange)
            return
        self._keys.renew(query_of(exchange).get("type"), exchange.header("authorization"))
        exchange.respond(200, b"\n", (JSON_TYPE,))
