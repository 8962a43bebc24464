"""The metrics API: /metrics in Prometheus' text format."""

from __future__ import annotations

from urllib.parse import parse_qsl

from flambeau.frontend.http import catalog, describe
from flambeau.frontend.http.app import ANYTHING, Endpoint, nothing_here
from flambeau.frontend.http.exchange import Exchange
from flambeau.serving.server import Server

TEXT = ("content-type", "text/plain; version=0.0.4; charset=utf-8")


def metrics_routes(server: Server) -> dict[str, Endpoint]:
    """The paths of the metrics listener."""

    def metrics(exchange: Exchange, segments: list[str]) -> None:
        wanted = {value for key, value in parse_qsl(exchange.query) if key == "name[]"}
        exchange.respond(200, server.metrics_text(wanted).encode(), (TEXT,))

    return {
        "": describe.root(catalog.METRICS),
        "api-description": describe.always(catalog.METRICS),
        "metrics": metrics,
        ANYTHING: nothing_here,
    }
