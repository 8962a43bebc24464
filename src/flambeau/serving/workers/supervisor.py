"""Supervisor: keeps the wanted number of a model's workers alive."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flambeau.errors import WorkersFailed
from flambeau.serving.workers.recovery import Death, backoff_s, is_hopeless
from flambeau.serving.workers.remote_worker import RemoteWorker

logger = logging.getLogger(__name__)

# Word for word what TorchServe's log has, since scripts wait for it.
SLOW_START = "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did not respond in given time"
POLL_S = 0.1
STEADY_S = 30.0  # a worker that was ready this long, or answered anything, ends a series of failures


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one worker; it outlives the processes that fill it."""

    id: int
    devices: tuple[int, ...] = ()
    name: str = ""  # in logs
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # loaded once, or failed once
    worker: RemoteWorker | None = None
    task: asyncio.Task[None] | None = None
    failures: int = 0  # in a row
    waited_s: float = 0.0  # between those
    state: str = "null"  # in TorchServe's words, which people look for in logs
    restarts: int = 0
    last_death: Death | None = None
    is_retired: bool = False
    has_given_up: bool = False
    is_recovering: bool = False  # from a failure, until a worker has loaded
    started_at: float = field(default_factory=time.time)

    @property
    def device(self) -> int | None:
        """Its first device; None: the CPU."""
        return self.devices[0] if self.devices else None

    @property
    def is_ready(self) -> bool:
        """Whether a worker in it has the model loaded."""
        return self.worker is not None and self.worker.is_ready

    @property
    def is_failing(self) -> bool:
        """Whether its last worker never got to answer anything, and no new one is loaded yet."""
        return not self.is_ready and self.failures > 0

    @property
    def has_failed_for_good(self) -> bool:
        """Whether it was given up because another try would have ended the same."""
        return self.has_given_up and self.last_death is not None and self.last_death.is_final

    def change(self, state: str) -> None:
        """Take another state, and say so."""
        if state != self.state:
            logger.info("%s State change %s -> %s", self.name, self.state, state, extra={"worker": self.name})
            self.state = state


class Supervisor:
    """Starts, watches, restarts and retires the workers of one model; nobody else does."""

    def __init__(
        self,
        *,
        name: str,
        new_worker: Callable[[Slot], RemoteWorker],
        new_slot: Callable[[], Slot],
        workers: list[RemoteWorker],
        startup_timeout_s: float,
        max_retry_s: float,
        drain_timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self.slots: list[Slot] = []
        self.num_restarts = 0  # of all slots, also of those that are gone
        self.load_s: float | None = None  # how long the last worker took to load
        self.name = name
        self._new_worker = new_worker
        self._new_slot = new_slot
        self._workers = workers  # shared with the dispatcher
        self._startup_timeout_s = startup_timeout_s
        self._max_retry_s = max_retry_s
        self._drain_timeout_s = drain_timeout_s
        self._on_change = on_change
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_present(self) -> int:
        """Workers that are there, starting, or to be tried again."""
        return sum(not slot.has_given_up for slot in self.slots)

    @property
    def num_ready(self) -> int:
        """Workers that have the model loaded."""
        return sum(slot.is_ready for slot in self.slots)

    @property
    def has_hope(self) -> bool:
        """Whether a worker is there, starting, or to be tried again."""
        return any(not slot.has_given_up for slot in self.slots)

    @property
    def has_ready(self) -> bool:
        """Whether a worker has the model loaded."""
        for slot in self.slots:  # a plain loop: every request asks
            worker = slot.worker
            if worker is not None and worker.is_ready:
                return True
        return False

    @property
    def cannot_load(self) -> bool:
        """Whether no worker is there because the model could not be loaded, though it is tried again."""
        return bool(self.slots) and all(
            slot.is_failing and slot.last_death and slot.last_death.while_loading for slot in self.slots
        )

    @property
    def has_failed_for_good(self) -> bool:
        """Whether a worker could not load the model for a reason that another try would find again."""
        return any(slot.has_failed_for_good for slot in self.slots)

    @property
    def last_death(self) -> Death | None:
        """How the last worker to fail ended."""
        deaths = [slot.last_death for slot in self.slots if slot.last_death and slot.is_failing]
        return deaths[-1] if deaths else None

    def scale(self, minimum: int, maximum: int) -> list[Slot]:
        """Start workers up to `minimum`, retire those beyond `maximum`; return the slots that are new."""
        self.drop_given_up()
        fresh = []
        while len(self.slots) < minimum:  # one by one: each is placed in view of those before it
            slot = self._new_slot()
            self.slots.append(slot)
            slot.task = self._own(self._keep_alive(slot))
            fresh.append(slot)
        for slot in self.slots[maximum:]:
            self._own(self._retire(slot))
        del self.slots[maximum:]
        return fresh

    def drop_given_up(self) -> None:
        """Forget the places whose workers could not be started."""
        self.slots[:] = [slot for slot in self.slots if not slot.has_given_up]

    async def wait_started(self, slots: list[Slot]) -> None:
        """Wait until each of these has loaded; raise with the cause when one has failed."""
        for slot in slots:
            await slot.settled.wait()
            if slot.failures and slot.last_death is not None:
                raise self._failure(slot.last_death)

    async def wait_decided(self) -> None:
        """Wait until a worker has the model, however many tries it takes; raise with the cause if all are given up."""
        while self.has_hope and not self.has_ready:
            await asyncio.sleep(POLL_S)
        if not self.has_ready and (death := self.last_death) is not None:
            raise self._failure(death)

    def _failure(self, death: Death) -> WorkersFailed:
        return WorkersFailed(
            f"Failed to start workers for {self.name}",
            cause=death.cause,
            out_of_memory=death.out_of_memory,
            is_final=death.is_final,
        )

    async def close(self, *, now: bool = False) -> None:
        """Retire every worker, or kill them; then wait until all are gone."""
        for slot in self.slots:
            self._own(self._retire(slot, timeout_s=0.0 if now else self._drain_timeout_s))
        self.slots.clear()
        if now:  # also those that are being retired at their leisure
            for worker in self._workers:
                worker.kill(Death(reason="its time to stop was over", spares_jobs=True))
        while self._tasks:
            await asyncio.wait([*self._tasks])

    def _own(self, work: asyncio._CoroutineLike[None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: a worker is no longer looked after", self.name, exc_info=error)

    # ---- the life of one slot ----

    async def _keep_alive(self, slot: Slot) -> None:
        """Start a worker, let it live, learn from its death; again, until retired or hopeless."""
        while not slot.is_retired:
            death, was_ready, was_useful = await self._one_life(slot)
            if slot.is_retired:
                break
            if self.load_s is not None:  # it was loaded before: its files may just be exchanged
                death = replace(death, is_final=False)
            self._tell_end(slot, death)
            self.num_restarts += 1
            self._take_note(slot, death, was_ready=was_ready, was_useful=was_useful)
            slot.settled.set()
            if death.is_final or (not was_ready and is_hopeless(slot.failures, slot.waited_s, self._max_retry_s)):
                self._give_up(slot, death)
                return
            delay = backoff_s(slot.failures)
            if not death.is_told:
                logger.warning("worker %d of %s: %s", slot.id, self.name, death.cause)
            logger.info("Retry worker: %d in %g seconds.", slot.id, delay, extra={"worker": slot.name})
            self._on_change()
            await asyncio.sleep(delay)
            slot.waited_s += delay

    async def _one_life(self, slot: Slot) -> tuple[Death, bool, bool]:
        """Run one worker; tell how it ended, whether it was ever ready, and whether it was of any use."""
        try:
            worker = slot.worker = self._new_worker(slot)
        except Exception as error:  # whatever it is, the slot lives on: no port may be left for its processes, say
            logger.exception("worker %d of %s could not be made", slot.id, self.name)
            return Death(reason=f"it could not be started: {error}", while_loading=True), False, False
        slot.started_at = worker.started_at
        slot.change("WORKER_STARTED")
        self._workers.append(worker)
        timer = asyncio.get_running_loop().call_later(self._startup_timeout_s, self._on_slow_start, worker)
        worker.ready.add_done_callback(lambda ready: self._on_ready(slot, timer, ready))
        try:
            death = await worker.run()
        finally:
            timer.cancel()
            self._workers.remove(worker)
            slot.worker = None
        ready_s = 0.0 if worker.ready_at is None else time.monotonic() - worker.ready_at
        return death, worker.ready_at is not None, worker.has_answered or ready_s > STEADY_S

    def _on_slow_start(self, worker: RemoteWorker) -> None:
        if not worker.is_ready:
            logger.error("Backend worker error\n%s", SLOW_START)
            reason = f"the model was not loaded within startupTimeout, {self._startup_timeout_s:g} s"
            worker.kill(Death(reason=reason, while_loading=True))

    def _on_ready(self, slot: Slot, timer: asyncio.TimerHandle, ready: asyncio.Future[None]) -> None:
        timer.cancel()
        if not ready.cancelled():
            self.load_s = time.time() - slot.started_at
            slot.change("WORKER_MODEL_LOADED")
            if slot.is_recovering:
                slot.is_recovering = False
                logger.info("Auto recovery succeeded, reset recoveryStartTS", extra={"worker": slot.name})
            slot.settled.set()
            self._on_change()

    @staticmethod
    def _tell_end(slot: Slot, death: Death) -> None:
        """Say that a worker has ended, and whether it is to be replaced, in the words that scripts look for."""
        worker = {"worker": slot.name}
        logger.info("%d Worker disconnected. %s", slot.id, slot.state, extra=worker)
        if death.while_loading:
            if not death.is_final:  # of which the cause is told with these words
                logger.error("Backend worker error", extra=worker)
            slot.change("WORKER_ERROR")
        slot.change("WORKER_STOPPED")
        if death.is_final:
            return
        if slot.is_recovering:
            logger.info("Auto recovery failed again", extra=worker)
        else:
            slot.is_recovering = True
            logger.info("Auto recovery start timestamp: %d", time.time() * 1000, extra=worker)

    def _give_up(self, slot: Slot, death: Death) -> None:
        """Leave the slot empty, until the model is scaled or registered anew."""
        is_known = any(other.has_failed_for_good and other.last_death == death for other in self.slots)
        slot.has_given_up = True
        if not death.is_final:
            logger.error("worker %d of %s: giving up: %s", slot.id, self.name, death.cause)
        elif not is_known:  # once, however many workers fail alike
            text = "Backend worker error: worker %d of %s is not tried again: %s"
            logger.error(text, slot.id, self.name, death.reason, extra={"worker": slot.name})
        self._on_change()

    @staticmethod
    def _take_note(slot: Slot, death: Death, *, was_ready: bool, was_useful: bool) -> None:
        slot.last_death = death
        slot.restarts += 1
        if was_ready:  # it could be loaded, so it can be again
            slot.waited_s = 0.0
        if was_useful:
            slot.failures = 0
        slot.failures += 1

    async def _retire(self, slot: Slot, timeout_s: float | None = None) -> None:
        slot.is_retired = True
        if not slot.has_given_up:
            slot.change("WORKER_SCALED_DOWN")
        slot.settled.set()
        if slot.worker is not None and not slot.worker.ended.done():
            await slot.worker.retire(self._drain_timeout_s if timeout_s is None else timeout_s)
        elif slot.task is not None:  # between two lives
            slot.task.cancel()
        if slot.task is not None:
            await asyncio.wait([slot.task])
