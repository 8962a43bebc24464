"""Routes whose requests are traced: those that run models."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.router import ANYTHING, Endpoint
from flambeau.serving.traces import Tracing

PATTERNS = {  # what follows the first segment; the paths of OpenAI are their own patterns
    "predictions": ("{model_name}", "{model_version}"),
    "explanations": ("{model_name}", "{model_version}"),
    "invocations": (),
    "models": ("{model_name}", "invoke"),
    "wfpredict": ("{workflow_name}",),
}
ALWAYS_TRACED = ("predictions", "explanations", "invocations", "wfpredict")  # with any method but OPTIONS
BY_MODEL = ("v1", "v2")  # KServe's paths: …/models/{model_name}…


class TracedEndpoint:
    """An endpoint whose requests are traced, if the server's sampling or the client says so."""

    __slots__ = ("_begin", "_endpoint")

    def __init__(self, endpoint: Endpoint, tracing: Tracing) -> None:
        self._begin = tracing.begin
        self._endpoint = endpoint

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        method = exchange.method
        if method == "POST" or (segments[0] in ALWAYS_TRACED and method != "OPTIONS"):
            trace = self._begin(exchange.headers, exchange.arrived)
            if trace is not None:
                exchange.trace = trace
                route = route_of(segments)
                trace.describe(
                    f"{method} {route}",
                    {
                        "http.request.method": method,
                        "http.route": route,
                        "url.path": exchange.path,
                        "network.protocol.version": exchange.version,
                    },
                )
        return self._endpoint(exchange, segments)


def traced(routes: Mapping[str, Endpoint], tracing: Tracing | None) -> dict[str, Endpoint]:
    """The routes, with those that run models traced; without tracing, unchanged."""
    if tracing is None:
        return dict(routes)
    roots = {*PATTERNS, *BY_MODEL, ANYTHING}
    return {name: TracedEndpoint(one, tracing) if name in roots else one for name, one in routes.items()}


def route_of(segments: list[str]) -> str:
    """The pattern of a path that runs a model: the names of models and versions are replaced by their role."""
    root, *rest = segments
    if root in BY_MODEL and rest[:1] == ["models"] and len(rest) > 1:
        _, verb, name = rest[1].partition(":")
        rest[1] = f"{{model_name}}{verb}{name}"
        if rest[2:3] == ["versions"] and len(rest) > 3:
            rest[3] = "{model_version}"
    elif root in PATTERNS:
        known = PATTERNS[root]
        rest = [*known[: len(rest)], *(["{path}"] if len(rest) > len(known) else [])]
    elif root not in BY_MODEL:  # {model_name}/predict
        root, rest = "{model_name}", rest[:1]
    return "/" + "/".join([root, *rest])
