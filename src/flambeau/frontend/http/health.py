"""HealthApi (/ping, /livez, /startupz, /readyz) and MetricsApi (/metrics)."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from flambeau.errors import InvalidKey
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.api_descriptions import METRICS, DescriptionApi
from flambeau.frontend.http.errors import respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.router import ANYTHING, Endpoint, unknown_path
from flambeau.frontend.key_file import Kind
from flambeau.serving.model import Model
from flambeau.serving.server import Server

PROMETHEUS_TYPE = ("content-type", "text/plain; version=0.0.4; charset=utf-8")
OPEN_METRICS_TYPE = ("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")


class HealthApi:
    """/ping for existing clients, and three probes for Kubernetes."""

    def __init__(self, server: Server, keys: Keys | None, kind: Kind) -> None:
        self._server = server
        self._keys = keys
        self._kind: Kind = kind

    def routes(self) -> dict[str, Endpoint]:
        return {"ping": self.ping, **self.probes()}

    def probes(self) -> dict[str, Endpoint]:
        """Those that need no key."""
        return {"livez": self.livez, "startupz": self.startupz, "readyz": self.readyz}

    def ping(self, exchange: Exchange, segments: list[str]) -> None:
        healthy = self._server.is_healthy
        respond_json(exchange, 200 if healthy else 500, {"status": "Healthy" if healthy else "Unhealthy"})

    def livez(self, exchange: Exchange, segments: list[str]) -> None:
        respond_json(exchange, 200, {"status": "alive"})

    def startupz(self, exchange: Exchange, segments: list[str]) -> None:
        server = self._server
        status = "started" if server.has_started else "starting"
        respond_json(exchange, 200 if server.has_started else 503, {"status": status, **self._models(exchange)})

    def readyz(self, exchange: Exchange, segments: list[str]) -> None:
        server = self._server
        ready = server.is_ready
        status = "ready" if ready else "draining" if server.is_draining else "not ready"
        respond_json(exchange, 200 if ready else 503, {"status": status, **self._models(exchange)})

    def _models(self, exchange: Exchange) -> dict[str, Any]:
        """The models that are not ready. Probes need no key, so without one they show nothing that needs one."""
        if self._keys is not None and not self._server.config.shows_error_details:
            try:
                self._keys.check(self._kind, exchange.header("authorization"))
            except InvalidKey:
                return {}
        return not_ready_models(self._server)


def not_ready_models(server: Server) -> dict[str, Any]:
    """The models that cannot answer yet, with the reasons; empty if there are none."""
    details = server.config.shows_error_details
    models = [not_ready_document(model, details=details) for model in server.not_ready()]
    models += [{"modelName": name, "status": "missing", "reason": why} for name, why in server.missing.items()]
    return {"models": models} if models else {}


def not_ready_document(model: Model, *, details: bool) -> dict[str, Any]:
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


class MetricsApi:
    """Metrics in Prometheus' text format."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def routes(self) -> dict[str, Endpoint]:
        return {**DescriptionApi(METRICS).routes(), "metrics": self.metrics, ANYTHING: unknown_path}

    def metrics(self, exchange: Exchange, segments: list[str]) -> None:
        names = {value for key, value in parse_qsl(exchange.query) if key == "name[]"}
        is_open = accepts_open_metrics(exchange.header("accept") or "")
        text = self._server.metrics_text(names, is_open=is_open)
        exchange.respond(200, text.encode(), (OPEN_METRICS_TYPE if is_open else PROMETHEUS_TYPE,))


def accepts_open_metrics(accept: str) -> bool:
    """Whether an Accept header prefers OpenMetrics to plain text, as Prometheus does unless it is told otherwise."""
    quality = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for choice in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        if kind in quality:
            given = next((part[2:] for part in parameters if part.startswith("q=")), "1")
            try:
                quality[kind] = max(quality[kind], float(given))
            except ValueError:
                continue
    return quality["application/openmetrics-text"] > quality["text/plain"]
