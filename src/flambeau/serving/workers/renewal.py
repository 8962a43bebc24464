"""RenewalCheck: replaces workers that have answered many requests or have grown, without failing a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flambeau.config.model import ModelConfig
from flambeau.serving.workers.pool import WorkerPool
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.supervisor import Slot

PAUSE_S = 300.0  # after a new worker could not be loaded


class RenewalCheck:
    """Renews one worker of a model at a time.

    Where there is memory for both, the new one loads first. Workers on devices and on other machines end first, as
    nothing tells whether there is room for a second one: requests wait meanwhile.
    """

    def __init__(self, pool: WorkerPool, config: ModelConfig, has_room: Callable[[], bool]) -> None:
        self._pool = pool
        self._after = config.renew_after
        self._above_mb = config.renew_above_mb
        self._has_room = has_room
        self._paused_until = 0.0

    def tick(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._pool.is_renewing or now < self._paused_until:
            return
        for slot in self._pool.slots:
            worker = slot.worker
            if worker is None or not worker.is_ready or worker.is_retiring:
                continue
            if reason := self._reason(worker):
                overlaps = not slot.devices and slot.placement is None and self._has_room()
                self._pool.renew(slot, reason, overlaps=overlaps, on_failure=self._pause)
                return

    def _reason(self, worker: RemoteWorker) -> str:
        """Why a worker should be renewed; empty if it should not."""
        if self._after and worker.num_answered >= self._after:
            return f"it has answered {worker.num_answered} requests; renewAfterRequests is {self._after}"
        if self._above_mb and (used_mb := worker.resident_bytes >> 20) > self._above_mb:
            return f"it uses {used_mb} MB of memory; renewAboveMb is {self._above_mb}"
        return ""

    def _pause(self, slot: Slot) -> None:
        self._paused_until = asyncio.get_running_loop().time() + PAUSE_S
