"""A handler called so that it can neither hang nor end this process, and what came of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from flambeau.checking.samples import Sample
from flambeau.worker.failures import to_failed
from flambeau.worker.local_worker import LocalWorker
from flambeau.worker.results import BadResult

GRACE_S = 5.0  # how much longer native code may take, before the process is given up
MAX_SHOWN = 160
NOT_THE_AUTHORS = (
    os.path.dirname(os.path.dirname(__file__)),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",  # frozen modules
)


class TooSlow(BaseException):
    """A call had its time; no handler catches this by accident."""


class Ended(BaseException):
    """A handler called `os._exit`, which would have ended its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one call: replies and their statuses, or what was raised."""

    replies: Sequence[bytes] = ()
    statuses: Sequence[int] = ()
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def is_deadly(self) -> bool:
        """Whether the worker would be gone: killed for its silence, or ended by the handler."""
        return self.error is not None and not isinstance(self.error, Exception)

    @property
    def status(self) -> int:
        """The worst status a client would see."""
        if self.error is not None:
            return to_failed([], self.error).status
        return max(self.statuses, default=200)

    @property
    def reason(self) -> str:
        """What went wrong and where, in a line."""
        if self.error is None:
            return f"answered with status {self.status}"
        place = place_of(self.error)
        return f"{what_happened(self.error)}{f' ({place})' if place else ''}"


def what_happened(error: BaseException) -> str:
    """An exception in the words of an author who sees it for the first time."""
    match error:
        case TooSlow():
            return f"{error}; a worker is killed for that"
        case SystemExit():
            return f"sys.exit({error.code}) would end the worker"
        case Ended():
            return f"{error} would end the worker"
        case BadResult():
            return f"{error}: handle must return a list with one element per request, each bytes, text or JSON"
    return first_line(error)


class Caller:
    """Calls the handler of a worker in the main thread, for a limited time."""

    def __init__(self, worker: LocalWorker, limit_s: float) -> None:
        self.worker = worker
        self._limit_s = limit_s

    def call(self, samples: Sequence[Sample]) -> Outcome:
        """Run these as one batch."""
        requests = [sample.to_request(i) for i, sample in enumerate(samples)]
        began = time.perf_counter()
        try:
            with guarded(self._limit_s):
                replies = self.worker.handle(requests)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Outcome(error=error, seconds=time.perf_counter() - began)
        processors = self.worker.context.touched_processors or []
        statuses = [int(processor.get_response_status_code()) for processor in processors]
        return Outcome(replies=replies, statuses=statuses, seconds=time.perf_counter() - began)

    def call_each(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Run these as a worker would: together, and one by one when that fails."""
        together = self.call(samples)
        if together.error is not None:
            return [together] if together.is_deadly else [self.call([sample]) for sample in samples]
        statuses = together.statuses or [200] * len(samples)
        return [Outcome(replies=[r], statuses=[s]) for r, s in zip(together.replies, statuses, strict=True)]


def attempt(work: Callable[[], Any], limit_s: float) -> tuple[Any, Outcome]:
    """The result of some other work that runs the author's code, and how it went."""
    began = time.perf_counter()
    try:
        with guarded(limit_s):
            result = work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, Outcome(error=error, seconds=time.perf_counter() - began)
    return result, Outcome(seconds=time.perf_counter() - began)


@contextmanager
def guarded(limit_s: float) -> Iterator[None]:
    """Interrupt what takes too long; native code that cannot be interrupted takes the process along, with a trace."""

    def on_alarm(number: int, frame: FrameType | None) -> NoReturn:
        raise TooSlow(f"no answer within {limit_s:g} s")

    def refuse(status: int) -> NoReturn:
        raise Ended(f"os._exit({status})")

    really_exit, old_handler = os._exit, signal.signal(signal.SIGALRM, on_alarm)
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    old_timer = signal.setitimer(signal.ITIMER_REAL, limit_s)
    os._exit = refuse
    try:
        with redirect_stdout(sys.stderr):  # what a handler prints is no verdict
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old_timer)
        signal.signal(signal.SIGALRM, old_handler)
        faulthandler.cancel_dump_traceback_later()
        os._exit = really_exit


def place_of(error: BaseException) -> str:
    """The line of the author's code that an exception passed last, as `handler.py:12`; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THE_AUTHORS)]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def first_line(error: BaseException) -> str:
    """An exception and its text, in one short line."""
    return one_line(traceback.format_exception_only(error)[-1])


def one_line(text: str) -> str:
    """The beginning of a text."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}…"
