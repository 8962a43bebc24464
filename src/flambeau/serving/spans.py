"""Spans of finished requests, made from the times of their jobs. This module loads OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from flambeau import __version__
from flambeau.errors import FlambeauError, JobFailed
from flambeau.serving.job_times import spans_of
from flambeau.serving.traces import Attempt, Attributes, JobTrace, RequestTrace, new_span_id
from flambeau.span_export import new_resource

# The parts of a job's time that become spans, with the spans' names: below the request, and below the batch.
WAITING = {"queue": "queue", "batch_wait": "batch wait"}
STAGES = {
    "preprocess": "preprocess",
    "inference": "inference",
    "postprocess": "postprocess",
    "handler": "handler",
    "first_token": "first token",
    "generate": "decode",
}

OK = Status()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class SpanExporter:
    """Sends the spans of finished requests; threads of the processors do it in batches."""

    def __init__(self, processors: Sequence[BatchSpanProcessor]) -> None:
        self._processors = processors
        self._resource = new_resource({"flambeau.process": "server"})
        self._scope = InstrumentationScope("flambeau", __version__)

    def send(self, trace: RequestTrace, error: str) -> None:
        for span in SpanMaker(trace, self._resource, self._scope).make(error):
            for processor in self._processors:
                processor.on_end(span)

    def close(self) -> None:
        for processor in self._processors:
            processor.shutdown()  # type: ignore[no-untyped-call]


class SpanMaker:
    """Makes the spans of a request that has ended."""

    def __init__(self, trace: RequestTrace, resource: Resource, scope: InstrumentationScope) -> None:
        self._trace = trace
        self._resource = resource
        self._scope = scope
        self._trace_id = int(trace.trace_id, 16)
        self._state = TraceState.from_header([trace.state]) if trace.state else None
        self._now = time.monotonic()
        self._epoch_s = time.time() - self._now  # of the monotonic clock

    def make(self, error: str) -> list[ReadableSpan]:
        trace = self._trace
        spans = [span for job in trace.jobs for span in self._job_spans(job)]
        parent = None if trace.parent is None else self._context(int(trace.parent.span_id, 16), is_remote=True)
        attributes = {**trace.attributes, "error.type": error} if error else trace.attributes
        begin, end, kind = trace.arrived, self._now, SpanKind.SERVER
        spans.append(self._span(trace.name, trace.span_id, parent, begin, end, attributes, kind=kind, error=error))
        return spans

    def _job_spans(self, job: JobTrace) -> Iterable[ReadableSpan]:
        own = self._context(self._trace.span_id)
        since, end, error = job.arrived, job.ended_at or self._now, reason_of(job.error)
        if not job.attempts:
            yield self._span("queue", new_span_id(), own, since, end, error=error)
            return
        *lost, last = job.attempts
        for attempt, following in zip(lost, job.attempts[1:], strict=True):
            yield self._span("queue", new_span_id(), own, since, attempt.sent)
            yield self._batch(job, attempt, own, attempt.sent, following.sent, "the worker was lost")
            since = following.sent
        parts = [("queue", since, last.sent - since)] if job.times is None else spans_of(job.times)
        waiting = [part for part in parts if part[0] in WAITING]
        began = waiting[-1][1] + waiting[-1][2] if waiting else last.sent
        for name, start, seconds in waiting:
            yield self._span(WAITING[name], new_span_id(), own, start, start + seconds)
        yield self._batch(job, last, own, began, end, error)
        inner = {name: (start, start + seconds) for name, start, seconds in parts if name in STAGES}
        if "inference" in inner:
            inner.pop("handler", None)  # what is left of it beside the stages
        parent = self._context(last.span_id)
        for name, (start, stop) in inner.items():
            yield self._span(STAGES[name], new_span_id(), parent, start, stop)

    def _batch(
        self, job: JobTrace, attempt: Attempt, own: SpanContext, start: float, end: float, error: str
    ) -> ReadableSpan:
        attributes = {
            "flambeau.model.name": job.model,
            "flambeau.model.version": job.version,
            "flambeau.worker": attempt.worker,
            "flambeau.batch.size": attempt.batch_size,
            **generation_attributes(job),
            **self._trace.work,
        }
        operation = attributes.get("gen_ai.operation.name")
        name = f"{operation} {attributes['gen_ai.request.model']}" if operation else "batch"
        return self._span(
            name,
            attempt.span_id,
            own,
            start,
            end,
            attributes,
            links=[Link(context_of(other)) for other in attempt.shared_with],
            events=[*self._events(job)] if attempt is job.attempts[-1] else (),
            error=error,
        )

    def _events(self, job: JobTrace) -> Iterable[Event]:
        """The first part of a stream, pauses of the worker, and the handler's traceback."""
        times = job.times
        if times is not None and times.first_part:
            yield Event("first part", timestamp=self._nanoseconds(times.first_part))
        for what, began, seconds in (times.work.pauses if times and times.work else None) or ():
            yield Event(what, {"duration_s": seconds}, self._nanoseconds(began))
        if isinstance(job.error, JobFailed) and job.error.cause:
            attributes = {"exception.message": reason_of(job.error), "exception.stacktrace": job.error.cause}
            yield Event("exception", attributes, self._nanoseconds(job.ended_at))

    def _context(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return new_context(self._trace_id, span_id, is_remote=is_remote, state=self._state)

    def _span(
        self,
        name: str,
        span_id: int,
        parent: SpanContext | None,
        start: float,
        end: float,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        events: Sequence[Event] = (),
        error: str = "",
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            self._context(span_id),
            parent,
            self._resource,
            attributes,
            kind=kind,
            links=links,
            events=events,
            status=Status(StatusCode.ERROR, error) if error else OK,
            instrumentation_scope=self._scope,
            start_time=self._nanoseconds(start),
            end_time=self._nanoseconds(max(start, end)),
        )

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._epoch_s) * 1e9)


def reason_of(error: FlambeauError | None) -> str:
    return "" if error is None else error.reason or str(error)


def generation_attributes(job: JobTrace) -> Attributes:
    """What an engine did for a job, in OpenTelemetry's conventions; front ends may know more."""
    made = job.times.work.generation if job.times is not None and job.times.work is not None else None
    if made is None:
        return {}
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "flambeau",
        "gen_ai.request.model": job.model,
        "gen_ai.usage.input_tokens": made.num_prompt,
        "gen_ai.usage.output_tokens": made.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": made.num_cached,
        "flambeau.generation.preemptions": made.num_preempted,
        "flambeau.generation.drafted_tokens": made.num_drafted,
        "flambeau.generation.accepted_tokens": made.num_accepted,
    }


def new_context(trace_id: int, span_id: int, *, is_remote: bool, state: TraceState | None = None) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, SAMPLED, state)


def context_of(trace: RequestTrace) -> SpanContext:
    return new_context(int(trace.trace_id, 16), trace.span_id, is_remote=False)
