"""Supervisor: keeps a worker running in each slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from flambeau.errors import MissingPackages
from flambeau.serving.crash_recovery import WorkerExit, backoff_s, is_same_failure, should_abandon
from flambeau.serving.events import ServerEvents, WorkerRef
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.worker_life import NodePlacement

logger = logging.getLogger(__name__)

KEPT_EXITS = 20
RAISE_STARTUP = "raise startupTimeout in model-config.yaml, if the model needs longer to load"
STEADY_S = 30.0  # a worker that was ready this long, or answered anything, ends a series of failures


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one worker. It stays when its worker is replaced."""

    ref: WorkerRef
    devices: tuple[int, ...] = ()
    placement: NodePlacement | None = None  # on other machines; it stays as well
    worker: RemoteWorker | None = None
    task: asyncio.Task[None] | None = None
    failures: int = 0  # in a row
    waited_s: float = 0.0  # between those
    restarts: int = 0
    failed_loads: int = 0  # workers that exited before they were ready
    last_exit: WorkerExit | None = None
    bundle: str = ""  # the crash bundle of that exit
    is_retired: bool = False
    is_abandoned: bool = False
    started_at: float = field(default_factory=time.time)

    @property
    def id(self) -> int:
        return self.ref.id

    @property
    def device(self) -> int | None:
        """Its first device; None: the CPU."""
        return self.devices[0] if self.devices else None

    @property
    def is_ready(self) -> bool:
        return self.worker is not None and self.worker.is_ready

    @property
    def is_alive(self) -> bool:
        """Whether it is ready and its process runs at this moment."""
        return self.worker is not None and self.worker.is_ready and not self.worker.has_exited

    @property
    def is_failing(self) -> bool:
        """Whether its last worker exited before it answered anything, and no new one is loaded."""
        return not self.is_ready and self.failures > 0

    @property
    def has_failed_for_good(self) -> bool:
        """Whether it was abandoned because another attempt would fail too."""
        return self.is_abandoned and self.last_exit is not None and self.last_exit.is_final

    def note_exit(self, worker_exit: WorkerExit, *, was_ready: bool, was_useful: bool) -> None:
        self.last_exit = worker_exit
        self.restarts += 1
        if was_ready:  # the model can be loaded, so the slot is not abandoned
            self.waited_s = 0.0
        else:
            self.failed_loads += 1
        if was_useful:
            self.failures = 0
        self.failures += 1


@dataclass(frozen=True, slots=True)
class PastExit:
    """A worker's unexpected exit, with its time."""

    at: float
    worker: WorkerRef
    exit: WorkerExit
    bundle: str = ""


class Supervisor:
    """Starts the worker of a slot, restarts it with a back-off, and stops it."""

    def __init__(
        self,
        *,
        new_worker: Callable[[Slot], RemoteWorker],
        on_started: Callable[[RemoteWorker], None],
        on_exited: Callable[[RemoteWorker], None],
        on_change: Callable[[], None],
        events: ServerEvents,
        startup_timeout_s: float,
        max_retry_s: float,
    ) -> None:
        self.num_restarts = 0  # of all slots, including those that are gone
        self.load_s: float | None = None  # how long the last worker took to load
        self.recent_exits: deque[PastExit] = deque(maxlen=KEPT_EXITS)
        self._last_logged: WorkerExit | None = None
        self._new_worker = new_worker
        self._on_started = on_started
        self._on_exited = on_exited
        self._on_change = on_change
        self._events = events
        self._startup_timeout_s = startup_timeout_s
        self._max_retry_s = max_retry_s

    async def keep_alive(self, slot: Slot) -> WorkerExit | None:
        """Run workers in a slot until it is retired. Returns an exit if no further attempt should follow it."""
        while not slot.is_retired:
            worker_exit, was_ready, was_useful = await self._run_worker(slot)
            if slot.is_retired:
                break
            worker_exit = replace(worker_exit, stacks="")  # the crash bundle has them
            if self.load_s is not None:  # it was loaded before: its files may be replaced right now
                worker_exit = replace(worker_exit, is_final=False)
            self._events.worker_exited(slot.ref, worker_exit)
            self.recent_exits.append(PastExit(time.time(), slot.ref, worker_exit, slot.bundle))
            self.num_restarts += 1
            is_repeated = self._is_repeated(slot, worker_exit)
            slot.note_exit(worker_exit, was_ready=was_ready, was_useful=was_useful)
            is_late = not was_ready and should_abandon(slot.failures, slot.waited_s, self._max_retry_s)
            if worker_exit.is_final or is_late:
                return worker_exit
            delay_s = backoff_s(slot.failures)
            self._events.worker_retried(slot.ref, worker_exit, delay_s, attempt=slot.failures if is_repeated else 0)
            self._on_change()
            await asyncio.sleep(delay_s)
            slot.waited_s += delay_s
        return None

    def _is_repeated(self, slot: Slot, worker_exit: WorkerExit) -> bool:
        """Whether the log has this failure in full: of this slot, or of any since the model was loaded last."""
        before = slot.last_exit if slot.failures else None
        if any(known is not None and is_same_failure(known, worker_exit) for known in (before, self._last_logged)):
            return True
        self._last_logged = worker_exit
        return False

    async def _run_worker(self, slot: Slot) -> tuple[WorkerExit, bool, bool]:
        """Run one worker; return its exit, whether it was ready, and whether it was of any use."""
        try:
            worker = slot.worker = self._new_worker(slot)
        except MissingPackages as error:
            return WorkerExit(reason=str(error), while_loading=True, is_final=True, needs_install=True), False, False
        except Exception as error:  # such as no free port for a group; the slot retries
            logger.exception("%s could not be created", slot.ref)
            return WorkerExit(reason=f"it could not be started: {error}", while_loading=True), False, False
        slot.started_at = worker.started_at
        self._events.worker_starting(slot.ref)
        self._on_started(worker)
        timer = StartupTimer(worker, self._startup_timeout_s, partial(self._on_slow_start, slot, worker))
        worker.ready.add_done_callback(lambda ready: self._on_ready(slot, timer, ready))
        try:
            worker_exit = await worker.run()
        finally:
            timer.cancel()
            self._on_exited(worker)
            slot.worker = None
        ready_s = 0.0 if worker.ready_at is None else time.monotonic() - worker.ready_at
        return worker_exit, worker.ready_at is not None, worker.has_answered or ready_s > STEADY_S

    def _on_slow_start(self, slot: Slot, worker: RemoteWorker) -> None:
        if not worker.is_ready:
            self._events.worker_load_timed_out(slot.ref, self._startup_timeout_s)
            reason = f"the model was not loaded within startupTimeout, {self._startup_timeout_s:g} s"
            worker.kill_with_stacks(WorkerExit(reason=reason, while_loading=True, last_lines=(RAISE_STARTUP,)))

    def _on_ready(self, slot: Slot, timer: StartupTimer, ready: asyncio.Future[None]) -> None:
        timer.cancel()
        if not ready.cancelled():
            measured_s = slot.worker.load_s if slot.worker is not None else None
            self.load_s = time.time() - slot.started_at if measured_s is None else measured_s
            self._last_logged = None
            if not slot.is_retired:
                self._events.worker_loaded(slot.ref, self.load_s)
            self._on_change()

    async def retire(self, slot: Slot, timeout_s: float) -> None:
        """Let a slot's worker finish its jobs, then stop it; kill it after `timeout_s`."""
        slot.is_retired = True
        if not slot.is_abandoned:
            self._events.worker_retired(slot.ref)
        if slot.worker is not None and not slot.worker.ended.done():
            await slot.worker.retire(timeout_s)
        elif slot.task is not None:  # it waits for the next restart
            slot.task.cancel()
        if slot.task is not None:
            await asyncio.wait([slot.task])
        if slot.placement is not None:
            slot.placement.close()


class StartupTimer:
    """Calls `on_late` when a worker has taken too long to load. The time that it waits for a machine does not count."""

    def __init__(self, worker: RemoteWorker, timeout_s: float, on_late: Callable[[], None]) -> None:
        self._worker = worker
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._handle = asyncio.get_running_loop().call_later(timeout_s, self._check)

    def cancel(self) -> None:
        self._handle.cancel()

    def _check(self) -> None:
        left_s = self._timeout_s - self._worker.seconds_loading()
        if left_s > 0.01:
            self._handle = asyncio.get_running_loop().call_later(left_s, self._check)
        else:
            self._on_late()
