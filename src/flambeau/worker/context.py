"""Context: model and request information for a handler, and its ways to reply besides the return value."""

from __future__ import annotations

import copy
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from flambeau.metrics.definitions import Definition, Sample, SampleSource
from flambeau.wire.messages import Request

_NEVER_COPIED = {"cl_socket", "metrics", "_requests", "_types", "_request_ids", "_processors", "_read_headers"}

METRICS = "flambeau.torchserve.metrics.cache:WorkerMetrics"  # the class of `context.metrics`

Headers = dict[str, Any]
Types = dict[str, str] | None  # form field → content type; None for a plain body


class RequestProcessor:
    """The headers of one request, and the status and headers of its response."""

    def __init__(self, request_header: Headers | None) -> None:
        self._request: Headers = request_header or {}
        self._status = 200
        self._phrase: str | None = None
        self._response: dict[str, str] = {}

    def get_request_property(self, key: str) -> Any:
        """A request header: by its name as sent, else without regard to case."""
        found = self._request.get(key)
        if found is None:
            low = key.lower()
            found = next((v for k, v in self._request.items() if k.lower() == low), None)
        return found

    def get_request_properties(self) -> Headers:
        """All request headers, with their names as sent."""
        return self._request

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self._status, self._phrase = code, reason_phrase

    def get_response_status_code(self) -> int:
        return self._status

    def get_response_status_phrase(self) -> str | None:
        return self._phrase

    def add_response_property(self, key: str, value: str) -> None:
        self._response[key] = value

    def get_response_headers(self) -> dict[str, str]:
        return self._response

    def get_response_header(self, key: str) -> str | None:
        return self._response.get(key)


class ReplySink(Protocol):
    """How a context sends chunks while the handler runs."""

    def send_values(self, context: Context, values: Sequence[Any], indices: Sequence[int] | None = None) -> None:
        """Send one chunk to each request of the batch, or to those at `indices`."""

    def is_cancelled(self, job_id: int) -> bool:
        """Whether the client of that job is gone."""


class Context:
    """One object for all calls of a handler; `begin` replaces its request fields for each batch."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: Mapping[str, Any] | None,
        batch_size: int,
        gpu: int | None,
        mms_version: str,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self._system_properties = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.metrics = metrics if metrics is not None else new_metrics(model_name)
        self.model_yaml_config: Mapping[str, Any] = model_yaml_config or {}
        self.stopping_criteria: Any = None
        self.header_key_sequence_id = os.environ.get("TS_REQUEST_SEQUENCE_ID", "ts_request_sequence_id")
        self.header_key_sequence_start = os.environ.get("TS_REQUEST_SEQUENCE_START", "ts_request_sequence_start")
        self.header_key_sequence_end = os.environ.get("TS_REQUEST_SEQUENCE_END", "ts_request_sequence_end")
        self.cl_socket: ReplySink | None = None
        self.has_sent = False  # a part of this batch's replies has been sent
        self._requests: Sequence[Request] = ()
        self._request_ids: dict[int, str] | None = None
        self._processors: list[RequestProcessor] | None = []
        self._types: Sequence[Types] = ()
        self._read_headers: Callable[[Request, Types], Headers] = lambda request, types: dict(request.headers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    # ---- for the worker ----

    def begin(self, requests: Sequence[Request], types: Sequence[Types]) -> None:
        """Switch to the next batch. Ids, headers and processors are made on first use: few handlers need them."""
        self._requests = requests
        self._types = types
        self._request_ids = None
        self._processors = None
        self.has_sent = False
        if isinstance(self.metrics, SampleSource):
            self.metrics.follow(requests)

    def take_samples(self) -> list[Sample]:
        """What the handler has measured since the last call."""
        metrics = self.metrics
        return metrics.take() if isinstance(metrics, SampleSource) else []

    def connect(self, sink: ReplySink, read_headers: Callable[[Request, Types], Headers]) -> None:
        """Set how chunks are sent and how the headers of a request are read."""
        self.cl_socket = sink
        self._read_headers = read_headers

    def isolated(self) -> Context:
        """A copy with deep copies of all that a handler has put into it; what cannot be copied is shared."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if name not in _NEVER_COPIED:
                with suppress(Exception):
                    setattr(twin, name, copy.deepcopy(value))
        return twin

    @property
    def requests(self) -> Sequence[Request]:
        return self._requests

    @property
    def touched_processors(self) -> list[RequestProcessor] | None:
        """The request processors; None if the handler has not used any."""
        return self._processors

    # ---- for handlers ----

    @property
    def system_properties(self) -> dict[str, Any]:
        """`model_dir`, `gpu_id`, `batch_size`, `limit_max_image_pixels`, and the server's name and version."""
        return self._system_properties

    @property
    def request_ids(self) -> dict[int, str] | None:
        """Index in the batch → request id; None before the first request."""
        if self._request_ids is None and self._requests:
            self._request_ids = {i: request.request_id for i, request in enumerate(self._requests)}
        return self._request_ids

    @request_ids.setter
    def request_ids(self, ids: dict[int, str] | None) -> None:
        self._request_ids = ids

    @property
    def request_processor(self) -> list[RequestProcessor]:
        """One for each request of the batch."""
        if self._processors is None:
            pairs = zip(self._requests, self._types, strict=True)
            self._processors = [RequestProcessor(self._read_headers(request, types)) for request, types in pairs]
        return self._processors

    @request_processor.setter
    def request_processor(self, processors: list[RequestProcessor]) -> None:
        self._processors = processors

    def is_cancelled(self, idx: int = 0) -> bool:
        """Whether the client of request `idx` is gone; its reply would be dropped."""
        return self.cl_socket is not None and self.cl_socket.is_cancelled(self._requests[idx].job_id)

    def send(self, values: Sequence[Any], request_ids: Mapping[int, str] | None = None) -> None:
        """Send one chunk to each request of the batch now; the return value of the handler is the last chunk.

        `request_ids` maps the indices of `values` to request ids; it may name a part of the batch.
        """
        if self.cl_socket is None:
            return
        if request_ids is None or request_ids == self.request_ids:
            self.cl_socket.send_values(self, values)
            return
        places = {request_id: i for i, request_id in (self.request_ids or {}).items()}
        chosen = {places[request_id]: values[k] for k, request_id in request_ids.items() if request_id in places}
        self.cl_socket.send_values(self, [*chosen.values()], [*chosen])

    def get_request_id(self, idx: int = 0) -> str | None:
        ids = self.request_ids
        return ids.get(idx) if ids else None

    def get_request_header(self, idx: int, key: str) -> Any:
        """A header of request `idx`, or None."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> Headers:
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.request_processor[idx].get_response_header("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].get_response_headers()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        if self.request_processor:
            self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """The status and reason phrase set for request `idx`."""
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def get_sequence_id(self, idx: int) -> Any:
        """The id of the sequence that request `idx` belongs to, or None."""
        return self.get_request_header(idx, self.header_key_sequence_id)


def new_metrics(model: str, config_file: str = "", definitions: Iterable[Definition] = ()) -> Any:
    """A `context.metrics` with the metrics that the server's metrics.yaml defines."""
    return pkgutil.resolve_name(METRICS)(model, config_file, definitions)
