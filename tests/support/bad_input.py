"""Attacks with bad input on a running server, for tests and for longer runs with other numbers."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote, quote_from_bytes

from support.running import Reply, RunningServer

JSON = {"Content-Type": "application/json"}
# Values for any parameter: what users mistype, the limits of types, and what breaks parsers.
VALUES: tuple[Any, ...] = (
    *("abc", "1e3", "1.5", "-1", "0", "2000000000", "99999999999999999999", "9" * 5000, "", " ", "+1", "0x10", "1_0"),
    *("true", "TRUE", "yes", "null", "NaN", "Infinity", "a\0b", "a\r\nb: c", "\u2028", "é", "../../etc/passwd", "%"),
    *("n" * 5000, "{}", "[]", "{", "'", '"', "http://[", "file:///etc/passwd", "http://127.0.0.1:1/x.mar", "${jndi:x}"),
)
BODIES = (
    *(b"", b"{}", b"{", b"[1,", b'{"a":}', b"null", b'"x"', b"\xff", b"\0", b"[" * 50_000, b'{"a":' * 5000),
    *(b'{"url": 1e400}', b'{"url": "\\ud800"}', b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"9" * 5000, b"NaN"),
)
TYPES = (
    *("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "\x80", "a/b;c"),
    *("multipart/form-data; boundary=b", "multipart/form-data; boundary=" + "b" * 300, "application/json; charset=x"),
)


def parameter_calls(document: dict[str, Any], values: Sequence[Any] = VALUES) -> Iterator[tuple[str, str, Any]]:
    """(method, path, JSON body or None) for every value of every parameter of an OpenAPI document."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            fixed = path.replace("{model_name}", "echo").replace("{model_version}", "1.0")
            for parameter in operation["parameters"]:
                for value in values:
                    text = quote(value, safe="") if isinstance(value, str) else str(value)
                    if parameter["in"] == "path":
                        named = path.replace(f"{{{parameter['name']}}}", text or "%20")
                        named = named.replace("{model_name}", "echo").replace("{model_version}", "1.0")
                        yield method.upper(), named, None
                    else:
                        others = "" if parameter["name"] == "url" or fixed != "/models" else "&url=nothing.mar"
                        yield method.upper(), f"{fixed}?{parameter['name']}={text}{others}", None
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if fixed == "/models":
                for name in schema.get("properties", {}):
                    for value in (*values, None, True, 1.5, 10**30, [], ["a"], {"a": 1}, [[[[]]]]):
                        yield method.upper(), fixed, {"url": "nothing.mar", name: value}


def call(server: RunningServer, method: str, path: str, document: Any, port: int) -> Reply:
    body = None if document is None else json.dumps(document).encode()
    return server.request(method, path, body, {} if document is None else JSON, port=port, timeout=30)


def body_calls(paths: Sequence[str]) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """(path, body, headers) for every body and content type."""
    for path in paths:
        for body in BODIES:
            for kind in TYPES:
                yield path, body, {"Content-Type": kind}


RACING = (
    ("POST", "/models?url=echo.mar&initial_workers=1"),
    ("POST", "/models?url=echo.mar&initial_workers=1&synchronous=false"),
    ("POST", "/models?url=echo2.mar&initial_workers=1"),
    ("POST", "/models?url=echo2.mar"),
    ("DELETE", "/models/echo"),
    ("DELETE", "/models/echo/1.0"),
    ("DELETE", "/models/echo/2.0"),
    ("PUT", "/models/echo?min_worker=2&synchronous=true"),
    ("PUT", "/models/echo?min_worker=0&synchronous=true"),
    ("PUT", "/models/echo/2.0?min_worker=1"),
    ("PUT", "/models/echo/2.0/set-default"),
    ("PUT", "/models/echo/1.0/set-default"),
    ("GET", "/models/echo/all"),
    ("GET", "/models"),
)


def race(server: RunningServer, *, threads: int, seconds: float) -> list[tuple[str, str, Reply | Exception]]:
    """Register, scale, set the default of and unregister one name from several clients at once."""
    answers: list[tuple[str, str, Reply | Exception]] = []
    deadline = time.monotonic() + seconds

    def run(seed: int) -> None:
        choices = random.Random(seed)
        while time.monotonic() < deadline:
            method, path = choices.choice(RACING)
            try:
                answers.append((method, path, server.manage(method, path)))
            except Exception as error:  # the test reports it
                answers.append((method, path, error))

    clients = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return answers


def as_query(raw: bytes) -> str:
    return quote_from_bytes(raw, safe="")
