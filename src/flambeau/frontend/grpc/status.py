"""Errors → gRPC statuses: one table, with the codes and class names that existing clients match."""

from __future__ import annotations

from collections.abc import Callable

from grpc import StatusCode

from flambeau.config.server import ErrorStyle
from flambeau.errors import (
    ArchiveError,
    BadRequest,
    ConfigError,
    DeadlinePassed,
    DefaultVersionInUse,
    FlambeauError,
    InvalidKey,
    JobFailed,
    KeyLimitReached,
    ModelExists,
    ModelNotAllowed,
    ModelNotFound,
    ModelRemoved,
    NotAllowed,
    Unavailable,
    WorkerDied,
)
from flambeau.frontend.grpc.messages import MalformedMessage
from flambeau.frontend.http.errors import MATCHED, message_of, status_and_type

Statuses = Callable[[FlambeauError], tuple[StatusCode, str]]  # the code and the class name

CODES: dict[type[FlambeauError], StatusCode] = {
    ArchiveError: StatusCode.INVALID_ARGUMENT,
    ConfigError: StatusCode.INVALID_ARGUMENT,
    BadRequest: StatusCode.INVALID_ARGUMENT,
    InvalidKey: StatusCode.PERMISSION_DENIED,
    NotAllowed: StatusCode.PERMISSION_DENIED,
    ModelNotFound: StatusCode.NOT_FOUND,
    ModelExists: StatusCode.ALREADY_EXISTS,
    ModelRemoved: StatusCode.ABORTED,
    DefaultVersionInUse: StatusCode.FAILED_PRECONDITION,
    DeadlinePassed: StatusCode.DEADLINE_EXCEEDED,
    KeyLimitReached: StatusCode.RESOURCE_EXHAUSTED,
    ModelNotAllowed: StatusCode.PERMISSION_DENIED,
}
_BY_HTTP = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    416: StatusCode.OUT_OF_RANGE,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
_PACKAGES = {  # packages of the class names; the others are in .http
    "DownloadArchiveException": "org.pytorch.serve.archive",
    "InvalidModelException": "org.pytorch.serve.archive.model",
    "ModelException": "org.pytorch.serve.archive.model",
    "ModelNotFoundException": "org.pytorch.serve.archive.model",
    "ModelVersionNotFoundException": "org.pytorch.serve.archive.model",
    "WorkerInitializationException": "org.pytorch.serve.wlm",
}
MAX_DETAILS = 2000  # bytes; up to three times as many travel in a header, and clients take 8 KB of those


def code_of_http(status: int) -> StatusCode:
    """The gRPC code that existing clients get for an HTTP status."""
    if status in _BY_HTTP:
        return _BY_HTTP[status]
    if 400 <= status < 500:
        return StatusCode.FAILED_PRECONDITION
    return StatusCode.INTERNAL if 500 <= status < 600 else StatusCode.UNKNOWN


def of_management(error: FlambeauError) -> tuple[StatusCode, str]:
    """The code and the class name of an error."""
    status, name = status_and_type(error)
    if isinstance(error, (JobFailed, WorkerDied)):
        code = code_of_http(status)
    else:
        code = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), StatusCode.INTERNAL)
    return code, f"{_PACKAGES.get(name, 'org.pytorch.serve.http')}.{name}"


def of_old_management(error: FlambeauError) -> tuple[StatusCode, str]:
    """The same, with the codes that existing clients get for conflicts and time-outs."""
    code, name = of_management(error)
    return StatusCode.UNKNOWN if isinstance(error, (ModelExists, DefaultVersionInUse, DeadlinePassed)) else code, name


def of_prediction(error: FlambeauError) -> tuple[StatusCode, str]:
    """The same for prediction calls, where errors before a worker has the request are INTERNAL.

    Two of the names are irregular, and clients may match them.
    """
    if isinstance(error, ModelNotFound):
        return StatusCode.INTERNAL, of_management(error)[1]
    return of_open_inference(error)


def of_open_inference(error: FlambeauError) -> tuple[StatusCode, str]:
    """The same for Open Inference calls, where an unknown model is NOT_FOUND."""
    if isinstance(error, BadRequest) and not isinstance(error, MalformedMessage):
        return StatusCode.INTERNAL, "BadRequestException.()"
    if isinstance(error, Unavailable) and not isinstance(error, KeyLimitReached):
        return StatusCode.INTERNAL, "InternalServerException.()"
    return of_management(error)


def details_of(error: FlambeauError, name: str, style: ErrorStyle = MATCHED) -> str:
    """The message, a new line and the class name; authorization errors have no class name."""
    message = message_of(error, style)
    if isinstance(error, (InvalidKey, NotAllowed)):
        return message
    raw = message.encode("utf-8", "backslashreplace")
    if len(raw) > MAX_DETAILS:
        message = raw[:MAX_DETAILS].decode("utf-8", "ignore") + "…"
    return f"{message}\n{name}"
