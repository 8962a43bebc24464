"""API description documents: OpenAPI 3.0.1, with the operation ids that generated clients know."""

from __future__ import annotations

from typing import Any

from flambeau import __version__
from flambeau.frontend.http.app import Endpoint, not_allowed
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.problems import respond_json

# (path, method, operation id, what it does)
Operation = tuple[str, str, str, str]

_ROOT: list[Operation] = [
    ("/", "options", "apiDescription", "Get openapi description."),
    ("/api-description", "get", "api-description", "Get openapi description."),
]
INFERENCE: list[Operation] = [
    *_ROOT,
    ("/ping", "get", "ping", "Get the health of the server."),
    ("/livez", "get", "livez", "Tell whether the process is alive."),
    ("/startupz", "get", "startupz", "Tell whether the models named at start have loaded."),
    ("/readyz", "get", "readyz", "Tell whether every model can answer."),
    ("/predictions/{model_name}", "post", "predictions", "Predict with the default version of a model."),
    (
        "/predictions/{model_name}/{model_version}",
        "post",
        "version_predictions",
        "Predict with one version of a model.",
    ),
]
MANAGEMENT: list[Operation] = [
    *_ROOT,
    ("/models", "get", "listModels", "List registered models."),
    ("/models", "post", "registerModel", "Register a model."),
    ("/models/{model_name}", "get", "describeModel", "Describe the default version of a model."),
    ("/models/{model_name}", "put", "setAutoScale", "Change the number of workers of a model."),
    ("/models/{model_name}", "delete", "unregisterModel", "Unregister the default version of a model."),
    ("/models/{model_name}/{model_version}", "get", "version_describeModel", "Describe one version of a model."),
    ("/models/{model_name}/{model_version}", "put", "version_setAutoScale", "Change the number of workers."),
    ("/models/{model_name}/{model_version}", "delete", "version_unregisterModel", "Unregister one version."),
    ("/models/{model_name}/{model_version}/set-default", "put", "setDefault", "Make a version the default one."),
]
METRICS: list[Operation] = [("/metrics", "get", "metrics", "Get metrics in Prometheus' text format.")]

QUERY: dict[str, list[tuple[str, str, str]]] = {
    "listModels": [
        ("limit", "integer", "How many models a page may hold; 100 at most."),
        ("next_page_token", "string", "The token the previous page ended with."),
    ],
    "registerModel": [
        ("url", "string", "An archive or folder in the model store."),
        ("model_name", "string", "Replaces the name in the manifest."),
        ("handler", "string", "Replaces the handler in the manifest."),
        ("runtime", "string", "python or python3."),
        ("batch_size", "integer", "The most requests run together."),
        ("max_batch_delay", "integer", "How long, in ms, a worker may wait for a batch to fill."),
        ("response_timeout", "integer", "Seconds a worker may take to answer."),
        ("startup_timeout", "integer", "Seconds a worker may take to load the model."),
        ("initial_workers", "integer", "Workers to start."),
        ("synchronous", "boolean", "Wait until the workers have started."),
    ],
    "setAutoScale": [
        ("min_worker", "integer", "The fewest workers."),
        ("max_worker", "integer", "The most workers."),
        ("synchronous", "boolean", "Wait until the workers have started."),
    ],
    "describeModel": [("customized", "boolean", "Ask the handler too.")],
}


def document(title: str, operations: list[Operation]) -> dict[str, Any]:
    """An OpenAPI document for these operations."""
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation_id, summary in operations:
        names = [segment[1:-1] for segment in path.split("/") if segment.startswith("{")]
        query = QUERY.get(operation_id) or QUERY.get(operation_id.removeprefix("version_"), [])
        parameters: list[dict[str, Any]] = [
            {"in": "path", "name": name, "required": True, "schema": {"type": "string"}} for name in names
        ] + [{"in": "query", "name": n, "description": text, "schema": {"type": kind}} for n, kind, text in query]
        paths.setdefault(path, {})[method] = {
            "description": summary,
            "operationId": operation_id,
            "parameters": parameters,
            "responses": {"200": {"description": "Success"}, "default": {"description": "An error, as JSON"}},
        }
    return {"openapi": "3.0.1", "info": {"title": title, "version": __version__}, "paths": paths}


def model_document(name: str) -> dict[str, Any]:
    """The description of one model's inference API."""
    text = document(f"RESTful API for: {name}", [(f"/predictions/{name}", "post", "predictions", "Predict.")])
    text["info"]["version"] = "1.0.0"
    return text


def management_document(name: str) -> dict[str, Any]:
    """The description of one model's management API."""
    operations = [
        (path.replace("{model_name}", name), method, operation_id, summary)
        for path, method, operation_id, summary in MANAGEMENT
        if path == "/models/{model_name}"
    ]
    return document(f"RESTful Management API for: {name}", operations)


def root(operations: list[Operation]) -> Endpoint:
    """`OPTIONS /`: the description of a listener."""

    def describe(exchange: Exchange, segments: list[str]) -> None:
        if exchange.method == "OPTIONS":
            respond_json(exchange, 200, document("TorchServe APIs", operations))
        else:
            not_allowed(exchange)

    return describe


def always(operations: list[Operation]) -> Endpoint:
    """`/api-description`: the same document for any method."""

    def describe(exchange: Exchange, segments: list[str]) -> None:
        respond_json(exchange, 200, document("TorchServe APIs", operations))

    return describe
