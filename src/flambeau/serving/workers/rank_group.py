"""RankGroup: several processes that are one worker: started, fed, watched and ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flambeau.serving.workers.lockstep import Lockstep
from flambeau.serving.workers.output import WorkerOutput
from flambeau.serving.workers.recovery import Death
from flambeau.serving.workers.worker_process import WorkerProcess, WorkerSpec
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import Cancel, Failed, Ready, Stop, ToServer, ToWorker

logger = logging.getLogger(__name__)

OUT_OF_STEP_S = 10.0  # how much later than rank 0 another rank may be done with a batch


class RankGroup:
    """Looks like one process with one channel. Rank 0 answers; with `keeps_step` every rank gets every batch."""

    def __init__(
        self,
        spec: WorkerSpec,
        on_messages: Callable[[list[ToServer]], None],
        on_closed: Callable[[str], None],
        output: WorkerOutput,
    ) -> None:
        self._specs = (spec, *spec.others)
        self._processes = [
            WorkerProcess(s, partial(self._new_channel, rank), output.of_rank(rank))
            for rank, s in enumerate(self._specs)
        ]
        self._channels: dict[int, ServerChannel] = {}
        self._ready: dict[int, Ready] = {}
        self._lockstep = Lockstep(len(self._specs)) if spec.keeps_step else None
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._is_closed = False
        self._is_stopping = False
        self._unloadable: int | None = None  # the first rank that could not load the model
        self._late: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """The process id of rank 0, or -1 before there is one."""
        return self._processes[0].pid

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    # ---- as a process ----

    async def run(self) -> Death:
        """Start every rank, let them live, and return how the first of them ended; then none is left."""
        lives = [asyncio.ensure_future(process.run()) for process in self._processes]
        try:
            await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            first = next(rank for rank, life in enumerate(lives) if life.done())
            if self._is_stopping:
                self._send_all(Stop())
            else:
                culprit = first if self._unloadable is None else self._unloadable
                self.kill(Death(reason=f"rank {culprit} ended", spares_jobs=True))
            deaths = await asyncio.gather(*lives)
        finally:
            self.kill(Death(reason="the server stopped"))
            self._forget_late()
        culprit = first if self._unloadable is None else self._unloadable
        death = deaths[culprit]
        return death if death.by_server else replace(death, reason=f"rank {culprit}: {death.reason}")

    def kill(self, fate: Death) -> None:
        """End every rank now; `fate` says why."""
        for process in self._processes:
            process.kill(fate)

    # ---- as a channel ----

    def send(self, message: ToWorker) -> None:
        """Say something to the worker: to all ranks, or to rank 0 where it leads the others itself."""
        self._is_stopping |= isinstance(message, Stop)
        if self._lockstep is None:
            self._send(0, message)  # the others are needed until rank 0 has finished, and stop after it
        elif isinstance(message, Cancel):
            if dropped := self._lockstep.cancel(message):
                asyncio.get_running_loop().call_soon(self._on_messages, dropped)
        else:
            for told in self._lockstep.to_ranks(message):
                self._send_all(told)

    def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            channel.close()

    def _send_all(self, message: ToWorker) -> None:
        for rank in self._channels:
            self._send(rank, message)

    def _send(self, rank: int, message: ToWorker) -> None:
        if rank in self._channels:
            self._channels[rank].send(message)

    def _new_channel(self, rank: int) -> ServerChannel:
        spec = self._specs[rank]
        channel = ServerChannel(partial(self._receive, rank), partial(self._on_end, rank), spec.max_frame_bytes)
        self._channels[rank] = channel
        return channel

    def _on_end(self, rank: int, fault: str) -> None:
        if fault:
            self.kill(Death(reason=f"rank {rank} {fault}"))
        if not self._is_closed:
            self._is_closed = True
            self._on_closed("")

    # ---- what the ranks say ----

    def _receive(self, rank: int, messages: list[ToServer]) -> None:
        told: list[ToServer] = []
        for message in messages:
            if isinstance(message, Ready):
                told += self._on_ready(rank, message)
            elif isinstance(message, Failed) and not message.job_ids:
                self._processes[rank].load_failure = message
                self._unloadable = rank if self._unloadable is None else self._unloadable
            elif self._lockstep is None:
                told += [message] if rank == 0 else []
            else:
                answers, following = self._lockstep.from_rank(rank, [message])
                told += answers
                for work in following:
                    self._send_all(work)
        if self._lockstep is not None:
            self._look_for_stragglers(self._lockstep)
        if told:
            self._on_messages(told)

    def _on_ready(self, rank: int, message: Ready) -> list[ToServer]:
        """The group is ready when its last rank is; ranks in step take one batch at a time.

        Where ranks generate, rank 0 leads the others itself.
        """
        self._ready[rank] = message
        if len(self._ready) < len(self._specs):
            return []
        if any(ready.places for ready in self._ready.values()):
            self._lockstep = None
        shares = all(ready.can_share_memory for ready in self._ready.values())
        if self._lockstep is not None:
            return [Ready(can_share_memory=shares)]
        return [self._ready[0]]

    def _look_for_stragglers(self, lockstep: Lockstep) -> None:
        if not lockstep.stragglers:
            self._forget_late()
        elif self._late is None:
            self._late = asyncio.get_running_loop().call_later(OUT_OF_STEP_S, self._on_out_of_step, lockstep)

    def _on_out_of_step(self, lockstep: Lockstep) -> None:
        ranks = ", ".join(map(str, lockstep.stragglers))
        self.kill(
            Death(
                reason=f"rank 0 was done with a batch and rank {ranks} was not, {OUT_OF_STEP_S:g} s later: the ranks "
                "are out of step. Does the handler make the same calls on every rank?"
            )
        )

    def _forget_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
