"""The operations of the inference, management and metrics APIs, and the OpenAPI documents that describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from flambeau import __version__
from flambeau.frontend import management_parameters as parameters
from flambeau.frontend.http.errors import JSON_TYPE
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openapi import (
    OBJECT,
    OPENAI_ERROR,
    PREDICTING,
    STATUS,
    TEXT,
    WHOLE,
    Operation,
    Parameter,
    Schema,
    document,
)
from flambeau.frontend.http.router import Endpoint, not_allowed
from flambeau.frontend.management_parameters import CallParameter

ANY_BODY: dict[str, Schema] = {
    "application/json": {},
    "application/octet-stream": {"type": "string", "format": "binary"},
    "text/plain": TEXT,
}
HANDLER_RESPONSE: dict[int, tuple[str, Schema | None]] = {200: ("The handler's response", None)}
LIST: Schema = {"type": "array", "items": OBJECT}
TENSOR: Schema = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": TEXT,
        "shape": {"type": "array", "items": WHOLE},
        "datatype": TEXT,
        "data": {"type": "array", "items": {}},
        "parameters": OBJECT,
    },
}
TENSORS: Schema = {
    "type": "object",
    "required": ["inputs"],
    "properties": {"id": TEXT, "parameters": OBJECT, "inputs": {"type": "array", "items": TENSOR, "minItems": 1}},
}
INSTANCES: Schema = {
    "type": "object",
    "required": ["instances"],
    "properties": {"instances": {"type": "array", "items": {}, "minItems": 1}},
}

_ROOT = [
    Operation(path="/", method="options", id="apiDescription", summary="Get openapi description."),
    Operation(path="/api-description", method="get", id="api-description", summary="Get openapi description."),
]
_METRICS = Operation(
    path="/metrics",
    method="get",
    id="metrics",
    summary="Get metrics in Prometheus' text format, on the metrics listener.",
    query=[Parameter("name[]", {"type": "array", "items": TEXT}, "Names of the metrics to get; all without it.")],
    answers={200: ("Metrics", TEXT)},
    errors=(404,),
    content_type="text/plain",
)


def _probe(name: str, summary: str, *, failing: int | None = None) -> Operation:
    answers: dict[int, tuple[str, Schema | None]] = {200: ("Yes", OBJECT)}
    if failing:
        answers[failing] = ("No", OBJECT)
    operation_id = name.strip("/").replace("/", "_")
    return Operation(path=name, method="get", id=operation_id, summary=summary, answers=answers, errors=(400,))


def _prediction(path: str, operation_id: str, summary: str, body: dict[str, Schema] = ANY_BODY) -> Operation:
    return Operation(
        path=path,
        method="post",
        id=operation_id,
        summary=summary,
        body=body,
        answers=HANDLER_RESPONSE,
        errors=PREDICTING,
    )


INFERENCE = [
    *_ROOT,
    _probe("/ping", "Get the health of the server.", failing=500),
    _probe("/livez", "Whether the process is alive."),
    _probe("/startupz", "Whether the models named at start have loaded.", failing=503),
    _probe("/readyz", "Whether every model can answer.", failing=503),
    _prediction("/predictions/{model_name}", "predictions", "Predict with the default version of a model."),
    _prediction(
        "/predictions/{model_name}/{model_version}", "version_predictions", "Predict with one version of a model."
    ),
    _prediction("/explanations/{model_name}", "explanations", "Explain with the default version of a model."),
    _prediction(
        "/explanations/{model_name}/{model_version}", "version_explanations", "Explain with one version of a model."
    ),
    replace(
        _prediction("/invocations", "invocations", "Predict with the model named by the query or the body."),
        query=[Parameter("model_name", TEXT, "The model; optional if only one was loaded at start.")],
    ),
    _prediction("/{model_name}/predict", "legacy_predict", "Predict; an older path of /predictions."),
    _prediction(
        "/{model_name}/{model_version}/predict",
        "legacy_version_predict",
        "Predict with one version of a model; an older path of /predictions.",
    ),
    _prediction("/models/{model_name}/invoke", "invoke", "Predict; the parameters of the URL are inputs too."),
    _prediction(
        "/v1/models/{model_name}:predict", "kserve_v1_predict", "Predict (KServe v1).", {"application/json": INSTANCES}
    ),
    _prediction(
        "/v1/models/{model_name}:explain", "kserve_v1_explain", "Explain (KServe v1).", {"application/json": INSTANCES}
    ),
    replace(_probe("/v1/models", "List models (OpenAI and KServe v1)."), id="kserve_v1_models"),
    replace(
        _probe("/v1/models/{model_name}", "Describe a model (OpenAI), and whether it is ready (KServe v1)."),
        id="kserve_v1_ready",
        errors=(400, 404),
    ),
    _probe("/v2", "Describe the server (KServe v2)."),
    _probe("/v2/health/live", "Whether the server is alive (KServe v2)."),
    _probe("/v2/health/ready", "Whether every model can answer (KServe v2).", failing=503),
    replace(
        _probe("/v2/models/{model_name}", "Describe a model (KServe v2)."),
        id="kserve_v2_metadata",
        errors=(400, 404),
    ),
    replace(
        _probe("/v2/models/{model_name}/ready", "Whether a model can answer (KServe v2).", failing=503),
        id="kserve_v2_ready",
        errors=(400, 404),
    ),
    _prediction(
        "/v2/models/{model_name}/infer", "kserve_v2_infer", "Predict (KServe v2).", {"application/json": TENSORS}
    ),
    _prediction(
        "/v2/models/{model_name}/versions/{model_version}/infer",
        "kserve_v2_version_infer",
        "Predict with one version of a model (KServe v2).",
        {"application/json": TENSORS},
    ),
    _prediction(
        "/v2/models/{model_name}/explain", "kserve_v2_explain", "Explain (KServe v2).", {"application/json": TENSORS}
    ),
    _prediction(
        "/v2/models/{model_name}/versions/{model_version}/explain",
        "kserve_v2_version_explain",
        "Explain with one version of a model (KServe v2).",
        {"application/json": TENSORS},
    ),
    replace(
        _probe("/v2/models/{model_name}/versions/{model_version}", "Describe one version of a model (KServe v2)."),
        id="kserve_v2_version_metadata",
        errors=(400, 404),
    ),
    replace(
        _probe(
            "/v2/models/{model_name}/versions/{model_version}/ready",
            "Whether one version of a model can answer (KServe v2).",
            failing=503,
        ),
        id="kserve_v2_version_ready",
        errors=(400, 404),
    ),
    Operation(
        path="/v2/repository/index",
        method="post",
        id="kserve_v2_index",
        summary="List every version of every model (KServe v2).",
        answers={200: ("The models", LIST)},
        errors=(400,),
    ),
    _METRICS,
]

_REGISTER_BODY: Schema = {
    "type": "object",
    "required": ["url"],
    "properties": {one.name: one.schema for one in parameters.REGISTER},
}
_SCALED: dict[int, tuple[str, Schema | None]] = {
    200: ("Done", STATUS),
    202: ("Accepted; the work continues", STATUS),
    206: ("Some workers have started", STATUS),
}
_DONE: dict[int, tuple[str, Schema | None]] = {200: ("Done", STATUS)}


def _query(table: Sequence[CallParameter]) -> list[Parameter]:
    return [Parameter(one.name, one.schema, one.doc, one.is_required) for one in table]


def _per_model(path: str, prefix: str) -> list[Operation]:
    return [
        Operation(
            path=path,
            method="get",
            id=f"{prefix}describeModel",
            summary="Describe a model: its settings, its workers and their last failures.",
            query=_query(parameters.DESCRIBE),
            answers={200: ("The model, or each version of it", LIST)},
            errors=(400, 404, 500, 503),
        ),
        Operation(
            path=path,
            method="put",
            id=f"{prefix}setAutoScale",
            summary="Change the number of workers of a model.",
            query=_query(parameters.SCALE),
            answers=_SCALED,
            errors=(400, 404, 409, 500, 507),
        ),
        Operation(
            path=path,
            method="delete",
            id=f"{prefix}unregisterModel",
            summary="Unregister a model after it has answered the requests it accepted.",
            answers=_DONE,
            errors=(400, 403, 404, 405, 408),
        ),
    ]


MANAGEMENT = [
    *_ROOT,
    Operation(
        path="/models",
        method="get",
        id="listModels",
        summary="List registered models.",
        query=_query(parameters.LIST),
        errors=(400,),
    ),
    Operation(
        path="/models",
        method="post",
        id="registerModel",
        summary="Register a model; the parameters may be a JSON body instead.",
        query=_query(parameters.REGISTER),
        body={"application/json": _REGISTER_BODY},
        answers=_SCALED,
        errors=(400, 404, 405, 409, 500, 507),
    ),
    *_per_model("/models/{model_name}", ""),
    *_per_model("/models/{model_name}/{model_version}", "version_"),
    Operation(
        path="/models/{model_name}/{model_version}/set-default",
        method="put",
        id="setDefault",
        summary="Make a version the default one.",
        answers=_DONE,
        errors=(400, 404),
    ),
    Operation(
        path="/models/{model_name}/{model_version}/traffic",
        method="put",
        id="setTraffic",
        summary="Give a version a percentage of the requests that name none, or copies of them.",
        query=_query(parameters.TRAFFIC),
        answers=_DONE,
        errors=(400, 404),
    ),
    Operation(
        path="/models/{model_name}/{model_version}/traffic",
        method="get",
        id="traffic",
        summary="The share of a version, its answers and errors, and how its answers to copies differ.",
        errors=(400, 404),
    ),
    Operation(
        path="/slow",
        method="get",
        id="slowRequests",
        summary="The slowest requests of the last hour, and where their time went.",
        query=_query(parameters.SLOW),
        errors=(400, 404, 405),
    ),
    Operation(
        path="/v1/load_lora_adapter",
        method="post",
        id="loadLoraAdapter",
        summary="Load a LoRA adapter for a language model (vLLM).",
        query=_query(parameters.LOAD_ADAPTER),
        answers=_DONE,
        errors=(400, 404, 405, 503),
        error=OPENAI_ERROR,
    ),
    Operation(
        path="/v1/unload_lora_adapter",
        method="post",
        id="unloadLoraAdapter",
        summary="Unload a LoRA adapter (vLLM).",
        query=_query(parameters.UNLOAD_ADAPTER),
        answers=_DONE,
        errors=(400, 404, 405),
        error=OPENAI_ERROR,
    ),
    Operation(
        path="/cluster",
        method="get",
        id="cluster",
        summary="The other machines of this server, and where its workers run or what they wait for.",
        errors=(400, 405),
    ),
    _METRICS,
]
METRICS = [_METRICS]


# ---- documents ----


def listener_document(operations: Sequence[Operation]) -> dict[str, Any]:
    return document("TorchServe APIs", operations, __version__)


def model_document(name: str) -> dict[str, Any]:
    """The inference API of one model."""
    operations = [
        replace(operation, path=operation.path.replace("{model_name}", name))
        for operation in INFERENCE
        if operation.id in ("predictions", "explanations", "kserve_v1_predict", "kserve_v2_infer")
    ]
    return document(f"RESTful API for: {name}", operations, "1.0.0")


def management_document(name: str) -> dict[str, Any]:
    """The management API of one model."""
    operations = [operation for operation in MANAGEMENT if "{model_name}" in operation.path]
    named = [replace(operation, path=operation.path.replace("{model_name}", name)) for operation in operations]
    return document(f"RESTful Management API for: {name}", named, __version__)


class DescriptionApi:
    """The description of a listener: `OPTIONS /`, and /api-description for any method."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._content = b""  # made by the first request

    def routes(self) -> dict[str, Endpoint]:
        return {"": self.root, "api-description": self.describe}

    def root(self, exchange: Exchange, segments: list[str]) -> None:
        if exchange.method == "OPTIONS":
            self.describe(exchange, segments)
        else:
            not_allowed(exchange)

    def describe(self, exchange: Exchange, segments: list[str]) -> None:
        if not self._content:
            compact = msgspec.json.encode(listener_document(self._operations))
            self._content = msgspec.json.format(compact, indent=2) + b"\n"
        exchange.respond(200, self._content, (JSON_TYPE,))
