"""A small HTTP client for the command line, on the standard library."""

from __future__ import annotations

import http.client
import json
import mimetypes
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from flambeau.errors import BadRequest, ConfigError, Unavailable


class RequestFailed(BadRequest):
    """The server answered with an error."""

    def __init__(self, status: int, message: str, cause: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.cause = cause


def connect(url: str) -> http.client.HTTPConnection:
    """A connection to the server at `url`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # brackets without an end, a port that is none
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is not a server's address; write http://host:port")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port)


def send(
    url: str, method: str, path: str, body: bytes | BinaryIO | None = None, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """Send a request; an error answer is raised with its cause."""
    connection = connect(url)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
    except OSError as error:
        raise Unavailable(
            f"no server answers at {url} ({error.strerror or error}); start one with `flambeau serve`"
        ) from None
    if response.status >= 400:
        raise failure(response.status, response.read())
    return response


def failure(status: int, body: bytes) -> RequestFailed:
    """The error an answer carries."""
    try:
        document = json.loads(body)
        document = document.get("error") or document  # as OpenAI's API has it, or as the others do
        return RequestFailed(status, document["message"], "\n".join(document.get("cause", [])))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RequestFailed(status, body.decode("utf-8", "replace").strip() or "the server gave no reason", "")


def call(server: str, method: str, path: str, /, **query: Any) -> Any:
    """Call the management API and return its JSON."""
    given = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in query.items()
        if value is not None
    }
    headers = key_in("FLAMBEAU_MANAGEMENT_KEY")
    return json.loads(send(server, method, f"{path}?{urlencode(given)}" if given else path, None, headers).read())


def key_in(variable: str) -> dict[str, str]:
    """The header that shows the key in an environment variable, if there is one."""
    key = os.environ.get(variable)
    return {"authorization": f"Bearer {key}"} if key else {}


def predict(url: str, model: str, version: str | None, source: str, content_type: str | None) -> None:
    """Send a file or standard input to a model; copy the answer to stdout as it arrives."""
    path = "/predictions/" + "/".join(quote(part, safe="") for part in (model, version) if part)
    if source == "-":
        body = sys.stdin.buffer.read()
    else:
        try:
            body = Path(source).read_bytes()
        except OSError as error:
            raise BadRequest(f"{source} cannot be read: {error.strerror}") from None
    kind = content_type or guess_type(source, body)
    response = send(url, "POST", path, body, {"content-type": kind, **key_in("FLAMBEAU_INFERENCE_KEY")})
    while chunk := response.read1(65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    if sys.stdout.isatty():
        print()


def guess_type(source: str, body: bytes) -> str:
    """The content type of a file: by its name, else by whether it is JSON."""
    if guessed := mimetypes.guess_type(source)[0]:
        return guessed
    try:
        json.loads(body)
    except ValueError:
        return "application/octet-stream"
    return "application/json"
