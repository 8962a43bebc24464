"""Which requests are traced, and what is known of each when it ends; OpenTelemetry is loaded with `spans` only."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from flambeau.errors import FlambeauError
from flambeau.serving.job import Job
from flambeau.serving.job_times import JobTimes
from flambeau.span_export import is_disabled, new_processors
from flambeau.wire.messages import header
from flambeau.wire.trace_context import TRACEPARENT, TRACESTATE, TraceParent, read_traceparent

logger = logging.getLogger(__name__)

CLOSE_S = 5.0  # to send the last spans when the server stops

Attributes = dict[str, Any]
_bits = random.getrandbits
_random = random.random


class Attempt(NamedTuple):
    """A job's stay in one worker."""

    span_id: int
    worker: str
    batch_size: int
    shared_with: tuple[RequestTrace, ...]  # other traced requests of the batch
    sent: float


class JobTrace:
    """What happened to one job of a traced request."""

    __slots__ = ("_request", "arrived", "attempts", "ended_at", "error", "model", "times", "version")

    def __init__(self, request: RequestTrace, job: Job, model: str, version: str) -> None:
        self._request = request
        self.arrived = job.arrived
        self.model = model
        self.version = version
        self.attempts: list[Attempt] = []
        self.error: FlambeauError | None = None
        self.times: JobTimes | None = None
        self.ended_at = 0.0

    @property
    def request(self) -> RequestTrace:
        return self._request

    @property
    def trace_id(self) -> str:
        return self._request.trace_id

    def sent(self, job: Job, worker: str, jobs: Sequence[Job]) -> None:
        """The job is about to be sent; its header names the span that spans of the handler belong to."""
        others = [one.trace.request for one in jobs if isinstance(one.trace, JobTrace) and one is not job]
        span_id = new_span_id()
        self.attempts.append(Attempt(span_id, worker, len(jobs), tuple(others), time.monotonic()))
        job.times = None  # of another attempt
        kept = [one for one in job.headers if one[0].lower() != TRACEPARENT]
        job.headers = [*kept, (TRACEPARENT, str(TraceParent(self.trace_id, f"{span_id:016x}", True)))]

    def failed(self, error: FlambeauError) -> None:
        self.error = error

    def ended(self, job: Job) -> None:
        self.times = job.times
        self.ended_at = time.monotonic()


class RequestTrace:
    """The trace of one request. Front ends add attributes to its span, and to that of the model's work."""

    __slots__ = ("_tracing", "arrived", "attributes", "jobs", "name", "parent", "span_id", "state", "trace_id", "work")

    def __init__(self, tracing: Tracing, parent: TraceParent | None, state: str, arrived: float) -> None:
        self._tracing = tracing
        self.parent = parent
        self.state = state
        self.trace_id = parent.trace_id if parent is not None else f"{_bits(128) or 1:032x}"
        self.span_id = new_span_id()
        self.arrived = arrived
        self.name = ""
        self.attributes: Attributes = {}
        self.work: Attributes = {}
        self.jobs: list[JobTrace] = []

    @property
    def traceparent(self) -> str:
        """The header that names the request's own span."""
        return f"00-{self.trace_id}-{self.span_id:016x}-01"

    def describe(self, name: str, attributes: Attributes) -> None:
        self.name = name
        self.attributes |= attributes

    def add(self, job: Job, model: str, version: str) -> None:
        """Follow a job of the request."""
        job.trace = one = JobTrace(self, job, model, version)
        self.jobs.append(one)
        self.attributes |= {
            "flambeau.request.id": job.request_id,
            "flambeau.model.name": model,
            "flambeau.model.version": version,
        }

    def end(self, attributes: Attributes, error: str = "") -> None:
        """The request has ended: send its spans. `error` is the kind of error, or empty."""
        self.attributes |= attributes
        self._tracing.finish(self, error)


class SpanSender(Protocol):
    """Makes spans of finished traces and sends them."""

    def send(self, trace: RequestTrace, error: str) -> None: ...

    def close(self) -> None:
        """Send what is left."""


class Tracing:
    """Decides which requests are traced."""

    def __init__(self, sampling: float, sender: SpanSender) -> None:
        self._sampling = sampling  # the share of requests that say nothing themselves
        self._sender = sender
        self.finish = sender.send

    def begin(self, headers: Iterable[tuple[str, str]], arrived: float) -> RequestTrace | None:
        """The trace of a request; None if it is not recorded. A client that sends a traceparent has decided it."""
        parent = read_traceparent(header(headers, TRACEPARENT))
        if not (_random() < self._sampling if parent is None else parent.is_sampled):
            return None
        return RequestTrace(self, parent, header(headers, TRACESTATE) or "" if parent else "", arrived)

    async def close(self) -> None:
        """Send what is left, within CLOSE_S: a collector that does not answer must not keep the process."""
        thread = threading.Thread(target=self._sender.close, daemon=True, name="last-spans")
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_S)
        if thread.is_alive():
            logger.warning("the last spans could not be sent within %g s", CLOSE_S)


def open_tracing(*, is_on: bool, sampling: float) -> Tracing | None:
    """None if tracing is off; then OpenTelemetry is not imported."""
    if not is_on:
        return None
    if is_disabled():
        logger.warning("OTEL_SDK_DISABLED is true: there are no traces, although the setting tracing is on")
        return None
    if os.environ.get("OTEL_TRACES_SAMPLER"):
        logger.warning("OTEL_TRACES_SAMPLER has no effect: the setting trace_sampling decides which are traced")
    processors = new_processors()  # raises the error for missing packages
    from flambeau.serving.spans import SpanExporter

    return Tracing(sampling, SpanExporter(processors))


def new_span_id() -> int:
    return _bits(64) or 1
