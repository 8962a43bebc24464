"""Error → status and JSON: the one table, with TorchServe's class names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
    InvalidGraph,
    InvalidKey,
    JobFailed,
    ModelExists,
    ModelNotFound,
    NodeFailed,
    NotAllowed,
    NotJson,
    PlacementFailed,
    Unavailable,
    VersionNotFound,
    WorkerDied,
    WorkersFailed,
    WorkflowExists,
    WorkflowFailed,
    WorkflowNotFound,
)
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.openai.problems import is_openai, openai_problem, openai_status

JSON_TYPE: Header = ("content-type", "application/json")
NOT_FOUND = "Requested resource is not found, please refer to API document."
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."

PROBLEMS: dict[type[FlambeauError], tuple[int, str]] = {
    ArchiveError: (400, "InvalidModelException"),
    ConfigError: (400, "InvalidModelException"),
    DownloadFailed: (400, "DownloadArchiveException"),
    DependenciesFailed: (400, "ModelException"),
    BadRequest: (400, "BadRequestException"),
    NotJson: (500, "JsonSyntaxException"),  # as TorchServe answers a register call
    InvalidKey: (400, "InvalidKeyException"),
    NotAllowed: (405, "MethodNotAllowedException"),
    VersionNotFound: (404, "ModelVersionNotFoundException"),
    ModelNotFound: (404, "ModelNotFoundException"),
    ModelExists: (409, "ConflictStatusException"),
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


def status_and_type(error: FlambeauError) -> tuple[int, str]:
    """The status and TorchServe's name for an error."""
    if isinstance(error, JobFailed):
        return error.status, "InternalServerException"
    if isinstance(error, (WorkerDied, WorkersFailed)) and error.out_of_memory:
        return OUT_OF_MEMORY, "InternalServerException"
    return next((PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS), (500, "InternalServerException"))


def respond_problem(exchange: Exchange, error: FlambeauError, *, details: bool) -> int:
    """Answer with an error; `details` adds the cause, for callers who may know."""
    status, kind = status_and_type(error)
    headers = [JSON_TYPE]
    if isinstance(error, Unavailable) and error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    if is_openai(exchange.path):
        status = openai_status(error, status)
    cause = getattr(error, "cause", "") if details else ""
    exchange.respond(status, problem(exchange.path, status, kind, str(error), cause, error), headers)
    return status


def problem_event(error: FlambeauError, *, details: bool) -> bytes:
    """The server-sent event that ends a stream which could not be finished."""
    status, kind = status_and_type(error)
    body = to_document(status, kind, str(error), getattr(error, "cause", "") if details else "")
    text = json.dumps({"error": body}, ensure_ascii=False)
    return f"event: error\ndata: {text}\n\n".encode("utf-8", "backslashreplace")


def respond_json(exchange: Exchange, status: int, document: Any) -> None:
    """Answer with a JSON document of the server's own."""
    exchange.respond(status, to_json(document), (JSON_TYPE,))


def problem(
    path: str, status: int, kind: str, message: str, cause: str = "", error: FlambeauError | None = None
) -> bytes:
    """The body of an error answer; clients of OpenAI's API and of KServe's second protocol look for `error`."""
    if is_openai(path):
        return openai_problem(status, message, error, cause)
    more = {"error": message} if path.startswith("/v2/") else {}
    return to_json(to_document(status, kind, message, cause, more))


def to_document(
    status: int, kind: str, message: str, cause: str = "", more: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """What is said of an error, in TorchServe's words."""
    document: dict[str, Any] = {"code": status, "type": kind, "message": message, **more}
    if cause:
        document["cause"] = cause.splitlines()
    return document


def to_json(document: Any) -> bytes:
    """JSON as the server writes it: indented by two, UTF-8, one newline at the end."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
