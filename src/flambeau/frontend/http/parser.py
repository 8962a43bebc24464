"""RequestParser: the bytes of a connection → requests. It knows no sockets; httptools (llhttp) reads the syntax."""

from __future__ import annotations

from typing import Any, Protocol

import httptools

from flambeau.frontend.http.exchange import Header
from flambeau.frontend.timing_header import EXPLAIN_HEADER
from flambeau.serving.job import PRIORITY_HEADER, TIMEOUT_HEADER

MAX_HEAD_BYTES = 64 * 1024  # received in a row without a body: a head, a trailer, the extension of a chunk
MAX_OVERHEAD = 8  # bytes of chunk framing for each byte of a body; one-byte chunks have five
VERSIONS = frozenset({"1.0", "1.1"})
MAX_UPGRADES = 512  # requests for another protocol in one feed; a connection feeds far fewer at a time
TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS client
PRIORITY = PRIORITY_HEADER.encode()
PRIORITY_SIZE = len(PRIORITY)
TIMEOUT = TIMEOUT_HEADER.encode()
EXPLAIN = EXPLAIN_HEADER.encode()
EXPLAIN_SIZE = len(EXPLAIN)
assert len(TIMEOUT) == EXPLAIN_SIZE  # both are looked for among the headers of this length
IDEMPOTENCY_KEY = b"idempotency-key"
IDEMPOTENCY_KEY_SIZE = len(IDEMPOTENCY_KEY)


class MalformedRequest(Exception):
    """The bytes are not HTTP, or the head is too long."""


class RequestReceiver(Protocol):
    """Reacts to the requests of one connection. It reads them from the attributes of the parser."""

    def on_head(self) -> None:
        """The head is complete, and the body is large or the client waits for `100 Continue`."""

    def on_too_large(self) -> None:
        """A body of unannounced size has passed the limit."""

    def on_request(self) -> None:
        """The request is complete."""

    def on_upgrade(self, rest: bytes) -> bool:
        """The request is for another protocol, in which `rest` is; False: it is treated as an ordinary one."""


class RequestParser:
    """Parses one request after another; its attributes hold the current one."""

    __slots__ = (
        "_from_bytes",
        "_head_bytes",
        "_http",
        "_known_head",
        "_max_body_bytes",
        "_receiver",
        "_seen_bytes",
        "content",
        "content_encoding",
        "content_length",
        "explains",
        "fed_bytes",
        "filled_bytes",
        "headers",
        "host",
        "idempotency_key",
        "in_head",
        "is_cross_site",
        "is_discarding",
        "is_reading",
        "keeps_alive",
        "memory",
        "method",
        "origin",
        "priority",
        "request_id",
        "size_bytes",
        "target",
        "timeout",
        "upgrades",
        "version",
        "wants_continue",
    )

    def __init__(self, receiver: RequestReceiver, *, max_body_bytes: int, on_head_from_bytes: int) -> None:
        self._receiver = receiver
        self._max_body_bytes = max_body_bytes
        self._from_bytes = on_head_from_bytes
        self._http: Any = httptools.HttpRequestParser(self)
        self.content: bytes | bytearray = b""
        self._known_head = b""  # of the current request, if all of it was one read; the next one may repeat it
        self._seen_bytes = 0  # of the body, after the previous read
        self._head_bytes = 0  # received since then without any of the body
        self.memory: Any = None  # where a large body goes; set by the receiver in `on_head`
        self.is_discarding = False
        self.on_message_begin()
        self.is_reading = self.in_head = False

    # ---- the receiver's side ----

    def feed(self, data: memoryview) -> None:
        """Parse received bytes. Raises MalformedRequest, or HttpParserCallbackError if the receiver failed."""
        is_start = not self.is_reading
        try:
            try:
                self._http.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                is_start = False  # the receiver decides about each such request
                if not self._receiver.on_upgrade(bytes(data[upgrade.args[0] :])):
                    self._feed_without_upgrade(data, upgrade.args[0])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, MalformedRequest):
                raise error.__context__ from None
            raise
        except httptools.HttpParserError as error:
            if data[:1] == TLS_HANDSHAKE:
                raise MalformedRequest("This is TLS, and the port is not an https:// address") from None
            raise MalformedRequest(str(error)) from None
        if self.is_reading:
            self._limit_overhead(len(data))
        elif is_start:
            self._learn_head(data)

    def repeat(self, memory: bytearray, size: int) -> bool:
        """Take the first `size` bytes of `memory` as a request with the same head as the one before it.

        Programs send the same head again and again, and comparing it costs a tenth of parsing it. False: it is not.
        """
        head = self._known_head
        start = len(head)
        if not start or size != start + self.content_length or self.is_reading or not memory.startswith(head):
            return False
        self.content = bytes(memory[start:size])
        self._receiver.on_request()
        return True

    def _learn_head(self, data: memoryview) -> None:
        """Keep the head of a request if nothing but it and a body of announced size was received."""
        if self.is_discarding or self.wants_continue or self.content_length >= self._from_bytes:
            return
        received = bytes(data)
        end = received.find(b"\r\n\r\n") + 4
        if end + self.content_length == len(received):
            self._known_head = received[:end]

    @property
    def missing_bytes(self) -> int:
        """How many bytes of a body of announced size have not arrived."""
        return self.content_length - (self.size_bytes if self.memory is None else self.filled_bytes)

    def advance(self, num_bytes: int) -> None:
        """Count bytes of the body that were received straight into `memory`."""
        self.filled_bytes += num_bytes
        if self.filled_bytes == self.content_length:
            self._http = httptools.HttpRequestParser(self)  # the old one still expects this body
            self.on_message_complete()

    def discard(self) -> None:
        """Ignore everything from now on."""
        self.is_discarding = True
        self.is_reading = False

    def close(self) -> None:
        """Break the reference cycle with httptools, so that memory is freed without the garbage collector."""
        self._http = None

    # ---- callbacks of httptools ----

    def on_message_begin(self) -> None:
        self._known_head = b""
        self.is_reading = not self.is_discarding
        self.in_head = True
        self.target = b""
        self.method = ""
        self.version = "1.1"
        self.headers: list[Header] = []
        self.keeps_alive = True
        self.upgrades = False
        self.wants_continue = False
        self.content_encoding = ""
        self.content_length = 0
        self.request_id = ""
        self.priority: str | None = None
        self.timeout: str | None = None
        self.explains = False
        self.idempotency_key: str | None = None
        self.host: str | None = None
        self.origin: str | None = None
        self.is_cross_site = False
        self.content = b""
        self.size_bytes = 0  # of `content`
        self.filled_bytes = 0  # of `memory`
        self.fed_bytes = -1  # received after the read in which the request started; -1: within that read

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # the trailer of a chunked body
        text = value.decode("latin-1")
        self.headers.append((name.decode("latin-1"), text))
        size = len(name)
        if size == 14:
            if (lower := name.lower()) == b"content-length":
                self.content_length = int(value)
            elif lower == b"sec-fetch-site":
                self.is_cross_site = value == b"cross-site"
        elif size == 12:
            if name.lower() == b"x-request-id":
                self.request_id = text
        elif size == PRIORITY_SIZE and name.lower() == PRIORITY:
            self.priority = text
        elif size == 4:
            if name.lower() == b"host":
                if self.host is not None:  # this server and one before it could choose different ones
                    raise MalformedRequest("There are two Host headers")
                self.host = text
        elif size == 6:
            if (lower := name.lower()) == b"expect":
                self.wants_continue = value.lower() == b"100-continue"
            elif lower == b"origin":
                self.origin = text
        elif size == 16:
            if name.lower() == b"content-encoding":  # several lines name what was done in this order
                self.content_encoding = f"{self.content_encoding}, {text}" if self.content_encoding else text
        elif size == EXPLAIN_SIZE:
            if (lower := name.lower()) == EXPLAIN:
                self.explains = value.lower() == b"true"
            elif lower == TIMEOUT:
                self.timeout = text
        elif size == IDEMPOTENCY_KEY_SIZE and name.lower() == IDEMPOTENCY_KEY:
            self.idempotency_key = text.strip()

    def on_headers_complete(self) -> None:
        self.in_head = False
        if self.is_discarding:
            return
        http = self._http
        self.upgrades = http.should_upgrade()
        self.method = http.get_method().decode("latin-1")
        self.version = http.get_http_version()
        if self.version not in VERSIONS:
            raise MalformedRequest(f"HTTP version {self.version} is not supported; 1.0 and 1.1 are")
        self.keeps_alive = http.should_keep_alive()
        if (self.content_length >= self._from_bytes or self.wants_continue) and not self.upgrades:
            self._receiver.on_head()

    def on_body(self, data: bytes) -> None:
        if self.is_discarding:
            return
        if self.memory is not None:
            end = self.filled_bytes + len(data)
            self.memory[self.filled_bytes : end] = data
            self.filled_bytes = end
            return
        self.size_bytes += len(data)
        if self.size_bytes > self._max_body_bytes:
            self._receiver.on_too_large()
        elif not self.content:
            self.content = data
        else:
            if type(self.content) is bytes:
                self.content = bytearray(self.content)
            self.content += data

    def on_message_complete(self) -> None:
        if self.is_discarding or self.upgrades:
            return
        self.is_reading = False
        self._receiver.on_request()

    # ---- limits and upgrades ----

    def _limit_overhead(self, num_bytes: int) -> None:
        """Reject a request that grows without a body: llhttp would keep all of it."""
        if self.fed_bytes < 0:  # it started within these bytes, some of which may belong to the previous request
            self.fed_bytes, self._seen_bytes, self._head_bytes = 0, self.size_bytes, 0
            return
        self.fed_bytes += num_bytes
        self._head_bytes = self._head_bytes + num_bytes if self.size_bytes == self._seen_bytes else 0
        self._seen_bytes = self.size_bytes
        allowed = MAX_HEAD_BYTES + (1 + MAX_OVERHEAD) * self.size_bytes
        if self.memory is None and (self._head_bytes > MAX_HEAD_BYTES or self.fed_bytes > allowed):
            where = "head" if self.in_head else "framing"
            raise MalformedRequest(f"the {where} of the request is too long")

    def _feed_without_upgrade(self, data: memoryview, end_of_head: int) -> None:
        """Parse a request for another protocol as an ordinary one; every client can do without the other."""
        for _ in range(MAX_UPGRADES):
            head = self._head_without_upgrade()
            self._http = httptools.HttpRequestParser(self)
            data = memoryview(head + data[end_of_head:])
            try:
                self._http.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                end_of_head = upgrade.args[0]
        raise MalformedRequest("too many requests for another protocol")

    def _head_without_upgrade(self) -> bytes:
        method = "INVALID" if self.method == "CONNECT" else self.method  # this server is no proxy
        lines = [f"{method} ".encode() + self.target + b" HTTP/1.1"]
        for name, value in self.headers:
            if name.lower() not in ("upgrade", "connection", "http2-settings"):
                lines.append(f"{name}: {value}".encode("latin-1"))
        return b"\r\n".join([*lines, b"", b""])
