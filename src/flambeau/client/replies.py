"""What a reply says: its value, its error, and whether the request may be sent again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from flambeau.errors import ApiError
from flambeau.http_client import HttpReply

Result = TypeVar("Result")

JSON = "application/json"
RETRIED = (429, 503)
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # what an unexpected document raises
MAX_SHOWN = 200  # characters of an unexpected answer in an error message
MAX_ERROR_BYTES = 64 * 1024  # of an error that is not JSON


def read_as(read: Callable[[HttpReply], Result], reply: HttpReply) -> Result:
    try:
        return read(reply)
    except UNREADABLE:
        raise unreadable(reply) from None


def unreadable(reply: HttpReply) -> ApiError:
    begins = reply.body[:MAX_SHOWN].decode("utf-8", "replace")
    return ApiError(
        f"the server's answer is not what this call expects; is it a flambeau server? It begins with {begins!r}",
        status=reply.status,
        request_id=reply.headers.get("x-request-id", ""),
    )


def as_json(reply: HttpReply) -> Any:
    return json.loads(reply.body)


def as_whole(reply: HttpReply) -> HttpReply:
    return reply


def value_of(reply: HttpReply) -> Any:
    """A reply by its content type: JSON as values; else text if it is UTF-8, or bytes."""
    content_type = reply.headers.get("content-type", "")
    if content_type.startswith(JSON):
        return json.loads(reply.body)
    if not content_type or content_type.startswith("text/"):
        try:
            return reply.body.decode()
        except UnicodeDecodeError:
            pass
    return reply.body


def check(reply: HttpReply) -> HttpReply:
    """Return the reply unless it is an error, which is raised."""
    if reply.status >= 300:
        raise error_of(reply)
    return reply


def error_of(reply: HttpReply) -> ApiError:
    if reply.status < 400:
        place = reply.headers.get("location", "")[:MAX_SHOWN]
        where = f"redirects to {place!r}, which the client does not follow" if place else "did not answer the call"
        return ApiError(f"the server {where}; check the url of the client", status=reply.status)
    try:
        document = json.loads(reply.body)
        document = document.get("error", document) if isinstance(document.get("error"), dict) else document
        message, kind, lines = document["message"], document.get("type", ""), document.get("cause") or []
    except UNREADABLE:
        text = reply.body[:MAX_ERROR_BYTES].decode("utf-8", "replace").strip()
        message, kind, lines = text or "the server gave no reason", "", []
    return ApiError(
        str(message),
        status=reply.status,
        kind=str(kind),
        cause="\n".join(map(str, lines)),
        request_id=reply.headers.get("x-request-id", ""),
        retry_after_s=seconds_in(reply.headers.get("retry-after")),
    )


def seconds_in(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None


def retry_delay_s(reply: HttpReply, attempt: int, retries: int) -> float | None:
    """How long to wait before the request is sent again; None: it is not.

    Only a server that was too busy to begin says when to try again; any other error may have had effects.
    """
    if attempt >= retries or reply.status not in RETRIED:
        return None
    return seconds_in(reply.headers.get("retry-after"))
