"""Health: whether the process lives, whether it has started, and whether it can answer."""

from __future__ import annotations

from typing import Any

from flambeau.frontend.http.app import Endpoint
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.problems import respond_json
from flambeau.serving.model import Model
from flambeau.serving.server import Server


def health_routes(server: Server) -> dict[str, Endpoint]:
    """/ping as TorchServe answers it, and three probes that tell the truth."""

    def ping(exchange: Exchange, segments: list[str]) -> None:
        healthy = server.is_healthy
        respond_json(exchange, 200 if healthy else 500, {"status": "Healthy" if healthy else "Unhealthy"})

    def livez(exchange: Exchange, segments: list[str]) -> None:
        respond_json(exchange, 200, {"status": "alive"})

    def startupz(exchange: Exchange, segments: list[str]) -> None:
        status = "started" if server.has_started else "starting"
        respond_json(exchange, 200 if server.has_started else 503, {"status": status, **waiting_for(server)})

    def readyz(exchange: Exchange, segments: list[str]) -> None:
        ready = server.is_ready
        status = "ready" if ready else "draining" if server.is_draining else "not ready"
        respond_json(exchange, 200 if ready else 503, {"status": status, **waiting_for(server)})

    return {"ping": ping, "livez": livez, "startupz": startupz, "readyz": readyz}


def waiting_for(server: Server) -> dict[str, Any]:
    """The models that cannot answer yet, each with its reason; empty when there are none."""
    details = server.config.tells_details
    if server.config.needs_keys and not details:
        return {}  # the probes ask for no key, so they tell nothing that is behind one
    models = [why_not_ready(model, details=details) for model in server.not_ready()]
    models += [{"modelName": name, "status": "missing", "reason": why} for name, why in server.missing.items()]
    return {"models": models} if models else {}


def why_not_ready(model: Model, *, details: bool) -> dict[str, Any]:
    """One model that is not ready, with what is known about it."""
    pool = model.pool
    document: dict[str, Any] = {
        "modelName": model.name,
        "modelVersion": model.version,
        "readyWorkers": pool.num_ready,
        "minWorkers": model.pool.min_workers,
    }
    if death := pool.last_exit:
        document["lastFailure"] = death.cause.splitlines() if details else death.reason
    if not pool.may_recover:
        document["status"] = "failed"
    return document
