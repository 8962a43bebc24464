"""OtlpReceiver: an OpenTelemetry collector for tests, which keeps the spans that it receives over HTTP."""

from __future__ import annotations

import gzip
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class ReceivedSpan:
    """A span with the attributes of its process."""

    name: str
    trace_id: str
    id: str
    parent_id: str
    kind: str
    begin_ns: int
    end_ns: int
    is_error: bool
    error: str
    attributes: dict[str, Any]
    process: dict[str, Any]
    linked: tuple[str, ...] = field(default=())

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def is_inside(self, other: ReceivedSpan) -> bool:
        return other.begin_ns <= self.begin_ns <= self.end_ns <= other.end_ns


class OtlpReceiver:
    """Listens on a free port; `environment` sends spans to it."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.spans += to_spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_address[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",  # milliseconds
        }

    def trace(self, trace_id: str, *names: str, timeout_s: float = 60) -> dict[str, ReceivedSpan]:
        """The spans of a trace by name, once spans of these names have arrived."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = {span.name: span for span in [*self.spans] if span.trace_id == trace_id}
            if found.keys() >= {*names}:
                return found
            time.sleep(0.02)
        raise AssertionError(f"of {names} only {sorted(found)} arrived within {timeout_s:g} s")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def to_spans(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    return [
        to_span(span, values_of(resource.resource.attributes))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def to_span(span: Span, process: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        error=span.status.message,
        attributes=values_of(span.attributes),
        process=process,
        linked=tuple(link.trace_id.hex() for link in span.links),
    )


def values_of(attributes: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)
