"""AccessLog: a line for each call; its text, and its fields in JSON."""

from __future__ import annotations

from typing import Any

from flambeau.logs.line_formats import ACCESS, LineFormat, masked, printable
from flambeau.logs.writer import Logs


def http_line(
    remote: str, method: str, path: str, query: str, version: str, status: int, seconds: float, _: int = 0
) -> str:
    target = printable(f"{path}?{masked(query)}" if query else path or "-")
    return f'{remote} "{method or "-"} {target} HTTP/{version}" {status} {max(0.0, seconds * 1000):.0f}'


def full_http_line(
    remote: str,
    request: tuple[str, ...],
    status: int,
    seconds: float,
    sizes: tuple[int, int],
    end: str,
    model: str = "",
    trace_id: str = "",
    model_version: str = "",
    _: int = 0,
) -> str:
    method, path, query, version, request_id = request
    received, sent = sizes
    line = http_line(remote, method, path, query, version, status, seconds)
    return f"{line} id={printable(request_id)} in={received} out={sent}{end}"


def grpc_line(
    peer: str,
    method: str,
    code: int,
    seconds: float,
    request_id: str = "",
    model: str = "",
    trace_id: str = "",
    model_version: str = "",
    _: int = 0,
) -> str:
    return f'{remote_of(peer)} "gRPC {method.lstrip("/")} HTTP/2.0" {code} {max(0.0, seconds * 1000):.0f}'


def http_fields(
    remote: str, method: str, path: str, query: str, version: str, status: int, seconds: float, _: int = 0
) -> dict[str, Any]:
    return {
        "message": http_line(remote, method, path, query, version, status, seconds),
        "client": remote.removeprefix("/"),
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round(max(0.0, seconds * 1000), 3),
    }


def full_http_fields(
    remote: str,
    request: tuple[str, ...],
    status: int,
    seconds: float,
    sizes: tuple[int, int],
    end: str,
    model: str,
    trace_id: str,
    model_version: str,
    _: int = 0,
) -> dict[str, Any]:
    method, path, query, version, request_id = request
    return {
        **http_fields(remote, method, path, query, version, status, seconds),
        "request_id": request_id,
        "model": model,
        "model_version": model_version,
        "trace_id": trace_id,
        "request_bytes": sizes[0],
        "response_bytes": sizes[1],
        "aborted": bool(end),
    }


def grpc_fields(
    peer: str,
    method: str,
    code: int,
    seconds: float,
    request_id: str,
    model: str,
    trace_id: str,
    model_version: str,
    _: int = 0,
) -> dict[str, Any]:
    return {
        "message": grpc_line(peer, method, code, seconds, request_id, model, trace_id),
        "client": remote_of(peer).removeprefix("/"),
        "method": "gRPC",
        "path": method.lstrip("/"),
        "status": code,
        "duration_ms": round(max(0.0, seconds * 1000), 3),
        "request_id": request_id,
        "model": model,
        "model_version": model_version,
        "trace_id": trace_id,
    }


class AccessLog:
    """Logs each call: client, request, status and duration; a full log has request ids and sizes too."""

    _HTTP = LineFormat(ACCESS, to_text=http_line, to_fields=http_fields)
    _FULL_HTTP = LineFormat(ACCESS, to_text=full_http_line, to_fields=full_http_fields)
    _GRPC = LineFormat(ACCESS, to_text=grpc_line, to_fields=grpc_fields)

    def __init__(self, logs: Logs, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self.is_json = logs.is_json
        self._add = logs.add

    def http(self, remote: str, method: str, path: str, query: str, version: str, status: int, seconds: float) -> None:
        """Log an HTTP exchange; the logs' thread formats the line."""
        values = (remote, method, path, query, version, status, seconds)
        self._add(self._HTTP, values, len(path) + len(query))

    def http_ended(
        self,
        remote: str,
        request: tuple[str, ...],
        status: int,
        seconds: float,
        sizes: tuple[int, int],
        end: str,
        model: str = "",
        trace_id: str = "",
        model_version: str = "",
    ) -> None:
        """Log an HTTP exchange whose response has ended; `request`: method, path, query, version and request id.

        Only JSON lines have the model, the version if one was chosen, and the trace id.
        """
        values = (remote, request, status, seconds, sizes, end, model, trace_id, model_version)
        self._add(self._FULL_HTTP, values, sum(map(len, request)))

    def grpc(
        self,
        peer: str,
        method: str,
        code: int,
        seconds: float,
        request_id: str = "",
        model: str = "",
        trace_id: str = "",
        model_version: str = "",
    ) -> None:
        """Log a gRPC call: `peer` and `method` in grpc's form, `code` as a number. JSON lines have all of it."""
        self._add(self._GRPC, (peer, method, code, seconds, request_id, model, trace_id, model_version))


def remote_of(peer: object) -> str:
    """`/host:port` of a socket's peer name or of grpc's `ipv4:host:port`; `/local` for a unix socket."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"/{peer[0]}:{peer[1]}"
    if isinstance(peer, str):
        scheme, _, rest = peer.partition(":")
        if scheme in ("ipv4", "ipv6"):
            return "/" + rest.replace("%5B", "").replace("%5D", "").replace("[", "").replace("]", "")
    return "/local"
