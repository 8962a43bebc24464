"""Requests of the commands to a running server, with its errors as exceptions."""

from __future__ import annotations

import http.client
import json
import mimetypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from flambeau.cli.options import management_beside
from flambeau.errors import BadRequest, FlambeauError, Unavailable
from flambeau.frontend.authorization import is_loopback
from flambeau.frontend.key_file import read_keys
from flambeau.http_client import CERTIFICATE_VARIABLE, connect, explain_tls

COMPLETION_S = 1.0  # a shell waits for it
MAX_SHOWN = 100  # characters of an argument in an error


class RequestFailed(BadRequest):
    """The server answered with an error."""

    def __init__(self, status: int, message: str, cause: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.cause = cause


def send(
    url: str,
    method: str,
    path: str,
    body: bytes | BinaryIO | None = None,
    headers: dict[str, str] | None = None,
    *,
    api: str = "inference",
) -> http.client.HTTPResponse:
    """Send a request and return the response before its body is read; an error response raises RequestFailed.

    Headers without a key get that of the `api`, if one is found here.
    """
    connection = connect(url)
    key = find_key(api, url, os.environ)
    found = {"authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request(method, path, body, {**found, **(headers or {})})
        response = connection.getresponse()
    except http.client.BadStatusLine as error:  # RemoteDisconnected is one of these and an OSError
        hint = f"; if it uses TLS, write https://{urlsplit(url).netloc}"
        if not url.startswith("http://"):
            hint = f"; if it asks clients for a certificate, name its PEM file, with its key, in {CERTIFICATE_VARIABLE}"
        raise Unavailable(f"{url} does not answer with HTTP ({error or 'nothing'}){hint}") from None
    except OSError as error:
        if problem := explain_tls(url, error):
            raise Unavailable(problem) from None
        raise Unavailable(
            f"no server answers at {url} ({error.strerror or error}); start one with `flambeau serve`{guess_hint(url)}"
        ) from None
    if response.status >= 400:
        raise to_error(response.status, response.read())
    return response


def guess_hint(url: str) -> str:
    """The remedy if the address of the management API was guessed from that of the inference API."""
    inference = os.environ.get("FLAMBEAU_URL")
    if not inference or url == inference or url != management_beside(inference):
        return ""
    return f", or set FLAMBEAU_MANAGEMENT_URL: this is the port after that of {inference}"


def to_error(status: int, body: bytes) -> RequestFailed:
    try:
        document = json.loads(body)
        document = document.get("error") or document  # the OpenAI API nests it
        return RequestFailed(status, document["message"], "\n".join(document.get("cause", [])))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body.decode("utf-8", "replace").strip() or "the server gave no reason"
        if text.startswith("<"):
            text = "the answer is a page for browsers; is there a Flambeau server at this address?"
        return RequestFailed(status, text, "")


def call(server: str, method: str, path: str, /, **query: Any) -> Any:
    """Call the management API and return its JSON; arguments that are None are left out."""
    given = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in query.items()
        if value is not None
    }
    headers = authorization("FLAMBEAU_MANAGEMENT_KEY")
    target = f"{path}?{urlencode(given)}" if given else path
    return json.loads(send(server, method, target, None, headers, api="management").read())


def find_key(api: str, url: str, environment: Mapping[str, str]) -> str:
    """The key for an API: FLAMBEAU_KEY, that of the file in FLAMBEAU_KEY_FILE, or that of the file in this folder.

    The last is sent only to this machine: it was not named.
    """
    if key := environment.get("FLAMBEAU_KEY"):
        return key
    named = environment.get("FLAMBEAU_KEY_FILE")
    if not named and not is_loopback(urlsplit(url).hostname or ""):
        return ""
    found = read_keys(Path(named or "key_file.json")).get(api)
    return found.secret if found is not None else ""


def model_names(server: str) -> list[str]:
    """The names of the models, for the shell's completion; none if the server does not answer at once."""
    try:
        connection = connect(server, timeout_s=COMPLETION_S)
        connection.request("GET", "/models?limit=100", headers=authorization("FLAMBEAU_MANAGEMENT_KEY"))
        return [model["modelName"] for model in json.loads(connection.getresponse().read())["models"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, FlambeauError):
        return []


def authorization(variable: str) -> dict[str, str]:
    """The Authorization header with the key in an environment variable, if it is set."""
    key = os.environ.get(variable)
    return {"authorization": f"Bearer {key}"} if key else {}


def predict(url: str, model: str, version: str | None, source: str, content_type: str | None) -> None:
    """Send a file or standard input to a model; copy the response to stdout as it arrives."""
    path = "/predictions/" + "/".join(quote(part, safe="") for part in (model, version) if part)
    if source == "-":
        body = sys.stdin.buffer.read()
    else:
        try:
            body = Path(source).read_bytes()
        except OSError as error:
            hint = f"; give a file, or pipe the text: echo '…' | flambeau predict {model} -"
            reason = f"{source[:MAX_SHOWN]} cannot be read: {error.strerror}"
            raise BadRequest(reason + (hint if looks_like_data(source) else "")) from None
    kind = content_type or guess_type(source, body)
    response = send(url, "POST", path, body, {"content-type": kind, **authorization("FLAMBEAU_INFERENCE_KEY")})
    while chunk := response.read1(65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    if sys.stdout.isatty():
        print()


def looks_like_data(source: str) -> bool:
    """Whether a file name is a document itself."""
    return source.lstrip()[:1] in ("{", "[", '"') or " " in source


def guess_type(source: str, body: bytes) -> str:
    """The content type by the file's name, else by whether the body is JSON."""
    if guessed := mimetypes.guess_type(source)[0]:
        return guessed
    try:
        json.loads(body)
    except ValueError:
        return "application/octet-stream"
    return "application/json"
