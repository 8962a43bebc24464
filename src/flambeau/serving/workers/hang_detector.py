"""HangDetector: replaces the workers of a model that hang, with their stacks, and names those that are slow."""

from __future__ import annotations

import sys
import time

from flambeau.config.model import ModelConfig
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents
from flambeau.serving.workers.health import (
    StepTimes,
    WorkerWatch,
    hang_in_words,
    needs_proof,
    slow_after_s,
    slowness_in_words,
)
from flambeau.serving.workers.pool import WorkerPool
from flambeau.serving.workers.process_state import ProcessState
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.wire.stack_dumps import is_same_place, main_stack

LOOKS = 10  # at a worker, until it counts as hung
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 2.0
CONFIRMATIONS = 5  # dumps of an endless loop, which must show the same place
CONFIRMATION_S = 0.2
SLOW_LOG_S = 60.0  # between two lines about a slow worker


class HangDetector:
    """Looks at the processes of workers that make no progress. It needs no help from them, and no reply."""

    def __init__(self, pool: WorkerPool, config: ModelConfig, times: StepTimes, events: ServerEvents) -> None:
        self.interval_s = min(max(config.hang_s / LOOKS, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self._pool = pool
        self._hang_s = config.hang_s
        self._times = times
        self._events = events
        self._watches: dict[RemoteWorker, WorkerWatch] = {}
        self._logged_at: dict[str, float] = {}  # worker → when it was called slow

    @staticmethod
    def is_supported() -> bool:
        return sys.platform == "linux"

    async def check(self) -> None:
        workers = [*self._pool.workers]
        for worker in workers:
            await self._check(worker)
        for worker in self._watches.keys() - set(workers):
            del self._watches[worker]

    async def _check(self, worker: RemoteWorker) -> None:
        silent_s = worker.seconds_silent()
        watch = self._watches.get(worker)
        processes = worker.processes
        has_stopped = any(process.is_stopped for process in processes)
        if silent_s < self.interval_s and not has_stopped:  # the usual case: idle, or quick
            if watch is not None:
                watch.clear()
            worker.health = ""
            return
        if watch is None:
            watch = self._watches[worker] = WorkerWatch()
        if has_stopped:
            watch.see(ProcessState(activity="stopped"), time.monotonic())
        elif len(processes) == 1:
            watch.see(await processes[0].look(), time.monotonic())
        else:  # ranks wait for each other in ways of their own
            watch.clear()
        await self._judge(worker, watch)

    async def _judge(self, worker: RemoteWorker, watch: WorkerWatch) -> None:
        silent_s, now = worker.seconds_silent(), time.monotonic()
        if watch.has_lasted(silent_s, now, self._times, self._hang_s):
            await self._replace(worker, watch, watch.held_s(silent_s, now))
        elif silent_s > slow_after_s(self._times, self._hang_s):
            activity = None if watch.before is None else watch.before.activity
            worker.health = slowness_in_words(silent_s, activity, self._times)
            if now - self._logged_at.get(worker.spec.name, -SLOW_LOG_S) >= SLOW_LOG_S:
                self._logged_at[worker.spec.name] = now
                self._events.worker_slow(worker.spec.ref, worker.health)
        else:
            worker.health = ""

    async def _replace(self, worker: RemoteWorker, watch: WorkerWatch, held_s: float) -> None:
        hang, silent_s = watch.hang, worker.seconds_silent()
        assert hang is not None
        stacks, place = "", ""
        if hang != "stopped":
            [process] = worker.processes
            dumps = [await process.take_stacks()]
            if hang == "computing" and not dumps[0].is_endless:
                if needs_proof(hang, self._times):
                    watch.clear()  # it may just be slow
                    return
                if not watch.is_unproven:  # it may be slow this time
                    watch.is_unproven = True
                    return
            if hang == "computing":
                dumps += [await process.take_stacks(CONFIRMATION_S) for _ in range(CONFIRMATIONS - 1)]
            frames, *later = [main_stack(dump.text) for dump in dumps]
            if hang == "computing" and not all(is_same_place(frames, others) for others in later):
                watch.clear()  # it is somewhere else each time, so it gets on
                return
            place, stacks = str(frames[0]) if frames else "", dumps[-1].text
            if worker.seconds_silent() < silent_s:  # it has just answered
                watch.clear()
                return
        states = [(process.pid, await process.look()) for process in worker.processes]
        kernel = "\n\n".join(f"process {pid}:\n{state}" for pid, state in states)
        words = worker.health = hang_in_words(hang, held_s, place, self._times)
        if worker.ended.done():
            return
        self._events.worker_hung(worker.spec.ref, words)
        stacks = f"{stacks}\n{kernel}\n" if stacks else f"{kernel}\n"
        worker.kill(WorkerExit(reason=words, is_hung=True, spares_jobs=hang == "stopped", stacks=stacks))
