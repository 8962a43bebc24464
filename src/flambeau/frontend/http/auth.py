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
        name: endpoint if name in free else BehindKey(endpoint, keys, kind, has_preflights=has_preflights)
        for name, endpoint in routes.items()
    }


class BehindKey:
    """An endpoint that only callers with the key reach; a browser's preflight, which cannot carry one, ends here."""

    __slots__ = ("_endpoint", "_has_preflights", "_keys", "_kind")

    def __init__(self, endpoint: Endpoint, keys: Keys, kind: Kind, *, has_preflights: bool) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._kind: Kind = kind
        self._has_preflights = has_preflights

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        """Answer those who may come in."""
        if exchange.method == "OPTIONS" and self._has_preflights and exchange.header("authorization") is None:
            exchange.respond(200, b"")  # what a browser wants to know is in the headers of every response
            return None
        self._keys.check(self._kind, exchange.header("authorization"))
        return self._endpoint(exchange, segments)

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Raise InvalidKey unless the caller may come in."""
        self._keys.check(self._kind, exchange.header("authorization"))


def token_route(keys: Keys | None) -> Endpoint:
    """`/token?type=…`: whoever has the API key renews another; it is found in the key file, not in the answer."""

    def token(exchange: Exchange, segments: list[str]) -> None:
        if keys is None or len(segments) > 1:
            not_found(exchange)
            return
        keys.renew(query_of(exchange).get("type"), exchange.header("authorization"))
        exchange.respond(200, b"\n", (JSON_TYPE,))

    return token
