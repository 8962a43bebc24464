"""Exchange: one HTTP request and its response."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol

from flambeau.errors import FlambeauError
from flambeau.frontend.timing_header import EXPLAIN_HEADER, explanation, timing_line
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.tenants import Tenant
from flambeau.serving.traces import RequestTrace
from flambeau.serving.traffic_split import VERSION_HEADER
from flambeau.wire.messages import header
from flambeau.wire.trace_context import TRACEPARENT, read_traceparent

Header = tuple[str, str]

JOINED_BYTES = 256 * 1024  # up to this size, copying a body behind its head is cheaper than a second write

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
COMMON = (
    b"Pragma: no-cache\r\n"
    b"Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
    b"X-Content-Type-Options: nosniff\r\n"  # a reply without a type must not become a page with scripts
)
_KEEP_ALIVE = b"connection: keep-alive\r\n"
_CLOSE = b"connection: close\r\n"
_TRAILER = f"trailer: {EXPLAIN_HEADER}\r\n".encode()
_FRAMING_HEADERS = frozenset({"content-length", "transfer-encoding", "connection"})
_random_bits = random.getrandbits
_UNSAFE = str.maketrans({"\r": " ", "\n": " ", "\0": " "})


def common_headers(cors: Sequence[Header]) -> bytes:
    """The header lines of every response of a listener."""
    return COMMON + b"".join(
        f"{name}: {value.translate(_UNSAFE)}\r\n".encode("latin-1", "replace") for name, value in cors
    )


class ExchangeConnection(Protocol):
    """The part of a connection that an exchange needs."""

    @property
    def common(self) -> bytes:
        """The header lines of every response."""

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping."""

    @property
    def counts_bytes(self) -> bool:
        """Whether the access log shows sizes."""

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...

    def on_answer(self, exchange: Exchange, status: int) -> None:
        """The response starts."""

    def on_finished(self, exchange: Exchange) -> None:
        """The response is complete."""


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_connection",
        "_has_body",
        "_is_chunked",
        "_task",
        "arrived",
        "body",
        "checks_key",
        "content_encoding",
        "explains",
        "headers",
        "host",
        "is_cross_site",
        "is_started",
        "job",
        "keeps_alive",
        "method",
        "model_name",
        "model_version",
        "on_gone",
        "origin",
        "path",
        "priority",
        "query",
        "received_bytes",
        "request_id",
        "sent_bytes",
        "status",
        "tenant",
        "timeout",
        "trace",
        "version",
    )

    def __init__(
        self,
        connection: ExchangeConnection,
        method: str,
        target: str,
        headers: list[Header],
        version: str,
        arrived: float,
    ) -> None:
        self._connection = connection
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.version = version
        self.arrived = arrived
        self.body: RequestBody | None = None
        self.content_encoding = ""  # how the body is compressed
        self.keeps_alive = True
        self.request_id = ""
        self.tenant: Tenant | None = None  # whose key the client has sent; None: the server has no keys
        self.priority: str | None = None  # the value of its header
        self.timeout: str | None = None  # likewise
        self.explains = False  # the client asks where the time of its request goes
        self.host: str | None = None  # the same, as `origin`
        self.origin: str | None = None
        self.is_cross_site = False  # a browser says that a page of another site caused the request
        self.is_started = False
        self.status = 0  # of the response, once it is started
        self.received_bytes = self.sent_bytes = 0  # of the bodies, if the access log shows them
        self.on_gone: Callable[[], object] | None = None
        self.checks_key = False  # the endpoint itself ends the stream when its key is revoked
        self.trace: RequestTrace | None = None
        self.model_name = ""  # that answers, for the access log
        self.model_version = ""  # that was chosen for the request, which names none; empty: the default
        self.job: Job | None = None  # that streams the response; it is paused while the client does not read
        self._has_body = True
        self._is_chunked = False
        self._task: asyncio.Task[None] | None = None

    def header(self, name: str) -> str | None:
        """The value of a request header; `name` is in lower case."""
        return header(self.headers, name)

    @property
    def key_name(self) -> str:
        """The name of the key that the client has sent; empty: the server has no keys."""
        return "" if self.tenant is None else self.tenant.name

    @property
    def trace_id(self) -> str:
        """The trace that is recorded, or the one that the client names; empty if there is none."""
        if self.trace is not None:
            return self.trace.trace_id
        found = read_traceparent(self.header(TRACEPARENT))
        return found.trace_id if found else ""

    @property
    def log_fields(self) -> dict[str, str]:
        """The `extra` of log records about this request."""
        return {"request_id": self.request_id, "model": self.model_name, "trace_id": self.trace_id}

    def take_body(self) -> RequestBody:
        """Take the body; the caller must release it."""
        body, self.body = self.body, None
        return body or RequestBody(b"")

    def drop(self) -> None:
        """Cancel the work: the client has disconnected."""
        if self.on_gone is not None:
            self.on_gone()
            self.on_gone = None
        self.job = None
        self._release()
        if self.trace is not None:
            self._end_trace(self.trace, "client_disconnected")

    def _release(self) -> None:
        if self.body is not None:
            self.body.release()
            self.body = None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Respond from a task, which is cancelled if the client disconnects."""
        task = self._task = asyncio.get_running_loop().create_task(work)
        self.on_gone = task.cancel

    def _end_trace(self, trace: RequestTrace, error: str) -> None:
        trace.end({"http.response.status_code": self.status} if self.status else {}, error)

    # ---- the response ----

    def note_error(self, error: FlambeauError) -> None:
        """The response, or the end of a stream, says this error."""

    def respond(self, status: int, body: bytes, headers: Iterable[Header] = (), phrase: str = "") -> None:
        """Send a whole response."""
        head = self._head(status, headers, phrase)
        if self.explains:
            head.append(self._explain())
        head.append(b"\r\n" if status == 204 else b"content-length: %d\r\n\r\n" % len(body))
        if not self._has_body:
            body = b""
        self.sent_bytes = len(body)
        write = self._connection.write
        if len(body) < JOINED_BYTES:
            head.append(body)
            write(b"".join(head))
        else:
            write(b"".join(head))
            write(body)
        self._finish()

    def start(self, status: int, headers: Iterable[Header] = (), phrase: str = "", *, has_trailer: bool = True) -> None:
        """Send the head of a streamed response; without a trailer, its content has a place for an explanation."""
        self._is_chunked = self.version != "1.0"
        if not self._is_chunked:
            self.keeps_alive = False  # closing the connection ends the body
        head = self._head(status, headers, phrase)
        if self.explains and self._is_chunked and has_trailer:
            head.append(_TRAILER)
        head.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")
        self._connection.write(b"".join(head))

    def send(self, chunks: Sequence[bytes], *, ends: bool = False) -> None:
        """Send chunks of a streamed response; `ends` marks the last."""
        if not self._has_body:
            chunks = ()
        elif self._connection.counts_bytes:
            self.sent_bytes += sum(map(len, chunks))
        if self._has_body and self._is_chunked:  # an empty chunk would end the body
            chunks = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk]
            if ends:
                chunks.append(b"0\r\n%b\r\n" % self._explain() if self.explains else b"0\r\n\r\n")
        self._connection.write(b"".join(chunks))
        if ends:
            self._finish()

    def abort(self) -> None:
        """Abort a streamed response, so that the client sees that it is incomplete."""
        self._connection.abort()

    def _head(self, status: int, headers: Iterable[Header], phrase: str) -> list[bytes]:
        self.is_started = True
        self.status = status
        self._connection.on_answer(self, status)
        self._has_body = self.method != "HEAD" and status not in (204, 304)
        if self._connection.is_draining:
            self.keeps_alive = False
        line = _STATUS_LINES.get(status)
        if phrase or line is None:
            line = f"HTTP/1.1 {status} {phrase.translate(_UNSAFE)}\r\n".encode("latin-1", "replace")
        head = [line, b"x-request-id: %b\r\n" % self.request_id.encode("latin-1", "replace"), self._connection.common]
        for name, value in headers:
            head.append(header_line(name, value))
        if self.trace is not None:
            head.append(f"traceparent: {self.trace.traceparent}\r\n".encode())
        if self.tenant is not None:
            head += rate_lines(self.tenant, time.monotonic())
        if self.model_version:
            head.append(header_line(VERSION_HEADER, self.model_version))
        job = self.job
        if job is not None and job.times is not None:
            head.append(timing_line(job.times))
        head.append(_KEEP_ALIVE if self.keeps_alive else _CLOSE)
        return head

    def take_explanation(self) -> bytes:
        """Where the time of the request went, as JSON, for a reply that has a place for it; empty if not asked for."""
        if not self.explains or self.job is None:
            return b""
        self.explains = False
        return explanation(self.job, self.status)

    def _explain(self) -> bytes:
        """The line of a header or trailer, for any other reply."""
        text = b"" if self.job is None else explanation(self.job, self.status)
        return b"%b: %b\r\n" % (EXPLAIN_HEADER.encode(), text) if text else b""

    def _finish(self) -> None:
        self.on_gone = self.job = None
        self._release()
        if self.trace is not None:
            self._end_trace(self.trace, str(self.status) if self.status >= 500 else "")
        self._connection.on_finished(self)


def rate_lines(tenant: Tenant, now: float) -> Iterator[bytes]:
    """The limits of a key, in the headers that OpenAI's clients know."""
    for rate in tenant.rates(now):
        values = (("limit", rate.limit), ("remaining", rate.remaining), ("reset", f"{rate.reset_s:.3f}s"))
        for kind, value in values:
            yield f"x-ratelimit-{kind}-{rate.name}: {value}\r\n".encode()


@lru_cache(256)
def header_line(name: str, value: str) -> bytes:
    """A header of a response; empty for those that frame its body. Cached: most responses have the same few."""
    if name.lower() in _FRAMING_HEADERS:
        return b""
    return f"{name.translate(_UNSAFE)}: {value.translate(_UNSAFE)}\r\n".encode("latin-1", "replace")


def target_of(raw: bytes) -> str:
    """The path and query of a request line, without the scheme and host of an absolute URL."""
    target = raw.decode("latin-1")
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target


def is_request_id(text: str) -> bool:
    """Whether a client's request id is safe in headers and logs."""
    return len(text) <= 128 and text.isascii() and text.isprintable()


def new_request_id() -> str:
    """A random UUID (version 4), unique but not secret."""
    digits = _random_bits(128).to_bytes(16).hex()  # faster than any format
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
