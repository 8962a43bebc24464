"""Quarantine: refuses requests that have ended several workers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from flambeau.errors import FlambeauError, JobFailed, RequestQuarantined
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.job import Job, Receiver
from flambeau.serving.response_cache import key_of
from flambeau.wire.messages import Part

QUARANTINE_S = 600.0  # since the last crash
MAX_SUSPECTS = 1000
NO_HEADERS: tuple[str, ...] = ()  # a client may send others with each attempt


@dataclass(slots=True)
class Suspect:
    """A request that was alone in a worker when that ended."""

    num_crashes: int
    at: float
    cause: str


class Quarantine:
    """The suspects of one model. An answer to the same request clears it.

    Requests are compared by a digest of their content, which is made only while there are suspects.
    """

    def __init__(self, model: str, max_crashes: int, now: Callable[[], float] = time.monotonic) -> None:
        self._model, self._max_crashes, self._now = model, max_crashes, now
        self._suspects: OrderedDict[bytes, Suspect] = OrderedDict()

    def check(self, job: Job) -> None:
        """Raise if a job's request has ended too many workers."""
        if not self._suspects or job.is_copy:
            return
        key = key_of(job, NO_HEADERS)
        suspect = self._suspects.get(key)
        if suspect is None:
            return
        if self._now() - suspect.at > QUARANTINE_S:
            del self._suspects[key]
        elif suspect.num_crashes >= self._max_crashes:
            raise RequestQuarantined(self._model, suspect.num_crashes, QUARANTINE_S / 60, cause=suspect.cause)
        else:
            job.receiver = ClearingReceiver(job.receiver, lambda: self._suspects.pop(key, None))

    def blame(self, job: Job, worker_exit: WorkerExit) -> None:
        """Note that a worker ended while it had this job alone."""
        if job.is_copy or worker_exit.is_external or worker_exit.spares_jobs:
            return
        key = key_of(job, NO_HEADERS)
        before = self._suspects.pop(key, None)
        num_before = before.num_crashes if before is not None and self._now() - before.at <= QUARANTINE_S else 0
        self._suspects[key] = Suspect(num_before + 1, self._now(), worker_exit.cause)
        if len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)


class ClearingReceiver:
    """Passes a reply on, and tells that there is one; an error of the handler is one, too."""

    __slots__ = ("_on_answer", "_receiver")

    def __init__(self, receiver: Receiver, on_answer: Callable[[], object]) -> None:
        self._receiver, self._on_answer = receiver, on_answer

    def on_parts(self, parts: list[Part]) -> None:
        self._on_answer()
        self._receiver.on_parts(parts)

    def on_error(self, error: FlambeauError) -> None:
        if isinstance(error, JobFailed):
            self._on_answer()
        self._receiver.on_error(error)
