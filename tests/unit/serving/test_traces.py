from __future__ import annotations

import subprocess
import sys
import time

import pytest

from flambeau.errors import JobFailed
from flambeau.serving.job_times import JobTimes
from flambeau.serving.spans import SpanExporter
from flambeau.serving.traces import Tracing
from flambeau.wire.messages import GenerationWork, Work
from support.jobs import new_job

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOTHING = ("host", "x")


class Kept:
    """A processor that keeps its spans."""

    def __init__(self):
        self.spans = []

    def on_end(self, span):
        self.spans.append(span)

    def shutdown(self):
        self.spans = None

    def named(self, name):
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def tracing(kept):
    return Tracing(1.0, SpanExporter([kept]))


def header(flags):
    return ("traceparent", f"00-{TRACE}-{PARENT}-{flags}")


@pytest.mark.parametrize(
    ("sampling", "sent", "is_traced"),
    [(0.0, NOTHING, False), (1.0, NOTHING, True), (0.0, header("01"), True), (1.0, header("00"), False)],
)
def test_client_decides_before_the_servers_share(sampling, sent, is_traced):
    found = Tracing(sampling, SpanExporter([])).begin([sent], 0.0)
    assert (found is not None) == is_traced
    if found is not None and sent is not NOTHING:
        assert found.trace_id == TRACE


def test_share_of_requests_is_traced():
    tracing = Tracing(0.25, SpanExporter([]))
    number = sum(tracing.begin([NOTHING], 0.0) is not None for _ in range(10_000))
    assert 2200 < number < 2800  # seven standard deviations


def test_new_traces_differ(tracing):
    first, second = tracing.begin([], 0.0), tracing.begin([header("xx")], 0.0)
    assert first.trace_id != second.trace_id
    assert len(first.trace_id) == 32
    assert first.traceparent.startswith(f"00-{first.trace_id}-")


def ended(tracing, *, now=None, job=None, times=None, error=None, attempts=1, headers=()):
    """A request with one job that has ended."""
    now = time.monotonic() - 1.0 if now is None else now
    trace = tracing.begin([*headers], now)
    trace.describe("POST /x", {})
    job = job or new_job()
    job.arrived = now
    trace.add(job, "m", "1.0")
    for _ in range(attempts):
        job.trace.sent(job, "W-1-m_1.0", [job])
    job.times = times
    if error:
        job.trace.failed(error)
    job.trace.ended(job)
    trace.end({"http.response.status_code": 200})
    return trace


def test_spans_follow_the_times_of_the_job(tracing, kept):
    now = time.monotonic() - 1.0
    work = Work(now + 0.21, now + 0.8, 0.01, 0.5, (0.1, 0.3, 0.05), pauses=[("garbage collection", now + 0.4, 0.02)])
    times = JobTimes(now, now + 0.2, now + 0.2, now + 0.9, "W", 3, work, now + 0.1)
    ended(tracing, now=now, times=times)
    found = {span.name: span for span in kept.spans}
    assert {*found} == {"POST /x", "queue", "batch wait", "batch", "preprocess", "inference", "postprocess"}
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in found.items()}
    expected = {"queue": 0.1, "batch wait": 0.1, "preprocess": 0.1, "inference": 0.3, "postprocess": 0.05}
    assert {name: seconds[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert found["batch"].start_time == pytest.approx(found["batch wait"].end_time, abs=1000)
    [pause] = found["batch"].events
    assert (pause.name, pause.attributes["duration_s"]) == ("garbage collection", 0.02)


def test_generation_without_a_front_end_that_knows_it(tracing, kept):
    now = time.monotonic() - 1.0
    work = Work(now + 0.1, now + 0.9, 0.0, 0.8, generation=GenerationWork(0.2, 7, 4, 9, num_preempted=1))
    ended(tracing, now=now, times=JobTimes(now, now + 0.1, now + 0.1, now + 0.9, "W", 1, work))
    [span] = kept.named("text_completion m")
    assert span.attributes["gen_ai.usage.input_tokens"] == 7
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert span.attributes["flambeau.generation.preemptions"] == 1
    [first], [decode] = kept.named("first token"), kept.named("decode")
    assert {first.parent.span_id, decode.parent.span_id} == {span.context.span_id}


def test_handler_gets_the_batch_span_of_its_attempt_and_no_other_traceparent(tracing, kept):
    job = new_job(headers=[("Traceparent", "old"), ("a", "b")])
    ended(tracing, job=job, attempts=2, headers=[header("01")])
    lost, last = kept.named("batch")
    assert job.headers == [("a", "b"), ("traceparent", f"00-{TRACE}-{last.context.span_id:016x}-01")]
    assert (lost.status.is_ok, last.status.is_ok) == (False, True)
    [request] = kept.named("POST /x")
    assert (f"{request.parent.span_id:016x}", request.parent.is_remote) == (PARENT, True)


def test_job_that_failed_in_the_queue(tracing, kept):
    ended(tracing, attempts=0, error=JobFailed("no worker"))
    [queue] = kept.named("queue")
    assert queue.status.description == "no worker"
    assert kept.named("batch") == []


def test_traceback_of_a_handler_is_an_event(tracing, kept):
    ended(tracing, error=JobFailed("Prediction failed", cause="Traceback\nValueError: x", reason="ValueError: x"))
    [batch] = kept.named("batch")
    assert batch.status.description == "ValueError: x"
    [event] = batch.events
    assert event.attributes["exception.stacktrace"] == "Traceback\nValueError: x"


async def test_close_sends_the_last_spans(tracing, kept):
    await tracing.close()
    assert kept.spans is None


def test_nothing_of_opentelemetry_is_imported_without_tracing():
    program = (
        "import flambeau.cli.main, flambeau.cli.serve, flambeau.frontend.grpc.frontend, flambeau.worker.worker, sys; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
