"""What connections of the clients share: addresses, requests, and the parser of responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httptools

from flambeau.errors import ApiError, CallTimedOut, NoConnection
from flambeau.http_client import explain_tls, host_and_port

READ_BYTES = 64 * 1024
MAX_IDLE = 64  # connections that a client keeps for its next calls
MAX_HEAD_BYTES = 1 << 20
MAX_RESPONSE_BYTES = 1 << 30  # of a whole answer, or of one part of a stream
SWITCHING = 101
UNIX = "unix:"
_UNSAFE = str.maketrans({"\r": " ", "\n": " ", "\0": " "})


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens: a host and a port, or a unix socket."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        if url.startswith(UNIX):
            return cls("localhost", 0, path=url.removeprefix(UNIX))
        host, port, is_tls = host_and_port(url)
        return cls(host, port or (443 if is_tls else 80), is_tls)

    @property
    def host_header(self) -> str:
        if self.path:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{UNIX}{self.path}" if self.path else f"{'https' if self.is_tls else 'http'}://{self.host_header}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """One HTTP request."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None = None

    def encode(self, address: ServerAddress) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", f"host: {address.host_header}"]
        lines += [f"{name.translate(_UNSAFE)}: {value.translate(_UNSAFE)}" for name, value in self.headers.items()]
        if self.body is not None:
            lines.append(f"content-length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (self.body or b"")


class ResponseParser:
    """Bytes of a connection → one response; `take` returns what has arrived of its body."""

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._http: Any = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._held_bytes = 0  # of the body, until they are taken
        self._head_bytes = 0
        self.max_bytes = max_bytes
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.has_head = False
        self.is_complete = False
        self.is_upgraded = False  # what follows is in another protocol
        self.keeps_alive = False

    def feed(self, data: bytes) -> None:
        """Parse received bytes; raises NoConnection if they are not HTTP. Empty: the server has closed."""
        if not data:
            if not self.has_head or self.headers.get("transfer-encoding") or "content-length" in self.headers:
                raise NoConnection("the server closed the connection before the end of its answer")
            self.is_complete = True  # the body ends with the connection
            return
        try:
            self._http.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._chunks.append(data[upgrade.args[0] :])
            self.is_upgraded = True
        except httptools.HttpParserError as error:
            raise NoConnection(f"the server's answer is not HTTP: {error}") from None
        if self._held_bytes > self.max_bytes:
            raise too_large(self.status, self.max_bytes)
        if not self.has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise NoConnection(f"the head of the server's answer has more than {MAX_HEAD_BYTES} bytes")

    def check_head(self) -> None:
        """Raise ApiError for an answer that cannot be read to its end: too large, or in another protocol."""
        if self.status == SWITCHING:
            raise ApiError("the server changed the protocol, which this call did not ask for", status=SWITCHING)
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            raise too_large(self.status, self.max_bytes)

    def take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        self._held_bytes = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    # ---- callbacks of httptools ----

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._http.get_status_code()
        if status < 200 and status != SWITCHING:  # the answer follows
            self.headers.clear()
            return
        self.status = status
        self.keeps_alive = self._http.should_keep_alive()
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._held_bytes += len(data)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = True


def too_large(status: int, max_bytes: int) -> ApiError:
    return ApiError(
        f"the server's answer, or one part of it, has more than {max_bytes} bytes; raise max_response_bytes",
        status=status,
    )


def time_left(deadline: float | None) -> float | None:
    """Seconds until a deadline of the monotonic clock; raises CallTimedOut after it."""
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise CallTimedOut("the server took longer to answer than the client waits; raise timeout_s")
    return left


def no_server(address: ServerAddress, error: OSError) -> NoConnection:
    if problem := explain_tls(str(address), error):
        return NoConnection(problem)
    reason = error.strerror or str(error)
    return NoConnection(f"no server answers at {address} ({reason}); start one with `flambeau serve`")
