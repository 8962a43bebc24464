"""What the clients ask for, without input and output: each call is a request and how its reply is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic
from urllib.parse import quote, urlencode

from flambeau.client.client_settings import LOOPBACK, Api
from flambeau.client.event_streams import EVENTS
from flambeau.client.replies import (
    JSON,
    MAX_SHOWN,
    Result,
    as_json,
    as_whole,
    check,
    read_as,
    value_of,
)
from flambeau.client.transport import UNIX, ServerAddress, WireRequest
from flambeau.errors import CallTimedOut, ClientError, ConfigError
from flambeau.http_client import HttpReply

Message = Mapping[str, Any]

MAX_PAGES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Result]):
    """One request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[HttpReply], Result]
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    api: Api = "inference"

    def request(self, keys: Mapping[Api, str]) -> WireRequest:
        headers = {"accept": "*/*", "user-agent": "flambeau-python", **self.headers}
        if self.api in keys and "authorization" not in headers:
            headers["authorization"] = f"Bearer {keys[self.api]}"
        return WireRequest(method=self.method, target=self.path, headers=headers, body=self.body)

    def result(self, reply: HttpReply) -> Result:
        """What the answer says; raises ApiError if it is an error or is not what the call expects."""
        return read_as(self.read, check(reply))


def encode(data: Any, content_type: str | None) -> tuple[bytes, str]:
    """A request's body: bytes and text unchanged, other values as JSON."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data), content_type or "application/octet-stream"
    if isinstance(data, str):
        return data.encode(), content_type or "text/plain; charset=utf-8"
    if content_type is not None and not content_type.startswith(JSON):
        raise ConfigError(f"data of type {type(data).__name__} is sent as JSON, not as {content_type}; give bytes")
    try:
        return json.dumps(data).encode(), content_type or JSON
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data cannot be sent as JSON ({error}); give bytes, text or values of JSON") from None


def prediction(
    model: str,
    data: Any,
    version: str | None,
    content_type: str | None,
    headers: Mapping[str, str] | None,
) -> Call[Any]:
    body, kind = encode(data, content_type)
    named = {"content-type": kind, **{name.lower(): value for name, value in (headers or {}).items()}}
    return Call(method="POST", path=path_of("predictions", model, version), read=value_of, body=body, headers=named)


def path_of(*parts: str | None) -> str:
    return "/" + "/".join(quote(part, safe="") for part in parts if part)


def management(method: str, path: str, read: Callable[[Any], Result], /, **query: Any) -> Call[Result]:
    """A call of the management API; arguments that are None are left out."""
    given = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in query.items()
        if value is not None
    }
    target = f"{path}?{urlencode(given)}" if given else path
    return Call(method=method, path=target, read=lambda reply: read(as_json(reply)), api="management")


def status_of(document: Any) -> str:
    return str(document["status"])


def page_of(document: Any) -> tuple[list[dict[str, Any]], str | None]:
    """The models on one page, and the token of the next page."""
    token = document.get("nextPageToken")
    return [*document["models"]], None if token is None else str(token)


def note_page(tokens: set[str], page: list[dict[str, Any]], token: str) -> None:
    """Raise ClientError if the pages have no end: a token comes again, or leads on from a page without models."""
    if token in tokens or not page or len(tokens) >= MAX_PAGES:
        raise ClientError(
            f"the list of models has no end: the page {token[:MAX_SHOWN]!r} is named after {len(tokens) + 1} pages"
            f"{' for the second time' if token in tokens else ''}; is it a Flambeau server?"
        )
    tokens.add(token)


def first_of(document: Any) -> dict[str, Any]:
    found: dict[str, Any] = document[0]
    return found


def registration(
    source: str,
    name: str | None,
    handler: str | None,
    workers: int,
    batch_size: int | None,
    max_batch_delay_ms: int | None,
    wait: bool,
) -> Call[str]:
    return management(
        "POST",
        "/models",
        status_of,
        url=source,
        model_name=name,
        handler=handler,
        initial_workers=workers,
        batch_size=batch_size,
        max_batch_delay=max_batch_delay_ms,
        synchronous=wait,
    )


def scaling(name: str, version: str | None, workers: int, wait: bool) -> Call[str]:
    path = path_of("models", name, version)
    return management("PUT", path, status_of, min_worker=workers, max_worker=workers, synchronous=wait)


def root() -> Call[HttpReply]:
    return Call(method="GET", path="/", read=as_whole, headers={"accept": JSON})


def management_url_of(reply: HttpReply, url: str) -> str:
    """The management API that the description of a server names; the same address if it names none.

    The management key is sent there, so it must be on the same host; else this raises ConfigError.
    """
    try:
        link = str(json.loads(reply.body)["links"]["management"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return url
    if link.startswith("/"):
        return url
    if not is_same_host(ServerAddress.parse(url), link):
        raise ConfigError(
            f"the server at {url} says that its management API is at {link[:MAX_SHOWN]!r}, which is not on the same "
            "host; if you trust it with the management key, pass it as management_url"
        )
    return link


def is_same_host(own: ServerAddress, link: str) -> bool:
    """Whether a link leads to the host of a client's own server, and with TLS if that has it."""
    if link.startswith(UNIX):
        return False
    try:
        other = ServerAddress.parse(link)
    except ConfigError:
        return False
    if own.host in LOOPBACK and other.host in LOOPBACK:
        return True
    return own.host == other.host and other.is_tls >= own.is_tls


# ---- health ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a server can answer, and the models that cannot, with their reasons."""

    is_ready: bool
    status: str
    models: Sequence[Mapping[str, Any]] = ()


def health() -> Call[Health]:
    return Call(method="GET", path="/readyz", read=health_of)


def health_of(reply: HttpReply) -> Health:
    document = as_json(reply)
    return Health(is_ready=reply.status == 200, status=document["status"], models=document.get("models", ()))


def not_ready(health: Health | None, error: str, waited_s: float) -> CallTimedOut:
    """The error of a server that did not become ready in time."""
    models = ", ".join(str(model.get("modelName")) for model in health.models) if health else ""
    reason = f"{health.status}{f': {models}' if models else ''}" if health else error
    return CallTimedOut(f"the server was not ready after {waited_s:g} s ({reason})")


# ---- language models ----


def chat(messages: str | Sequence[Message], model: str | None, options: Mapping[str, Any]) -> Call[str]:
    spoken = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    return generation("/v1/chat/completions", {"messages": spoken}, model, options, chat_text)


def completion(prompt: str, model: str | None, options: Mapping[str, Any]) -> Call[str]:
    return generation("/v1/completions", {"prompt": prompt}, model, options, completion_text)


def generation(
    path: str, document: dict[str, Any], model: str | None, options: Mapping[str, Any], text: Callable[[Any], str]
) -> Call[str]:
    whole = {**document, **({"model": model} if model else {}), **options}
    return Call(
        method="POST",
        path=path,
        read=lambda reply: text(as_json(reply)),
        body=encode(whole, None)[0],
        headers={"content-type": JSON, **({"accept": EVENTS} if whole.get("stream") else {})},
    )


def chat_text(document: Any) -> str:
    choice = document["choices"][0] if document["choices"] else {}
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def completion_text(document: Any) -> str:
    return (document["choices"][0] if document["choices"] else {}).get("text") or ""
