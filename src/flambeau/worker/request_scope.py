"""The requests that a handler works on, as the ids in its log records and as OpenTelemetry's current context."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextvars import Context as Variables
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any

from flambeau.errors import ConfigError
from flambeau.span_export import new_processors, new_resource
from flambeau.wire.messages import Request, header
from flambeau.wire.trace_context import TRACEPARENT, TraceParent, read_traceparent
from flambeau.worker.context import Context
from flambeau.worker.loader import Handle
from flambeau.worker.model import LoadedModel

logger = logging.getLogger(__name__)

_requests: ContextVar[Sequence[Request]] = ContextVar("requests", default=())
API = "opentelemetry.trace"
Enter = Callable[[Sequence[Request]], object]


def in_request_scope(model: LoadedModel, *, json_logs: bool, traces: bool) -> LoadedModel:
    """The model, whose handler's calls run in the scope of their requests; without JSON logs, only traced ones."""
    enter: Enter = HandlerTracer(model.context.model_name).enter if traces else _requests.set
    handler = model.handler
    wrap = scoped_async if handler.is_concurrent else scoped
    handle = wrap(handler.handle, enter, only_traced=not json_logs)
    pipeline = model.pipeline and (model.pipeline[0], scoped(model.pipeline[1], enter, only_traced=not json_logs))
    return replace(model, handler=replace(handler, handle=handle), pipeline=pipeline)


class HandlerTracer:
    """Makes the span of a traced batch the current one, for spans that the handler adds.

    OpenTelemetry is set up once the handler, or a library of it, has imported it: most never do.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._attach: Callable[[TraceParent | None], object] | None = None
        if API in sys.modules:
            self._open()

    def enter(self, requests: Sequence[Request]) -> None:
        _requests.set(requests)
        if self._attach is None and API in sys.modules:
            self._open()
        if self._attach is not None:
            self._attach(sampled_of(requests))

    def _open(self) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        extract, empty = TraceContextTextMapPropagator().extract, context.Context()
        self._attach = lambda found: context.attach(extract({TRACEPARENT: str(found)}, empty) if found else empty)
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # or the handler has set one of its own
            try:
                self._set_provider()
            except ConfigError as error:  # no SDK in this model's Python, say: the context can still be passed on
                logger.warning("spans of the handler are not recorded: %s", error)

    def _set_provider(self) -> None:
        processors = new_processors()
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider, sampling

        # Only children of traced requests: the server decides which requests these are.
        resource = new_resource({"flambeau.process": "worker", "flambeau.model.name": self._model})
        provider = TracerProvider(sampling.ParentBased(sampling.ALWAYS_OFF), resource)
        for processor in processors:
            provider.add_span_processor(processor)
        trace.set_tracer_provider(provider)


def log_fields() -> dict[str, str]:
    """The running requests as fields of a log record."""
    requests = _requests.get()
    if not requests:
        return {}
    found = next((one for request in requests if (one := trace_of(request)) is not None), None)
    fields = {"request_id": ",".join([request.request_id for request in requests])}
    return fields if found is None else {**fields, "trace_id": found.trace_id}


def scoped(handle: Handle, enter: Enter, *, only_traced: bool) -> Handle:
    """Each call has a copy of the context variables, and so do the generators that it returns."""

    @functools.wraps(handle)
    def handle_in_scope(data: Any, context: Context) -> Any:
        if only_traced and sampled_of(context.requests) is None:
            return handle(data, context)
        variables = copy_context()
        variables.run(enter, context.requests)
        result = variables.run(handle, data, context)
        if inspect.isgenerator(result):
            return advanced_in(variables, result)
        if type(result) is list and any(map(inspect.isgenerator, result)):
            return [advanced_in(variables, one) if inspect.isgenerator(one) else one for one in result]
        return result

    return handle_in_scope


def scoped_async(handle: Handle, enter: Enter, *, only_traced: bool) -> Handle:
    """Each batch of an `async def` handler is a task, which has context variables of its own."""

    @functools.wraps(handle)
    def handle_in_scope(data: Any, context: Context) -> Any:
        if not only_traced or sampled_of(context.requests) is not None:
            enter(context.requests)
        return handle(data, context)

    return handle_in_scope


def advanced_in(variables: Variables, chunks: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    try:
        while True:
            try:
                item = variables.run(next, chunks)
            except StopIteration:
                return
            yield item
    finally:
        variables.run(chunks.close)


def sampled_of(requests: Sequence[Request]) -> TraceParent | None:
    """The first of the requests' traces that is recorded: spans can have one parent only."""
    for request in requests:
        if (found := trace_of(request)) is not None and found.is_sampled:
            return found
    return None


def trace_of(request: Request) -> TraceParent | None:
    return read_traceparent(header(request.headers, TRACEPARENT))
