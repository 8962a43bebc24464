"""What the clients ask for and how answers are read, without input and output: requests, errors, retries, events."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, urlencode

from flambeau.client.transport import MAX_RESPONSE_BYTES, UNIX, ServerAddress, WireRequest, too_large
from flambeau.errors import ApiError, CallTimedOut, ClientError, ConfigError
from flambeau.http_client import HttpReply
from flambeau.small_files import read_small

Result = TypeVar("Result")
Api = Literal["inference", "management"]
Message = Mapping[str, Any]

DEFAULT_URL, DEFAULT_MANAGEMENT_URL = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
KEY_FILE = "key_file.json"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVENTS = "text/event-stream"
JSON = "application/json"
RETRIED = (429, 503)
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # what an unexpected document raises
MAX_SHOWN = 200  # characters of an unexpected answer in an error message
MAX_PAGES = 10_000
MAX_ERROR_BYTES = 64 * 1024  # of an error that is not JSON


# ---- settings ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Where a client sends its calls, and with which keys."""

    url: str
    management_url: str | None  # None: as the server's description at / says
    keys: Mapping[Api, str]
    timeout_s: float | None
    retries: int
    max_response_bytes: int

    @classmethod
    def read(
        cls,
        url: str | None,
        management_url: str | None,
        key: str | None,
        management_key: str | None,
        key_file: str | os.PathLike[str] | None,
        timeout_s: float | None,
        retries: int,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        environment: Mapping[str, str] = os.environ,
    ) -> ClientSettings:
        """The arguments, else the environment, else the defaults of `flambeau serve`."""
        given = url or environment.get("FLAMBEAU_URL")
        managed = management_url or environment.get("FLAMBEAU_MANAGEMENT_URL")
        if given is None and managed is None:
            managed = DEFAULT_MANAGEMENT_URL
        address = ServerAddress.parse(given or DEFAULT_URL)
        file = key_file or environment.get("FLAMBEAU_KEY_FILE")
        # A key found by chance is sent only to this machine.
        nearby = Path(KEY_FILE) if address.path or address.host in LOOPBACK else None
        stored = read_key_file(Path(file), must_exist=True) if file else read_key_file(nearby) if nearby else {}
        both = key or environment.get("FLAMBEAU_KEY")
        chosen: dict[Api, str | None] = {
            "inference": both or environment.get("FLAMBEAU_INFERENCE_KEY") or stored.get("inference"),
            "management": management_key
            or both
            or environment.get("FLAMBEAU_MANAGEMENT_KEY")
            or stored.get("management"),
        }
        keys = {api: value for api, value in chosen.items() if value}
        for value in keys.values():
            check_key(value)
        if retries < 0:
            raise ConfigError(f"retries is {retries}; it must be 0 or more")
        if max_response_bytes < 1:
            raise ConfigError(f"max_response_bytes is {max_response_bytes}; it must be 1 or more")
        return cls(
            url=given or DEFAULT_URL,
            management_url=managed,
            keys=keys,
            timeout_s=timeout_s,
            retries=retries,
            max_response_bytes=max_response_bytes,
        )


def read_key_file(file: Path, *, must_exist: bool = False) -> dict[str, str]:
    """The keys that a server has written, by API."""
    try:
        document = json.loads(read_small(file))
        return {kind: entry["key"] for kind, entry in document.items() if isinstance(entry.get("key"), str)}
    except OSError as error:
        if must_exist:
            raise ConfigError(f"the key file {file} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError):
        if must_exist:
            raise ConfigError(f"{file} is not a key file; give the key_file.json of the server") from None
    return {}


def check_key(key: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("the key has characters that a header cannot carry; copy it from the key file")


# ---- calls ----


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


# ---- errors and retries ----


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
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
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


# ---- streams ----


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    kind: str
    data: str


class EventReader:
    """Bytes of an event stream → events (the format of WHATWG HTML, section 9.2)."""

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest: list[bytes] = []  # of a line that has not ended
        self._rest_bytes = 0
        self._kind = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        if self._rest_bytes + self._data_bytes > self._max_bytes:
            raise too_large(200, self._max_bytes)
        if b"\n" not in data:
            self._rest.append(data)
            self._rest_bytes += len(data)
            return
        *lines, rest = (b"".join([*self._rest, data]) if self._rest else data).split(b"\n")
        self._rest, self._rest_bytes = [rest] if rest else [], len(rest)
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            if not line:
                if self._data:
                    yield Event(self._kind or "message", "\n".join(self._data))
                self._kind, self._data, self._data_bytes = "", [], 0
                continue
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
                self._data_bytes += len(raw)
            elif name == "event":
                self._kind = value


class StreamReader:
    """The body of a streamed reply → its parts. Without events, whatever arrives together is one."""

    def __init__(self, head: HttpReply, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._head = head
        self._has_events = head.headers.get("content-type", "").startswith(EVENTS)
        self._events = EventReader(max_bytes)

    def parts(self, data: bytes) -> Iterator[str | bytes]:
        if not self._has_events:
            yield as_text(data)
            return
        for event in self._events.feed(data):
            if event.kind == "error":
                raise error_of(HttpReply(status_in(event.data), self._head.headers, event.data.encode()))
            if event.kind == "base64":
                yield read_as(bytes_of, self._reply(event.data))
            elif event.kind != "end":
                yield event.data

    def texts(self, data: bytes, text: Callable[[Any], str]) -> Iterator[str]:
        """The texts in the events of a generation."""
        for part in self.parts(data):
            if part == "[DONE]" or isinstance(part, bytes):
                continue
            try:
                document = json.loads(part)
                is_error = "error" in document
                found = "" if is_error else text(document)
            except UNREADABLE:
                raise unreadable(self._reply(part)) from None
            if is_error:
                raise error_of(HttpReply(status_in(part), self._head.headers, part.encode()))
            if found:
                yield found

    def _reply(self, part: str) -> HttpReply:
        return HttpReply(self._head.status, self._head.headers, part.encode())


def bytes_of(reply: HttpReply) -> bytes:
    return base64.b64decode(reply.body)


def as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def status_in(text: str) -> int:
    """The status in the document of an error event."""
    try:
        code = json.loads(text)["error"]["code"]
        return code if isinstance(code, int) else 500
    except (ValueError, LookupError, TypeError, RecursionError):
        return 500
