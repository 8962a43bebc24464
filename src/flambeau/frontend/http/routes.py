"""Which API is served at which address, and behind which key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

from flambeau.config.server import Address
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http import describe
from flambeau.frontend.http.app import Endpoint
from flambeau.frontend.http.auth import guard, token_route
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.inference import inference_routes, is_invoke
from flambeau.frontend.http.kserve import kserve_routes, readiness_routes
from flambeau.frontend.http.management import management_routes
from flambeau.frontend.http.metrics import metrics_routes
from flambeau.frontend.http.workflows import workflow_inference_routes, workflow_management_routes
from flambeau.serving.server import Server


def routes_by_address(server: Server, keys: Keys | None) -> dict[Address, dict[str, Endpoint]]:
    """What is served where. APIs at one address share its paths; each keeps its own key."""
    config = server.config
    management = {
        **management_routes(server),
        **readiness_routes(server),
        **workflow_management_routes(server),
        "token": token_route(keys),
    }
    management = guard(management, keys, "management", config)
    inference = {**inference_routes(server), **kserve_routes(server), **workflow_inference_routes(server)}
    inference = guard(inference, keys, "inference", config)
    if config.management == config.inference:
        inference["models"] = either(inference["models"], management["models"])
        inference[""] = describe.root([*describe.INFERENCE, *describe.MANAGEMENT])
        inference["api-description"] = describe.always([*describe.INFERENCE, *describe.MANAGEMENT])
    apis: defaultdict[Address, dict[str, Endpoint]] = defaultdict(dict)
    if config.metrics is not None:
        apis[config.metrics].update(metrics_routes(server))
    apis[config.management].update(management)
    apis[config.inference].update(inference)
    return apis


def either(inference: Endpoint, management: Endpoint) -> Endpoint:
    """/models where both APIs share an address: one path below it predicts, the others manage."""

    def models(exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        return (inference if is_invoke(segments) else management)(exchange, segments)

    return models
