"""Sample requests, and calls of a handler that can neither hang nor exit the calling process."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from flambeau.errors import BadRequest, FlambeauError, PredictionException
from flambeau.wire.messages import Request
from flambeau.worker.code_places import first_line, shorten, source_line
from flambeau.worker.failures import explain, to_failed
from flambeau.worker.handler_mistakes import explain_exit, explain_interrupt
from flambeau.worker.local_worker import LocalWorker
from flambeau.worker.results import BadResult

GRACE_S = 5.0  # extra time for native code, which a signal cannot interrupt
NESTED_LEVELS = 400
HUGE_BYTES = 2_000_000
JSON, BINARY = "application/json", "application/octet-stream"


# Both derive from BaseException so that no `except Exception` of a handler catches them.
class CallTimeout(BaseException):
    """A call took longer than its limit."""


class ProcessExit(BaseException):
    """A handler called `os._exit`, which would exit its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """The result of one call: replies and their statuses, or the exception it raised."""

    replies: Sequence[bytes] = ()
    statuses: Sequence[int] = ()
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def ends_worker(self) -> bool:
        """Whether a worker would not survive this call: killed by a timeout, or exited by the handler."""
        return self.error is not None and not isinstance(self.error, Exception)

    @property
    def status(self) -> int:
        """The highest HTTP status a client of this batch would get."""
        if self.error is not None:
            return to_failed([], self.error).status
        return max(self.statuses, default=200)

    @property
    def reason(self) -> str:
        """The failure and the line of the author's code it came from, in one line."""
        if self.error is None:
            return f"answered with status {self.status}"
        if sentence := explain(self.error):  # after the message that the client gets
            has_advice = isinstance(self.error, BadResult) and bool(self.error.advice)
            return f"{str(self.error).rstrip('.')}: {sentence}" if has_advice else sentence
        text, place = describe_error(self.error), source_line(self.error)
        return text if not place or f"({place})" in text else f"{text} ({place})"


def describe_error(error: BaseException) -> str:
    """The error in one line, with what was noted about it."""
    return " ".join([describe_exception(error), *getattr(error, "__notes__", ())])


def describe_exception(error: BaseException) -> str:
    match error:
        case PredictionException() | BadRequest():
            failed = to_failed([], error)
            advice = failed.detail if isinstance(error, PredictionException) else ""
            return f"answered with {failed.status}: {advice or shorten(failed.message)}"
        case FlambeauError():  # its text is the sentence that the server logs
            return str(error)
        case CallTimeout():
            return f"{error}; the server kills a worker for that"
        case SystemExit():
            return f"{explain_exit(error)}. It ends the worker: raise an exception instead"
        case ProcessExit():
            return f"{error} would exit the worker"
    return first_line(error)


class GuardedCaller:
    """Calls a handler in the main thread with a time limit per call."""

    def __init__(self, worker: LocalWorker, limit_s: float) -> None:
        self.worker = worker
        self._limit_s = limit_s

    def call(self, samples: Sequence[Sample]) -> CallOutcome:
        """Run the samples as one batch."""
        requests = [sample.to_request(i) for i, sample in enumerate(samples)]
        replies, outcome = guarded_call(lambda: self.worker.handle(requests), self._limit_s)
        if outcome.error is not None:
            return outcome
        processors = self.worker.context.touched_processors or []
        statuses = [int(processor.get_response_status_code()) for processor in processors]
        return CallOutcome(replies=replies, statuses=statuses, seconds=outcome.seconds)

    def call_each(self, samples: Sequence[Sample]) -> list[CallOutcome]:
        """Run the samples as a worker does: as one batch, and one by one if the batch fails.

        The list has one element if the worker would not survive the batch.
        """
        together = self.call(samples)
        if together.error is not None:
            return [together] if together.ends_worker else [self.call([sample]) for sample in samples]
        statuses = together.statuses or [200] * len(samples)
        return [CallOutcome(replies=[r], statuses=[s]) for r, s in zip(together.replies, statuses, strict=True)]


def guarded_call(work: Callable[[], Any], limit_s: float) -> tuple[Any, CallOutcome]:
    """Run the author's code; return its result and an outcome that holds its exception or its duration."""
    began = time.perf_counter()
    try:
        with guarded(limit_s):
            result = work()
    except KeyboardInterrupt as error:
        print(explain_interrupt(error), file=sys.stderr)
        raise
    except BaseException as error:
        return None, CallOutcome(error=error, seconds=time.perf_counter() - began)
    return result, CallOutcome(seconds=time.perf_counter() - began)


@contextmanager
def guarded(limit_s: float) -> Iterator[None]:
    """Raise CallTimeout after `limit_s`, and ProcessExit instead of `os._exit`.

    Native code that cannot be interrupted exits this process after `GRACE_S` more, with a traceback.
    """

    def on_alarm(number: int, frame: FrameType | None) -> NoReturn:
        raise CallTimeout(f"no answer within {limit_s:g} s")

    def raise_exit(status: int) -> NoReturn:
        raise ProcessExit(f"os._exit({status})")

    real_exit, old_handler = os._exit, signal.signal(signal.SIGALRM, on_alarm)
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    old_timer = signal.setitimer(signal.ITIMER_REAL, limit_s)
    os._exit = raise_exit
    try:
        with redirect_stdout(sys.stderr):  # stdout is for verdicts only
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old_timer)
        signal.signal(signal.SIGALRM, old_handler)
        faulthandler.cancel_dump_traceback_later()
        os._exit = real_exit


@dataclass(frozen=True, slots=True)
class Sample:
    """A request body and its content type; verdicts show the name."""

    name: str
    content_type: str
    body: bytes

    def to_request(self, number: int = 0) -> Request:
        return Request(number, f"check-{number}", [("content-type", self.content_type)], self.body)


def malformed_samples(good: Sample) -> Iterator[Sample]:
    """Requests that a handler should reject or survive, each wrong in one way."""
    noise = random.Random(0).randbytes(1000)
    other_type = BINARY if good.content_type == JSON else JSON
    yield Sample("empty body", good.content_type, b"")
    yield Sample("random bytes", BINARY, noise)
    yield Sample(f"random bytes as {good.content_type}", good.content_type, noise)
    yield Sample("JSON null", JSON, b"null")
    yield Sample("JSON []", JSON, b"[]")
    yield Sample("JSON {}", JSON, b"{}")
    yield Sample("JSON NaN", JSON, b"NaN")
    yield Sample("deeply nested JSON", JSON, b'{"a":' * NESTED_LEVELS + b"1" + b"}" * NESTED_LEVELS)
    yield Sample("huge string", JSON, b'"' + b"x" * HUGE_BYTES + b'"')
    yield Sample(f"a good body as {other_type}", other_type, good.body)
    if len(good.body) > 1:
        yield Sample("truncated sample", good.content_type, good.body[: len(good.body) // 2])
