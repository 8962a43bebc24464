"""What each listener offers: the operations of its API description."""

from __future__ import annotations

from dataclasses import replace

from flambeau.frontend.http.openai.operations import OPENAI
from flambeau.frontend.http.openapi import FLAG, OBJECT, PREDICTING, STATUS, TEXT, WHOLE, Operation, Parameter, Schema

ANY_BODY: dict[str, Schema] = {
    "application/json": {},
    "application/octet-stream": {"type": "string", "format": "binary"},
    "text/plain": TEXT,
}
HANDLERS_ANSWER: dict[int, tuple[str, Schema | None]] = {200: ("What the handler answered", None)}
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
    problems=(404,),
    content_type="text/plain",
)


def _probe(name: str, summary: str, *, failing: int | None = None) -> Operation:
    answers: dict[int, tuple[str, Schema | None]] = {200: ("It is so", OBJECT)}
    if failing:
        answers[failing] = ("It is not so", OBJECT)
    operation_id = name.strip("/").replace("/", "_")
    return Operation(path=name, method="get", id=operation_id, summary=summary, answers=answers, problems=(400,))


def _prediction(path: str, operation_id: str, summary: str, body: dict[str, Schema] = ANY_BODY) -> Operation:
    return Operation(
        path=path,
        method="post",
        id=operation_id,
        summary=summary,
        body=body,
        answers=HANDLERS_ANSWER,
        problems=PREDICTING,
    )


INFERENCE = [
    *_ROOT,
    _probe("/ping", "Get the health of the server.", failing=500),
    _probe("/livez", "Tell whether the process is alive."),
    _probe("/startupz", "Tell whether the models named at start have loaded.", failing=503),
    _probe("/readyz", "Tell whether every model can answer.", failing=503),
    _prediction("/predictions/{model_name}", "predictions", "Predict with the default version of a model."),
    _prediction(
        "/predictions/{model_name}/{model_version}", "version_predictions", "Predict with one version of a model."
    ),
    _prediction("/explanations/{model_name}", "explanations", "Explain with the default version of a model."),
    _prediction(
        "/explanations/{model_name}/{model_version}", "version_explanations", "Explain with one version of a model."
    ),
    replace(
        _prediction("/invocations", "invocations", "Predict with the model that the query or the body names."),
        query=[Parameter("model_name", TEXT, "The model; not needed where only one was loaded at start.")],
    ),
    _prediction("/models/{model_name}/invoke", "invoke", "Predict; the parameters of the URL are inputs too."),
    _prediction(
        "/v1/models/{model_name}:predict", "kserve_v1_predict", "Predict (KServe v1).", {"application/json": INSTANCES}
    ),
    _prediction(
        "/v1/models/{model_name}:explain", "kserve_v1_explain", "Explain (KServe v1).", {"application/json": INSTANCES}
    ),
    *OPENAI,
    replace(_probe("/v1/models", "List models (OpenAI and KServe v1)."), id="kserve_v1_models"),
    replace(
        _probe("/v1/models/{model_name}", "Describe a model (OpenAI), and tell whether it is ready (KServe v1)."),
        id="kserve_v1_ready",
        problems=(400, 404),
    ),
    _probe("/v2", "Describe the server (KServe v2)."),
    _probe("/v2/health/live", "Tell whether the server is alive (KServe v2)."),
    _probe("/v2/health/ready", "Tell whether every model can answer (KServe v2).", failing=503),
    replace(
        _probe("/v2/models/{model_name}", "Describe a model (KServe v2)."),
        id="kserve_v2_metadata",
        problems=(400, 404),
    ),
    replace(
        _probe("/v2/models/{model_name}/ready", "Tell whether a model can answer (KServe v2).", failing=503),
        id="kserve_v2_ready",
        problems=(400, 404),
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
    Operation(
        path="/v2/repository/index",
        method="post",
        id="kserve_v2_index",
        summary="List every version of every model (KServe v2).",
        answers={200: ("The models", LIST)},
        problems=(400,),
    ),
    _METRICS,
]

_SETTINGS = [
    Parameter("model_name", TEXT, "Replaces the name in the manifest."),
    Parameter("handler", TEXT, "Replaces the handler in the manifest."),
    Parameter("runtime", {"type": "string", "enum": ["python", "python3", "LSP"]}, "Replaces the manifest's."),
    Parameter("batch_size", WHOLE, "The most requests run together."),
    Parameter("max_batch_delay", WHOLE, "How long, in ms, a worker may wait for a batch to fill."),
    Parameter("response_timeout", WHOLE, "Seconds a worker may take to answer."),
    Parameter("startup_timeout", WHOLE, "Seconds a worker may take to load the model."),
    Parameter("initial_workers", WHOLE, "Workers to start."),
    Parameter("synchronous", FLAG, "Wait until the workers have started; true unless told otherwise."),
    Parameter("s3_sse_kms", FLAG, "Sign the download with the server's AWS keys."),
]
_URL = Parameter("url", TEXT, "An archive or folder in the model store, or an allowed URL.", is_required=True)
_REGISTER_BODY: Schema = {
    "type": "object",
    "required": ["url"],
    "properties": {parameter.name: parameter.schema for parameter in (_URL, *_SETTINGS)},
}
_SCALE = [
    Parameter("min_worker", WHOLE, "The fewest workers; 1 unless told otherwise."),
    Parameter("max_worker", WHOLE, "The most workers; as many as the fewest unless told otherwise."),
    Parameter("number_gpu", WHOLE, "Accepted, without effect."),
    Parameter("synchronous", FLAG, "Wait until the workers have started."),
    Parameter("timeout", WHOLE, "Accepted, without effect."),
]
_SCALED: dict[int, tuple[str, Schema | None]] = {
    200: ("Done", STATUS),
    202: ("Accepted; it goes on", STATUS),
    206: ("Some workers have started", STATUS),
}
_DONE: dict[int, tuple[str, Schema | None]] = {200: ("Done", STATUS)}


def _per_model(path: str, prefix: str) -> list[Operation]:
    return [
        Operation(
            path=path,
            method="get",
            id=f"{prefix}describeModel",
            summary="Describe a model: its settings, its workers and their last failures.",
            query=[Parameter("customized", FLAG, "Ask the handler too.")],
            answers={200: ("The model, or each version of it", LIST)},
            problems=(400, 404, 500, 503),
        ),
        Operation(
            path=path,
            method="put",
            id=f"{prefix}setAutoScale",
            summary="Change the number of workers of a model.",
            query=_SCALE,
            answers=_SCALED,
            problems=(400, 404, 500, 507),
        ),
        Operation(
            path=path,
            method="delete",
            id=f"{prefix}unregisterModel",
            summary="Unregister a model, after what it accepted has been answered.",
            answers=_DONE,
            problems=(400, 403, 404, 405, 408),
        ),
    ]


MANAGEMENT = [
    *_ROOT,
    Operation(
        path="/models",
        method="get",
        id="listModels",
        summary="List registered models.",
        query=[
            Parameter("limit", WHOLE, "How many models a page may hold; 100 at most."),
            Parameter("next_page_token", TEXT, "The token the previous page ended with."),
        ],
        problems=(400,),
    ),
    Operation(
        path="/models",
        method="post",
        id="registerModel",
        summary="Register a model; the parameters may come as a JSON body instead.",
        query=[_URL, *_SETTINGS],
        body={"application/json": _REGISTER_BODY},
        answers=_SCALED,
        problems=(400, 404, 405, 409, 500, 507),
    ),
    *_per_model("/models/{model_name}", ""),
    *_per_model("/models/{model_name}/{model_version}", "version_"),
    Operation(
        path="/models/{model_name}/{model_version}/set-default",
        method="put",
        id="setDefault",
        summary="Make a version the default one.",
        answers=_DONE,
        problems=(400, 404),
    ),
    _METRICS,
]
METRICS = [_METRICS]
