"""Errors → status and JSON, in the format of each API: one table, with the class names that existing clients match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from flambeau.errors import (
    ArchiveError,
    BadRequest,
    BrokenWorkflow,
    ConfigError,
    DeadlinePassed,
    DefaultVersionInUse,
    DependenciesFailed,
    DownloadFailed,
    FileTaken,
    FlambeauError,
    ForeignRequest,
    InvalidField,
    InvalidGraph,
    InvalidInput,
    InvalidKey,
    JobFailed,
    ModelExists,
    ModelNotFound,
    ModelRemoved,
    NodeFailed,
    NotAllowed,
    PlacementFailed,
    QueueFull,
    Unavailable,
    VersionNotFound,
    WorkerDied,
    WorkersFailed,
    WorkflowExists,
    WorkflowFailed,
    WorkflowNotFound,
)
from flambeau.frontend.http.exchange import Exchange, Header

JSON_TYPE: Header = ("content-type", "application/json")
NOT_FOUND = "Requested resource is not found, please refer to API document."
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."

ERRORS: dict[type[FlambeauError], tuple[int, str]] = {
    ArchiveError: (400, "InvalidModelException"),
    ConfigError: (400, "InvalidModelException"),
    DownloadFailed: (400, "DownloadArchiveException"),
    DependenciesFailed: (400, "ModelException"),
    BadRequest: (400, "BadRequestException"),
    InvalidKey: (400, "InvalidKeyException"),
    ForeignRequest: (403, "ForbiddenException"),
    NotAllowed: (405, "MethodNotAllowedException"),
    VersionNotFound: (404, "ModelVersionNotFoundException"),
    ModelNotFound: (404, "ModelNotFoundException"),
    ModelExists: (409, "ConflictStatusException"),
    ModelRemoved: (409, "ConflictStatusException"),
    FileTaken: (500, "InternalServerException"),
    DefaultVersionInUse: (403, "InvalidModelVersionException"),
    Unavailable: (503, "ServiceUnavailableException"),
    DeadlinePassed: (408, "RequestTimeoutException"),
    WorkersFailed: (500, "InternalServerException"),
    PlacementFailed: (500, "WorkerInitializationException"),
    WorkflowNotFound: (404, "WorkflowNotFoundException"),
    WorkflowExists: (409, "ConflictStatusException"),
    BrokenWorkflow: (500, "InvalidWorkflowException"),
    InvalidGraph: (400, "InvalidDAGException"),
    WorkflowFailed: (500, "WorkflowException"),
    NodeFailed: (500, "InternalServerException"),
    JobFailed: (503, "InternalServerException"),
    WorkerDied: (500, "InternalServerException"),
}
OUT_OF_MEMORY = 507

SHARED_PATH = "/v1/models"  # KServe has this path too
OPENAI_STATUSES: dict[type[FlambeauError], int] = {InvalidKey: 401, QueueFull: 429}  # where the table above has others
OPENAI_CODES: dict[type[FlambeauError], str] = {
    InvalidKey: "invalid_api_key",
    ModelNotFound: "model_not_found",
    QueueFull: "queue_full",
    WorkerDied: "worker_died",
    WorkersFailed: "worker_failed",
}
TOO_LONG = "the model's context"  # in a worker's error about a prompt that does not fit
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def status_and_type(error: FlambeauError) -> tuple[int, str]:
    """The HTTP status and the class name of an error."""
    if isinstance(error, JobFailed):
        return error.status, "BadRequestException" if isinstance(error, InvalidInput) else "InternalServerException"
    if isinstance(error, (WorkerDied, WorkersFailed)) and error.out_of_memory:
        return OUT_OF_MEMORY, "InternalServerException"
    return next((ERRORS[kind] for kind in type(error).__mro__ if kind in ERRORS), (500, "InternalServerException"))


def respond_error(exchange: Exchange, error: FlambeauError, *, details: bool) -> int:
    """Respond with an error; `details` adds its cause. Returns the status."""
    status, kind = status_and_type(error)
    headers = [JSON_TYPE]
    if isinstance(error, Unavailable) and error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    if is_openai(exchange.path):
        status = openai_status(error, status)
    cause = getattr(error, "cause", "") if details else ""
    exchange.respond(status, error_body(exchange.path, status, kind, str(error), cause, error), headers)
    return status


def error_event(error: FlambeauError, *, details: bool) -> bytes:
    """The server-sent event that ends a failed stream."""
    status, kind = status_and_type(error)
    body = to_document(status, kind, str(error), getattr(error, "cause", "") if details else "")
    text = json.dumps({"error": body}, ensure_ascii=False)
    return f"event: error\ndata: {text}\n\n".encode("utf-8", "backslashreplace")


def respond_json(exchange: Exchange, status: int, document: Any) -> None:
    exchange.respond(status, to_json(document), (JSON_TYPE,))


def error_body(
    path: str, status: int, kind: str, message: str, cause: str = "", error: FlambeauError | None = None
) -> bytes:
    """The body of an error; OpenAI's API and KServe's second protocol have an `error` field."""
    if is_openai(path):
        return openai_error_body(status, message, error, cause)
    more = {"error": message} if path.startswith("/v2/") else {}
    return to_json(to_document(status, kind, message, cause, more))


def to_document(
    status: int, kind: str, message: str, cause: str = "", more: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """An error in the format of the inference and management APIs."""
    document: dict[str, Any] = {"code": status, "type": kind, "message": message, **more}
    if cause:
        document["cause"] = cause.splitlines()
    return document


def to_json(document: Any) -> bytes:
    """Indented JSON in UTF-8 with a final newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


# ---- OpenAI's format ----


def is_openai(path: str) -> bool:
    """Whether a path belongs to OpenAI's API alone; KServe has /v1/models too."""
    return path.startswith("/v1/") and path != SHARED_PATH and not path.startswith(f"{SHARED_PATH}/")


def openai_status(error: FlambeauError, status: int) -> int:
    """The status of an error in OpenAI's API; `status` is its status in the other APIs."""
    return next((OPENAI_STATUSES[kind] for kind in type(error).__mro__ if kind in OPENAI_STATUSES), status)


def openai_error_body(status: int, message: str, error: FlambeauError | None = None, cause: str = "") -> bytes:
    return msgspec.json.encode({"error": openai_error(status, message, error, cause)})


def openai_error(status: int, message: str, error: FlambeauError | None = None, cause: str = "") -> dict[str, Any]:
    """The `error` object of a response, or of the last event of a failed stream."""
    code = next((OPENAI_CODES[kind] for kind in type(error).__mro__ if kind in OPENAI_CODES), None)
    if status == 400 and TOO_LONG in message:
        code = "context_length_exceeded"
    param = error.field if isinstance(error, InvalidField) else "model" if isinstance(error, ModelNotFound) else None
    kind = OPENAI_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    document: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if isinstance(error, WorkerDied) and (lines := cause.splitlines()):  # a handler's traceback stays in the log
        # Clients show their users only the message.
        document |= {"message": f"{message.rstrip('.')}: {lines[0]}", "cause": lines}
    return document
