"""A small HTTP client on the standard library, for the commands and for tests."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flambeau.errors import ConfigError

CA_VARIABLE = "FLAMBEAU_CA_FILE"
CERTIFICATE_VARIABLE = "FLAMBEAU_CLIENT_CERTIFICATE"


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
    if is_tls:
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls_context())
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


def tls_context() -> ssl.SSLContext:
    """Trusts the authorities of the system, and the certificates in the file that FLAMBEAU_CA_FILE names. Shows the
    certificate in the file that FLAMBEAU_CLIENT_CERTIFICATE names, which has its key too.
    """
    context = ssl.create_default_context()
    if file := os.environ.get(CERTIFICATE_VARIABLE):
        try:
            context.load_cert_chain(file, password=lambda: "")  # otherwise ssl asks at the terminal
        except OSError as error:
            reason = "it holds no certificate with its key" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"{CERTIFICATE_VARIABLE}={file} cannot be used: {reason}; name a PEM file") from None
    if file := os.environ.get(CA_VARIABLE):
        try:
            context.load_verify_locations(file)
        except OSError as error:  # ssl's own errors are of this kind
            reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"{CA_VARIABLE}={file} cannot be used: {reason}; name a PEM file") from None
    return context


def explain_tls(address: str, error: BaseException) -> str:
    """What a failed handshake means, and the remedy; empty if the error is another one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = (error.verify_message or "it cannot be verified").rstrip(".")
        remedy = f"name its PEM file, or that of its authority, in {CA_VARIABLE}"
        if "mismatch" in problem or "not valid for" in problem:
            remedy = "use a name that the certificate has"
        return f"the certificate of {address} is not trusted: {problem}; {remedy}"
    if isinstance(error, ssl.SSLError):
        return f"{address} does not answer with TLS ({error.reason or error}); for a server without it, write http://"
    return ""


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
