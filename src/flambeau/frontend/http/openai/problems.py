"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

import msgspec

from flambeau.errors import (
    FlambeauError,
    InvalidField,
    InvalidKey,
    ModelNotFound,
    QueueFull,
    WorkerDied,
    WorkersFailed,
)

BOTH = "/v1/models"  # KServe has this path too
STATUSES: dict[type[FlambeauError], int] = {InvalidKey: 401, QueueFull: 429}  # where TorchServe's table has others
CODES: dict[type[FlambeauError], str] = {
    InvalidKey: "invalid_api_key",
    ModelNotFound: "model_not_found",
    QueueFull: "queue_full",
    WorkerDied: "worker_died",
    WorkersFailed: "worker_failed",
}
TOO_LONG = "the model's context"  # what workers say of a prompt that does not fit
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def is_openai(path: str) -> bool:
    """Whether a path belongs to OpenAI's API alone; /v1/models is KServe's too."""
    return path.startswith("/v1/") and path != BOTH and not path.startswith(f"{BOTH}/")


def openai_status(error: FlambeauError, status: int) -> int:
    """The status of an error here; `status` is the one it has elsewhere."""
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), status)


def openai_problem(status: int, message: str, error: FlambeauError | None = None, cause: str = "") -> bytes:
    """The body of an error answer; a cause is for callers who may know."""
    return msgspec.json.encode({"error": openai_error(status, message, error, cause)})


def openai_error(status: int, message: str, error: FlambeauError | None = None, cause: str = "") -> dict[str, Any]:
    """What an error answer, or the last event of a stream that failed, says."""
    code = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), None)
    if status == 400 and TOO_LONG in message:
        code = "context_length_exceeded"
    param = error.field if isinstance(error, InvalidField) else "model" if isinstance(error, ModelNotFound) else None
    kind = TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    document: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if isinstance(error, WorkerDied) and (lines := cause.splitlines()):  # a handler's traceback is for the log
        # Clients show their users no more than the message.
        document |= {"message": f"{message.rstrip('.')}: {lines[0]}", "cause": lines}
    return document
