"""The Server-Timing header: the parts of a request's time in milliseconds."""

from __future__ import annotations

import json

from msgspec import to_builtins

from flambeau.serving.job import Job
from flambeau.serving.job_times import JobTimes, spans_of

EXPLAIN_HEADER = "x-flambeau-explain"

_STAGES = (
    b"server-timing: queue;dur=%.3f, transfer;dur=%.3f, preprocess;dur=%.3f, inference;dur=%.3f, postprocess;dur=%.3f, "
    b"other;dur=%.3f, total;dur=%.3f\r\n"
)
_HANDLER = b"server-timing: queue;dur=%.3f, transfer;dur=%.3f, handler;dur=%.3f, total;dur=%.3f\r\n"
# In the header both transfers are one, with the worker's reading and writing.
_SHORT = {"to_worker": "transfer", "to_server": "transfer", "read": "transfer", "reply": "transfer"}


def server_timing(times: JobTimes) -> str:
    """The value of the header."""
    return timing_line(times).decode().removeprefix("server-timing: ").rstrip()


def timing_line(times: JobTimes) -> bytes:
    """The line of the header. Most requests take the short way: one batch, one worker, a whole reply."""
    work, started, sent = times.work, times.started, times.sent
    if work is None or times.held_since or times.retried or work.generation is not None or times.first_part:
        return any_timing_line(times)
    if started != sent and sent <= work.began < started:  # it waited in the worker's socket; see JobTimes.left_queue
        started = work.began
    handler_ms = work.handler_s * 1e3
    queue_ms = (started - times.arrived) * 1e3
    total_ms = (times.received - times.arrived) * 1e3
    transfer_ms = total_ms - queue_ms - handler_ms
    stages = work.stages
    if transfer_ms < 0.0:  # not from one clock
        return any_timing_line(times)
    if stages is None:
        return _HANDLER % (queue_ms, transfer_ms, handler_ms, total_ms)
    first, second, third = stages
    first *= 1e3
    second *= 1e3
    third *= 1e3
    other_ms = handler_ms - first - second - third
    if other_ms < 0.0:  # they ran side by side
        return _HANDLER % (queue_ms, transfer_ms, handler_ms, total_ms)
    return _STAGES % (queue_ms, transfer_ms, first, second, third, other_ms, total_ms)


def any_timing_line(times: JobTimes) -> bytes:
    merged: dict[str, float] = {}
    for name, _, seconds in spans_of(times):
        name = _SHORT.get(name, name)
        if name == "handler" and "inference" in merged:
            name = "other"
        merged[name] = merged.get(name, 0.0) + seconds
    merged["total"] = times.total_s
    text = ", ".join([f"{name};dur={seconds * 1000:.3f}" for name, seconds in merged.items()])
    return f"server-timing: {text}\r\n".encode()


def explanation(job: Job, status: int) -> bytes:
    """The explanation of a job as JSON in ASCII, so that it fits into a header; empty if there is none."""
    found = job.explain(status)
    return b"" if found is None else json.dumps(to_builtins(found)).encode()
