"""The access log: one line per answered call, over HTTP or gRPC."""

from __future__ import annotations

import logging

from flambeau.logs.line_formats import ACCESS, masked, printable
from flambeau.logs.writer import Logs


class AccessLog:
    """Logs each call: client, request, status and duration."""

    def __init__(self, logs: Logs) -> None:
        self._put = logs.put

    def http(self, remote: str, method: str, path: str, query: str, version: str, status: int, seconds: float) -> None:
        """Log an HTTP exchange; the logs' thread formats the line."""
        payload = (http_line, remote, method, path, query, version, status, seconds)
        self._put(ACCESS, logging.INFO, "main", ACCESS, payload)

    def grpc(self, peer: str, method: str, code: int, seconds: float) -> None:
        """Log a gRPC call: `peer` and `method` in grpc's form, `code` as a number."""
        self._put(ACCESS, logging.INFO, "main", ACCESS, (grpc_line, peer, method, code, seconds))


def http_line(
    remote: str, method: str, path: str, query: str, version: str, status: int, seconds: float, created: float
) -> str:
    target = printable(f"{path}?{masked(query)}" if query else path or "-")
    return f'{remote} "{method or "-"} {target} HTTP/{version}" {status} {max(0, round(seconds * 1000))}'


def grpc_line(peer: str, method: str, code: int, seconds: float, created: float) -> str:
    return f'{remote_of(peer)} "gRPC {method.lstrip("/")} HTTP/2.0" {code} {max(0, round(seconds * 1000))}'


def remote_of(peer: object) -> str:
    """`/host:port` of a socket's peer name or of grpc's `ipv4:host:port`; `/local` for a unix socket."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"/{peer[0]}:{peer[1]}"
    if isinstance(peer, str):
        scheme, _, rest = peer.partition(":")
        if scheme in ("ipv4", "ipv6"):
            return "/" + rest.replace("%5B", "").replace("%5D", "").replace("[", "").replace("]", "")
    return "/local"
