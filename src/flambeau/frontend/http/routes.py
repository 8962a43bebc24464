"""Which API is served at which address, and behind which key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, Literal

from flambeau.config.server import Address
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http import catalog, describe
from flambeau.frontend.http.app import Endpoint, Guarded
from flambeau.frontend.http.auth import guard, token_route
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.inference import inference_routes, is_invoke
from flambeau.frontend.http.kserve import kserve_routes, readiness_routes
from flambeau.frontend.http.management import management_routes
from flambeau.frontend.http.metrics import metrics_routes
from flambeau.frontend.http.openai.routes import openai_routes
from flambeau.serving.server import Server


def routes_by_address(server: Server, keys: Keys | None) -> dict[Address, dict[str, Endpoint]]:
    """What is served where. APIs at one address share its paths; each keeps its own key."""
    config = server.config
    management = {
        **management_routes(server),
        **readiness_routes(server),
        **extension_routes(server, "management"),
        "token": token_route(keys),
    }
    management = guard(management, keys, "management", config)
    inference = {
        **inference_routes(server),
        **kserve_routes(server),
        **openai_routes(server),
        **extension_routes(server, "inference"),
    }
    inference = guard(inference, keys, "inference", config)
    if config.management == config.inference:
        inference["models"] = Either(inference["models"], management["models"])
        inference[""] = describe.root([*catalog.INFERENCE, *catalog.MANAGEMENT])
        inference["api-description"] = describe.always([*catalog.INFERENCE, *catalog.MANAGEMENT])
    apis: defaultdict[Address, dict[str, Endpoint]] = defaultdict(dict)
    if config.metrics is not None:
        apis[config.metrics].update(metrics_routes(server))
    apis[config.management].update(management)
    apis[config.inference].update(inference)
    return apis


def extension_routes(server: Server, api: Literal["inference", "management"]) -> dict[str, Endpoint]:
    return {path: route for extension in server.extensions for path, route in extension.http_routes(api).items()}


class Either:
    """/models where both APIs share an address: one path below it predicts, the others manage."""

    __slots__ = ("_inference", "_management")

    def __init__(self, inference: Endpoint, management: Endpoint) -> None:
        self._inference = inference
        self._management = management

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        """Pass a call on to its API."""
        return self._of(segments)(exchange, segments)

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Raise InvalidKey unless the caller may come in."""
        if isinstance(endpoint := self._of(segments), Guarded):
            endpoint.check(exchange, segments)

    def _of(self, segments: list[str]) -> Endpoint:
        return self._inference if is_invoke(segments) else self._management
