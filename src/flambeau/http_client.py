"""A small HTTP client on the standard library, for the commands and for tests."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flambeau.errors import ConfigError


@dataclass(frozen=True)
class HttpReply:
    """A response with its whole body."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The message of an error response."""
        return str(self.json["message"])

    @property
    def cause(self) -> str:
        """The cause in an error response: the handler's traceback, or how its worker exited."""
        return "\n".join(self.json.get("cause", []))


def host_and_port(url: str) -> tuple[str, int | None, bool]:
    """The host and the port in the address of a server, and whether it speaks TLS."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # an unclosed bracket, or an invalid port
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is not a server's address; write http://host:port")
    return host, port, parts.scheme == "https"


def connect(url: str, timeout_s: float | None = None) -> http.client.HTTPConnection:
    """A connection to the server at `url`, which is opened by the first request."""
    host, port, is_tls = host_and_port(url)
    kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    return kind(host, port, timeout=timeout_s)


def fetch(
    url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> HttpReply:
    """Send a request and read the whole response, whatever its status."""
    connection = connect(url, timeout_s)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return HttpReply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()
