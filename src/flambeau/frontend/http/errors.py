"""Errors → status and JSON, in the format of each API: one table, with the class names that existing clients match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from flambeau.config.server import ErrorStyle
from flambeau.errors import (
    ArchiveError,
    BadRequest,
    BodyTooLarge,
    BrokenWorkflow,
    ConfigError,
    DeadlinePassed,
    DefaultVersionInUse,
    DependenciesFailed,
    DownloadFailed,
    FileTaken,
    FlambeauError,
    ForeignRequest,
    IdempotencyKeyReused,
    InvalidField,
    InvalidGraph,
    InvalidInput,
    InvalidKey,
    JobFailed,
    KeyLimitReached,
    ModelExists,
    ModelNotAllowed,
    ModelNotFound,
    ModelRemoved,
    NodeFailed,
    NotAllowed,
    ObjectNotFound,
    PlacementFailed,
    QueueFull,
    RequestQuarantined,
    RequestRepeated,
    Unavailable,
    UnsupportedEncoding,
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
    BodyTooLarge: (413, "PayloadTooLargeException"),
    RequestQuarantined: (422, "BadRequestException"),
    UnsupportedEncoding: (415, "UnsupportedMediaTypeException"),
    InvalidKey: (400, "InvalidKeyException"),
    ForeignRequest: (403, "ForbiddenException"),
    NotAllowed: (405, "MethodNotAllowedException"),
    IdempotencyKeyReused: (422, "UnprocessableRequestException"),
    RequestRepeated: (409, "ConflictStatusException"),
    VersionNotFound: (404, "ModelVersionNotFoundException"),
    ModelNotFound: (404, "ModelNotFoundException"),
    ModelExists: (409, "ConflictStatusException"),
    ModelRemoved: (409, "ConflictStatusException"),
    FileTaken: (500, "InternalServerException"),
    DefaultVersionInUse: (403, "InvalidModelVersionException"),
    ObjectNotFound: (404, "ResourceNotFoundException"),
    KeyLimitReached: (429, "TooManyRequestsException"),
    ModelNotAllowed: (403, "ForbiddenException"),
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
TOKENIZER_PATHS = ("/tokenize", "/detokenize")
OPENAI_STATUSES: dict[type[FlambeauError], int] = {QueueFull: 429}  # where the table above has others
OPENAI_CODES: dict[type[FlambeauError], str] = {
    InvalidKey: "invalid_api_key",
    ModelNotFound: "model_not_found",
    KeyLimitReached: "rate_limit_exceeded",
    ModelNotAllowed: "model_not_allowed",
    QueueFull: "queue_full",
    IdempotencyKeyReused: "idempotency_key_reused",
    RequestRepeated: "request_repeated",
    RequestQuarantined: "request_quarantined",
    WorkerDied: "worker_died",
    WorkersFailed: "worker_failed",
}
TOO_LONG = "the model's context"  # in a worker's error about a prompt that does not fit
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


# Where existing clients match another status. The names of plain errors are those of their statuses.
PLAIN_STATUSES: dict[type[FlambeauError], int] = {InvalidKey: 401, FileTaken: 409}
PLAIN_TYPES = {
    401: "InvalidKeyException",
    403: "ForbiddenException",
    404: "ResourceNotFoundException",
    408: "RequestTimeoutException",
    409: "ConflictStatusException",
    413: "PayloadTooLargeException",
    415: "UnsupportedMediaTypeException",
    429: "TooManyRequestsException",
}
MATCHED = ErrorStyle()
ENCODINGS: Header = ("accept-encoding", "gzip, deflate")  # of bodies
CHALLENGE: Header = ("www-authenticate", "Bearer")


def status_and_type(error: FlambeauError, style: ErrorStyle = MATCHED) -> tuple[int, str]:
    """The HTTP status and the class name of an error."""
    status, name = matched_status_and_type(error)
    if not style.is_plain:
        return status, name
    status = next((PLAIN_STATUSES[kind] for kind in type(error).__mro__ if kind in PLAIN_STATUSES), status)
    if 400 <= status < 500 and name == "InternalServerException":  # a client's mistake
        name = PLAIN_TYPES.get(status, "BadRequestException")
    return status, name


def message_of(error: FlambeauError, style: ErrorStyle) -> str:
    """The text of an error; a plain one ends with the cause."""
    if not style.is_plain:
        return str(error)
    text, reason = error.plain or str(error), error.reason
    if isinstance(error, JobFailed) and not style.has_details:
        reason = exception_name(reason)
    return text if not reason or reason in text else f"{text.rstrip('. ')}: {reason}"


def exception_name(reason: str) -> str:
    """The exception in `KeyError: 'name'`, without its text, which may hold data of others; empty for other reasons."""
    name = reason.partition(":")[0]
    return name if name.replace(".", "").isidentifier() else ""


def matched_status_and_type(error: FlambeauError) -> tuple[int, str]:
    """The status and the class name that existing clients match."""
    if isinstance(error, JobFailed):
        return error.status, "BadRequestException" if isinstance(error, InvalidInput) else "InternalServerException"
    if isinstance(error, (WorkerDied, WorkersFailed)) and error.out_of_memory:
        return OUT_OF_MEMORY, "InternalServerException"
    return next((ERRORS[kind] for kind in type(error).__mro__ if kind in ERRORS), (500, "InternalServerException"))


def respond_error(exchange: Exchange, error: FlambeauError, style: ErrorStyle) -> int:
    """Respond with an error. Returns the status."""
    exchange.note_error(error)
    if is_openai(exchange.path) or exchange.path == SHARED_PATH:
        style = replace(style, is_plain=True)
    status, kind = status_and_type(error, style)
    headers = [JSON_TYPE]
    if isinstance(error, Unavailable) and error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    if is_openai(exchange.path):
        status = openai_status(error, status)
    if status == 401:
        headers.append(CHALLENGE)
    elif status == 415:
        headers.append(ENCODINGS)
    cause = error.cause if style.has_details else ""
    exchange.respond(status, error_body(exchange.path, status, kind, message_of(error, style), cause, error), headers)
    return status


def error_event(error: FlambeauError, style: ErrorStyle) -> bytes:
    """The server-sent event that ends a failed stream."""
    status, kind = status_and_type(error, style)
    cause = error.cause if style.has_details else ""
    text = json.dumps({"error": to_document(status, kind, message_of(error, style), cause)}, ensure_ascii=False)
    return f"event: error\ndata: {text}\n\n".encode("utf-8", "backslashreplace")


def respond_json(exchange: Exchange, status: int, document: Any) -> None:
    exchange.respond(status, to_json(document), (JSON_TYPE,))


def error_body(
    path: str, status: int, kind: str, message: str, cause: str = "", error: FlambeauError | None = None
) -> bytes:
    """The body of an error; OpenAI's API and KServe's second protocol have an `error` field."""
    if is_anthropic(path):
        return msgspec.json.encode(anthropic_error(status, message)) + b"\n"
    if is_openai(path):
        return openai_error_body(status, message, error, cause)
    more: dict[str, Any] = {}
    if path.startswith("/v2/"):
        more["error"] = message
    elif path == SHARED_PATH:
        more["error"] = openai_error(status, message, error)
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
    """Whether a path belongs to OpenAI's API alone, or is one of vLLM's; KServe has /v1/models too."""
    if path in TOKENIZER_PATHS:
        return True
    return path.startswith("/v1/") and path != SHARED_PATH and not path.startswith(f"{SHARED_PATH}/")


def openai_status(error: FlambeauError, status: int) -> int:
    """The status of an error in OpenAI's API; `status` is its status in the other APIs."""
    return next((OPENAI_STATUSES[kind] for kind in type(error).__mro__ if kind in OPENAI_STATUSES), status)


def openai_error_body(status: int, message: str, error: FlambeauError | None = None, cause: str = "") -> bytes:
    return msgspec.json.encode({"error": openai_error(status, message, error, cause)}) + b"\n"


def openai_error(status: int, message: str, error: FlambeauError | None = None, cause: str = "") -> dict[str, Any]:
    """The `error` object of a response, or of the last event of a failed stream."""
    code = next((OPENAI_CODES[kind] for kind in type(error).__mro__ if kind in OPENAI_CODES), None)
    if status == 400 and TOO_LONG in message:
        code = "context_length_exceeded"
    field = error.field if isinstance(error, InvalidField | InvalidInput) else ""
    param = field or ("model" if isinstance(error, ModelNotFound) else None)
    kind = OPENAI_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    document: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if isinstance(error, WorkerDied) and (lines := cause.splitlines()):  # a handler's traceback stays in the log
        document["cause"] = lines
    return document


# ---- Anthropic's format ----

MESSAGES_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error, or the last event of a failed stream."""
    kind = ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
