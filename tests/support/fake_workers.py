"""Workers without a process, for a real server."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, ClassVar

from flambeau.serving.workers.recovery import Death


class FakeWorker:
    """Loads on demand, stops only when it is killed, and never answers."""

    all: ClassVar[list[FakeWorker]] = []

    def __init__(self, spec: Any, **_: Any) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Death] = loop.create_future()
        self.started_at, self.ready_at = time.time(), None
        self.load_s = self.service_s = None
        self.has_answered = self.is_ready = self.is_retiring = self.is_concurrent = False
        self.depth = 1
        self.num_batches = self.places = 0
        self.abilities: list[str] = []
        self.batches: deque[Any] = deque()
        self.pid, self.pids = -1, []
        FakeWorker.all.append(self)

    async def run(self) -> Death:
        death = await self.ended
        self.is_ready = False
        if not self.ready.done():
            self.ready.cancel()
        return death

    def load(self) -> None:
        self.is_ready, self.ready_at = True, time.monotonic()
        self.ready.set_result(None)

    def kill(self, fate: Death) -> None:
        if not self.ended.done():
            self.ended.set_result(fate)

    async def retire(self, timeout_s: float) -> None:
        self.is_retiring = True
        await asyncio.wait([self.ended], timeout=timeout_s)
        self.kill(Death(reason="it did not stop", spares_jobs=True))

    def seconds_without_progress(self) -> float:
        return 0.0
