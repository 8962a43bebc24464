"""Dispatcher and Worker: the interfaces between a model, its queue and its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Protocol

from flambeau.serving.job import Job

NO_TICKET = "No idle worker can take the request now (useJobTicket)."


class Worker(Protocol):
    """The part of a worker that dispatchers need."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_retiring(self) -> bool: ...

    @property
    def is_idle(self) -> bool:
        """Whether it could start a job now."""

    @property
    def is_concurrent(self) -> bool:
        """Whether it runs several batches at a time."""

    @property
    def places(self) -> int:
        """Jobs it takes at a time, one by one; 0: as the model's settings say."""

    @property
    def depth(self) -> int:
        """Batches it works on at a time, in order."""

    @property
    def batches(self) -> Sized: ...

    @property
    def num_batches(self) -> int: ...

    @property
    def tenants(self) -> Mapping[str, int]:
        """The number of its jobs by tenant."""

    @property
    def has_suspect(self) -> bool:
        """Whether the job sent last was in a worker that crashed."""

    @property
    def service_s(self) -> float | None:
        """How long a batch takes, smoothed; None before the first."""

    @property
    def local_pid(self) -> int: ...

    def send(self, jobs: Sequence[Job], held_since: float = 0.0) -> None:
        """Send these jobs as one batch; it may have waited for more jobs since a point in time."""

    def take_back(self) -> list[Job]:
        """Take away the jobs that it has not begun."""

    def seconds_without_progress(self) -> float:
        """How long its current batch has made no progress; 0 when it is idle."""


class Dispatcher(Protocol):
    """Moves jobs from a model's queue to its workers."""

    def add(self, job: Job) -> str:
        """Queue a job; return why it is rejected, or an empty text."""

    def end_sequence(self, id: str) -> None:
        """End a sequence; without effect if there is none of this name."""

    def feed(self) -> None:
        """Send as many batches as the workers can take now."""

    def tick(self) -> None:
        """Apply time limits; the watchdog calls this several times a second."""

    def on_worker_exit(self) -> None:
        """A worker has exited and its unfinished jobs are back in the queue."""

    def close(self) -> None:
        """Cancel timers."""


class Timer:
    """Calls a function once after a delay; while it runs, `start` has no effect."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self, delay_s: float) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _on_time(self) -> None:
        self._handle = None
        self._callback()
