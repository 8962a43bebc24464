"""Workers without a process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.job import Job

CRASH = WorkerExit(reason="exited with code 1", exit_code=1)


class FakeWorker:
    """Loads on `load`, exits only on `kill`, and answers nothing; `sent` has the batches it got."""

    all: ClassVar[list[FakeWorker]] = []

    def __init__(self, spec: Any = None, *, on_free: Callable[[], None] = lambda: None, **_: Any) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[WorkerExit] = loop.create_future()
        self.started_at = time.time()
        self.ready_at: float | None = None
        self.load_s = self.service_s = None
        self.has_answered = self.is_ready = self.is_retiring = self.is_concurrent = self.has_suspect = False
        self.has_exited = False
        self.depth = 1
        self.example = self.health = ""
        self.num_answered = self.num_batches = self.num_owed = self.places = self.max_length = self.loaded_bytes = 0
        self.abilities: list[str] = []
        self.adapters: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.batches: deque[Any] = deque()
        self.pid, self.pids, self.local_pid = -1, [], -1
        self.local_pids: list[int] = []
        self.resident_bytes, self.resident_by_rank = 0, [0]
        self.node = self.waiting = ""
        self.sent: list[list[Job]] = []
        self._on_free = on_free
        FakeWorker.all.append(self)

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.is_retiring and not self.batches

    def seconds_loading(self) -> float:
        return 3600.0

    async def run(self) -> WorkerExit:
        worker_exit = await self.ended
        self.is_ready = False
        if not self.ready.done():
            self.ready.cancel()
        return worker_exit

    def load(self) -> None:
        self.is_ready, self.ready_at = True, time.monotonic()
        self.ready.set_result(None)
        self._on_free()

    def send(self, jobs: list[Job], held_since: float = 0.0) -> None:
        self.sent.append([*jobs])

    def kill(self, cause: WorkerExit) -> None:
        if not self.ended.done():
            self.ended.set_result(cause)

    kill_with_stacks = kill

    async def retire(self, timeout_s: float) -> None:
        self.is_retiring = True
        await asyncio.wait([self.ended], timeout=timeout_s)
        self.kill(WorkerExit(reason="it did not stop", spares_jobs=True))

    def take_back(self) -> list[Job]:
        return []

    def seconds_without_progress(self) -> float:
        return 0.0


class ScriptedWorker(FakeWorker):
    """Loads at once, or exits at once with the given cause."""

    def __init__(self, failure: WorkerExit | None = None) -> None:
        super().__init__()
        self._failure = failure

    def seconds_loading(self) -> float:
        return 3600.0

    async def run(self) -> WorkerExit:
        if self._failure is not None:
            self.kill(self._failure)
        else:
            self.load()
        return await super().run()

    async def retire(self, timeout_s: float) -> None:
        self.is_retiring = True
        self.kill(WorkerExit(reason="retired"))


async def until(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    """Wait until something holds, which other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
