"""Clients that ask and do not read. Each attack opens its connections in an ExitStack and returns."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

QUIET_S = 0.5  # memory that has not grown for this long is taken as what is held


def dial(port: int, *, window_bytes: int = 4096) -> socket.socket:
    """A client whose kernel takes little in, so that the server must keep the rest."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    client.settimeout(60)
    client.connect(("127.0.0.1", port))
    return client


def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def open_streams(
    stack: ExitStack, port: int, count: int, order: dict[str, object], *, window_bytes: int = 4096
) -> list[socket.socket]:
    """Streams of the handler `flood` that nobody reads."""
    clients = [stack.enter_context(dial(port, window_bytes=window_bytes)) for _ in range(count)]
    for client in clients:
        client.sendall(post("/predictions/flood", json.dumps(order).encode()))
    return clients


def pipeline(stack: ExitStack, port: int, request: bytes, count: int, *, window_bytes: int = 4096) -> socket.socket:
    """Many requests in a row on one connection, as many as the server takes, and no answer is read."""
    client = stack.enter_context(dial(port, window_bytes=window_bytes))
    client.settimeout(2)
    try:
        client.sendall(request * count)
    except (TimeoutError, ConnectionError):
        pass
    return client


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def peak_mb(measure: Callable[[], float], *, at_most_s: float = 30.0) -> float:
    """The largest value, once it has stopped growing."""
    peak, grown = measure(), time.monotonic()
    deadline = grown + at_most_s
    while (now := time.monotonic()) < deadline and now - grown < QUIET_S:
        time.sleep(0.02)
        found = measure()
        if found > peak + 1:
            peak, grown = found, time.monotonic()
    return peak
