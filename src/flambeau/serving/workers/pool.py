"""WorkerPool: the workers of one model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from flambeau.config.model import ModelConfig
from flambeau.errors import WorkersFailed
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.scaling_policy import ScalingLimits
from flambeau.serving.workers.supervisor import PastExit, Slot, Supervisor

logger = logging.getLogger(__name__)

POLL_S = 0.1
RENEWAL_DRAIN_S = 3600.0  # for the jobs of a worker that is renewed; a stream may take long, and nothing is urgent


class WorkerPool:
    """Starts, counts and stops the workers of one model; its supervisor restarts them.

    `slots` has one entry for each wanted worker. `workers` are the running ones, including those that are stopping;
    others may read both lists, only the pool changes them.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        new_worker: Callable[[Slot], RemoteWorker],
        new_slot: Callable[[], Slot],
        on_change: Callable[[], None],
        events: ServerEvents,
        drain_timeout_s: float,
    ) -> None:
        self.name = name
        self.min_workers = config.min_workers
        self.max_workers = max(config.max_workers, int(config.scales_to_zero))
        self.slots: list[Slot] = []
        self.workers: list[RemoteWorker] = []
        self._config = config
        self._new_slot = new_slot
        self._tell_change = on_change
        self._has_changed = asyncio.Event()  # set for a moment, for those who wait
        self._events = events
        self._drain_timeout_s = drain_timeout_s
        self.is_closed = False
        self.is_renewing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor = Supervisor(
            new_worker=new_worker,
            on_started=self.workers.append,
            on_exited=self.workers.remove,
            on_change=self._on_change,
            events=events,
            startup_timeout_s=config.startup_timeout_s,
            max_retry_s=config.max_retry_s,
        )

    # ---- state ----

    @property
    def num_present(self) -> int:
        """Workers that run, load or wait for a restart."""
        return sum(not slot.is_abandoned for slot in self.slots)

    @property
    def num_ready(self) -> int:
        return sum(slot.is_ready for slot in self.slots)

    @property
    def num_wanted(self) -> int:
        return 0 if self.is_sleeping else max(self.min_workers, self.num_present)

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def recent_exits(self) -> Iterable[PastExit]:
        """The last unexpected exits of workers, the oldest first."""
        return self._supervisor.recent_exits

    @property
    def load_s(self) -> float | None:
        """How long the last worker took to load; None if none has loaded yet."""
        return self._supervisor.load_s

    @property
    def has_loaded(self) -> bool:
        """Whether any worker has loaded the model, now or before."""
        return self.load_s is not None

    @property
    def has_ready(self) -> bool:
        for slot in self.slots:  # a plain loop: every request asks
            worker = slot.worker
            if worker is not None and worker.is_ready:
                return True
        return False

    @property
    def may_recover(self) -> bool:
        """Whether a worker runs, loads or waits for a restart."""
        return any(not slot.is_abandoned for slot in self.slots)

    @property
    def is_failing_to_load(self) -> bool:
        """Whether every worker failed to load the model and another attempt follows."""
        return bool(self.slots) and all(
            slot.is_failing and slot.last_exit and slot.last_exit.while_loading for slot in self.slots
        )

    @property
    def has_failed_for_good(self) -> bool:
        """Whether the model cannot be loaded and another attempt would fail too."""
        return any(slot.has_failed_for_good for slot in self.slots)

    @property
    def needs_install(self) -> bool:
        """Whether the model cannot be loaded until a package is installed."""
        return any(slot.has_failed_for_good and slot.last_exit and slot.last_exit.needs_install for slot in self.slots)

    @property
    def last_exit(self) -> WorkerExit | None:
        """The exit of the last worker that failed and was not replaced."""
        exits = [slot.last_exit for slot in self.slots if slot.last_exit and slot.is_failing]
        return exits[-1] if exits else None

    @property
    def limits(self) -> ScalingLimits:
        """The bounds within which the model scales by itself."""
        config = self._config
        if config.sequence_batching or self.is_closed:  # a session needs the worker that holds its state
            return ScalingLimits(minimum=self.min_workers, maximum=self.min_workers)
        return ScalingLimits(
            minimum=self.min_workers,
            maximum=self.max_workers,
            target_queue_s=config.target_queue_s,
            idle_s=config.idle_s,
            scales_to_zero=config.scales_to_zero,
        )

    @property
    def is_sleeping(self) -> bool:
        """Whether it has no worker now and starts one when a job arrives."""
        return not self.slots and self.limits.allow_sleep

    @property
    def can_answer(self) -> bool:
        """Whether a worker is ready, or is started on demand."""
        return self.has_ready or self.is_sleeping

    @property
    def is_healthy(self) -> bool:
        """Whether enough workers run, load or wait for a restart."""
        if self.limits.allow_sleep:
            return self.is_sleeping or self.may_recover
        return self.num_present >= self.min_workers

    @property
    def is_ready(self) -> bool:
        """Whether enough workers have the model loaded. A model that sleeps after it was loaded counts as ready."""
        if self.limits.allow_sleep and self.load_s is not None:
            return self.is_sleeping or (self.may_recover and not self.is_failing_to_load)
        return self.num_ready >= self.min_workers > 0

    @property
    def state(self) -> str:
        if self.is_sleeping:
            return "sleeping"
        if self.has_ready:
            return "ready"
        return "loading" if self.may_recover else "failed" if self.slots else "without workers"

    def drain_time_s(self, num_batches: float) -> float:
        """How long the workers would take for so many batches at their present speed."""
        times = [worker.service_s / max(1, worker.places) for worker in self.workers if worker.service_s]
        return num_batches * sum(times) / len(times) ** 2 if times else 1.0

    # ---- scaling ----

    def set_bounds(self, minimum: int, maximum: int) -> list[Slot]:
        """Change the bounds of the number of workers and scale to them; return the new slots."""
        self.min_workers, self.max_workers = minimum, maximum
        return self.scale(minimum, maximum)

    def scale(self, minimum: int, maximum: int) -> list[Slot]:
        """Start workers up to `minimum`, retire those beyond `maximum`; return the new slots."""
        self.drop_abandoned()
        fresh = []
        while len(self.slots) < minimum:  # one by one: each is placed in view of those before it
            fresh.append(self._start_slot())
        for slot in surplus(self.slots, maximum):
            self._own(self._supervisor.retire(slot, self._drain_timeout_s))
            self.slots.remove(slot)
        self._wake_waiting()
        return fresh

    def _start_slot(self) -> Slot:
        slot = self._new_slot()
        self.slots.append(slot)
        slot.task = self._own(self._run(slot))
        return slot

    def renew(self, slot: Slot, reason: str, *, overlaps: bool, on_failure: Callable[[Slot], None]) -> None:
        """Replace a ready worker; with `overlaps` when another one has loaded, else its jobs wait for that."""
        logger.info("%s is replaced: %s", slot.ref, reason)
        self.is_renewing = True
        self._own(self._renew(slot, overlaps=overlaps, on_failure=on_failure))

    async def _renew(self, slot: Slot, *, overlaps: bool, on_failure: Callable[[Slot], None]) -> None:
        try:
            fresh = self._start_slot() if overlaps else None
            while fresh is not None and fresh in self.slots and not (fresh.is_ready or fresh.failed_loads):
                await self._has_changed.wait()  # a call that scales the model down may take it away
            if fresh is not None and not fresh.is_ready:
                if fresh in self.slots:
                    self.slots.remove(fresh)
                    self._own(self._supervisor.retire(fresh, self._drain_timeout_s))
                on_failure(slot)
                return
            if slot in self.slots:
                await self._supervisor.retire(slot, RENEWAL_DRAIN_S)
            if self.is_closed:
                return
            if fresh is None and slot in self.slots:
                self._start_slot()  # before the other leaves: without any, the model would take no jobs
            if slot in self.slots:
                self.slots.remove(slot)
            if self.slots:
                self.scale(self.min_workers, max(self.max_workers, self.min_workers))
        finally:
            self.is_renewing = False

    def drop_abandoned(self) -> None:
        """Remove the slots whose workers could not be started, so that new ones are tried."""
        self.slots[:] = [slot for slot in self.slots if not slot.is_abandoned]

    async def wait_started(self, number: int) -> None:
        """Wait until that many workers, or all if there are fewer, are ready; raise if one fails to load meanwhile."""
        before = {slot: slot.failed_loads for slot in self.slots}
        while sum(slot.is_alive for slot in self.slots) < min(number, len(self.slots)):
            for slot in self.slots:
                has_failed = slot.is_abandoned or slot.failed_loads > before.get(slot, 0)
                if has_failed and not slot.is_ready and slot.last_exit is not None:
                    raise self._failure(slot.last_exit)
            await self._has_changed.wait()

    async def wait_decided(self) -> None:
        """Wait until a worker has loaded, after any number of attempts; raise with the cause if all are abandoned."""
        while self.may_recover and not self.has_ready:
            await asyncio.sleep(POLL_S)
        if not self.has_ready and (last_exit := self.last_exit) is not None:
            raise self._failure(last_exit)

    def _failure(self, worker_exit: WorkerExit) -> WorkersFailed:
        return WorkersFailed(
            f"Failed to start workers for {self.name}",
            cause=worker_exit.cause,
            out_of_memory=worker_exit.out_of_memory,
            is_final=worker_exit.is_final,
        )

    async def close(self, *, now: bool = False) -> None:
        """Retire every worker, or kill them; return when all are gone. Nobody waits for one that computes copies."""
        self.is_closed = True
        for slot in self.slots:
            has_copies = slot.worker is not None and slot.worker.num_batches > 0 and not slot.worker.num_owed
            self._own(self._supervisor.retire(slot, 0.0 if now or has_copies else self._drain_timeout_s))
        self.slots.clear()
        self._wake_waiting()
        if now:  # also those that are retiring already
            for worker in self.workers:
                worker.kill(WorkerExit(reason="it did not stop in time", spares_jobs=True))
        while self._tasks:
            await asyncio.wait([*self._tasks])

    # ---- the life of a slot ----

    def _on_change(self) -> None:
        self._wake_waiting()
        self._tell_change()

    def _wake_waiting(self) -> None:
        self._has_changed.set()
        self._has_changed.clear()

    async def _run(self, slot: Slot) -> None:
        last_exit = await self._supervisor.keep_alive(slot)
        if last_exit is not None:
            self._abandon(slot, last_exit)

    def _abandon(self, slot: Slot, last_exit: WorkerExit) -> None:
        """Leave a slot empty until the model is scaled or registered again."""
        is_repeated = any(other.has_failed_for_good and other.last_exit == last_exit for other in self.slots)
        slot.is_abandoned = True
        self._events.worker_abandoned(slot.ref, last_exit, is_repeated=is_repeated)
        self._on_change()

    def _own(self, work: asyncio._CoroutineLike[None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: the supervision of a worker failed", self.name, exc_info=error)


def surplus(slots: Sequence[Slot], number: int) -> list[Slot]:
    """The slots to retire so that `number` are left: those without a ready worker first, the newest of them first.

    Of those on other machines, the ones go first whose machine has the fewest workers, so that machines fall idle.
    """
    left, retired = [*slots], list[Slot]()
    load = {slot.placement.node: slot.placement.num_neighbors for slot in slots if slot.placement is not None}
    while len(left) > number:
        # min takes the first of equals, so the newest goes before the oldest.
        slot = min(reversed(left), key=lambda slot: (slot.is_alive, slot.worker is not None, _neighbors(slot, load)))
        left.remove(slot)
        retired.append(slot)
        if slot.placement is not None:
            load[slot.placement.node] -= 1
    return retired[::-1]


def _neighbors(slot: Slot, load: Mapping[str, int]) -> int:
    return load[slot.placement.node] if slot.placement is not None else 0
