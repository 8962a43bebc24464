"""RankGroup: several processes that form one worker. Lockstep: orders their messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.workers.worker_life import NewLife
from flambeau.serving.workers.worker_output import WorkerOutput
from flambeau.serving.workers.worker_process import WorkerSpec
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import (
    Cancel,
    EngineReport,
    Failed,
    Flow,
    Load,
    Part,
    Ready,
    Run,
    Samples,
    Stop,
    ToServer,
    ToWorker,
    cancelled,
)

OUT_OF_STEP_S = 10.0  # how much later than rank 0 another rank may finish a batch


class RankGroup:
    """Behaves as one process with one channel. Rank 0 answers; with `keeps_step` every rank gets every batch."""

    def __init__(
        self,
        spec: WorkerSpec,
        on_messages: Callable[[list[ToServer]], None],
        on_closed: Callable[[str], None],
        output: WorkerOutput,
        new_life: NewLife,
    ) -> None:
        self._specs = (spec, *spec.others)
        self.processes = [
            new_life(s, partial(self._new_channel, rank), output.of_rank(rank)) for rank, s in enumerate(self._specs)
        ]
        self._channels: dict[int, ServerChannel] = {}
        self._ready: dict[int, Ready] = {}
        self._lockstep = Lockstep(len(self._specs)) if spec.keeps_step else None
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._is_closed = False
        self._is_stopping = False
        self._is_killed = False
        self._failed_rank: int | None = None  # the first that could not load the model
        self._straggler_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """The process id of rank 0, or 0 before there is one."""
        return self.processes[0].pid

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self.processes]

    @property
    def local_pids(self) -> list[int]:
        return [pid for process in self.processes for pid in process.local_pids]

    @property
    def resident_by_rank(self) -> list[int]:
        return [process.resident_bytes for process in self.processes]

    @property
    def resident_bytes(self) -> int:
        return sum(self.resident_by_rank)

    @property
    def has_exited(self) -> bool:
        """Whether one of the ranks has; the others follow."""
        return any(process.has_exited for process in self.processes)

    # ---- the interface of a process ----

    async def run(self) -> WorkerExit:
        """Run every rank until the first exits, then stop the others; return how the first exited."""
        lives = [asyncio.ensure_future(process.run()) for process in self.processes]
        try:
            await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            first = next(rank for rank, life in enumerate(lives) if life.done())
            if self._is_stopping:
                self._send_all(Stop())
            else:
                culprit = first if self._failed_rank is None else self._failed_rank
                self.kill(WorkerExit(reason=f"rank {culprit} ended", spares_jobs=True))
            exits = await asyncio.gather(*lives)
        finally:
            self.kill(WorkerExit(reason="the server stopped"))
            self._cancel_timer()
        culprit = first if self._failed_rank is None else self._failed_rank
        first_exit = exits[culprit]
        return (
            first_exit if first_exit.by_server else replace(first_exit, reason=f"rank {culprit}: {first_exit.reason}")
        )

    def kill(self, cause: WorkerExit) -> None:
        self._is_killed = True
        for process in self.processes:
            process.kill(cause)

    # ---- the interface of a channel ----

    def send(self, message: ToWorker) -> None:
        """Send to all ranks in lockstep, otherwise to rank 0, which leads the others itself."""
        self._is_stopping |= isinstance(message, Stop)
        if self._lockstep is None or isinstance(message, Flow):
            self._send(0, message)  # also Stop: the others are needed until rank 0 has finished
        elif isinstance(message, Cancel):
            if dropped := self._lockstep.cancel(message):
                asyncio.get_running_loop().call_soon(self._on_messages, dropped)
        else:
            for outgoing in self._lockstep.to_ranks(message):
                self._send_all(outgoing)

    def send_soon(self, message: ToWorker) -> None:
        """Send at once: a step of a group takes longer than a system call."""
        self.send(message)

    def close(self) -> None:
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

    def on_channel_closed(self) -> None:
        """Each rank has a channel of its own."""

    def _on_end(self, rank: int, fault: str) -> None:
        self.processes[rank].on_channel_closed()
        if fault:
            self.kill(WorkerExit(reason=f"rank {rank} {fault}"))
        if not self._is_closed:
            self._is_closed = True
            self._on_closed("")

    # ---- messages of the ranks ----

    def _receive(self, rank: int, messages: list[ToServer]) -> None:
        to_server: list[ToServer] = []
        for message in messages:
            if isinstance(message, Ready):
                to_server += self._on_ready(rank, message)
            elif isinstance(message, Failed) and not message.job_ids:
                self.processes[rank].load_failure = message
                self._failed_rank = rank if self._failed_rank is None else self._failed_rank
            elif self._lockstep is None:
                to_server += [message] if rank == 0 else []
            elif not self._is_killed:  # a rank that is killed last may fail before, as the others have gone
                answers, following = self._lockstep.from_rank(rank, [message])
                to_server += answers
                for work in following:
                    self._send_all(work)
        if self._lockstep is not None:
            self._check_stragglers(self._lockstep)
        if to_server:
            self._on_messages(to_server)

    def _on_ready(self, rank: int, message: Ready) -> list[ToServer]:
        """The group is ready when its last rank is. Ranks in lockstep take one batch at a time.

        Ranks of a generating model are not in lockstep: rank 0 leads the others itself.
        """
        self._ready[rank] = message
        self.processes[rank].note_ready()
        if len(self._ready) < len(self._specs):
            return []
        if any(ready.places for ready in self._ready.values()):
            self._lockstep = None
        shares = all(ready.can_share_memory for ready in self._ready.values())
        if self._lockstep is not None:
            return [Ready(can_share_memory=shares)]
        return [self._ready[0]]

    def _check_stragglers(self, lockstep: Lockstep) -> None:
        if not lockstep.stragglers:
            self._cancel_timer()
        elif self._straggler_timer is None:
            self._straggler_timer = asyncio.get_running_loop().call_later(OUT_OF_STEP_S, self._on_out_of_step, lockstep)

    def _on_out_of_step(self, lockstep: Lockstep) -> None:
        ranks = ", ".join(map(str, lockstep.stragglers))
        self.kill(
            WorkerExit(
                reason=f"rank 0 was done with a batch and rank {ranks} was not, {OUT_OF_STEP_S:g} s later: the ranks "
                "are out of step. Does the handler make the same calls on every rank?"
            )
        )

    def _cancel_timer(self) -> None:
        if self._straggler_timer is not None:
            self._straggler_timer.cancel()
            self._straggler_timer = None


class Lockstep:
    """Translates between the server, which sees one worker, and its ranks. Methods return the messages to send."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: deque[Run | Stop] = deque()
        self._ends: dict[int, ToServer | None] = {}  # job of the running batch → rank 0's last message about it
        self._left: dict[int, set[int]] = {}  # job of the running batch → ranks that have not finished it

    @property
    def stragglers(self) -> list[int]:
        """The ranks that have not finished the running batch, once rank 0 has."""
        if not self._left or any(end is None for end in self._ends.values()):
            return []
        return sorted(set().union(*self._left.values()))

    def to_ranks(self, message: Load | Run | Stop) -> list[ToWorker]:
        """The messages for every rank, after one of the server."""
        if isinstance(message, Run | Stop):
            self._waiting.append(message)
            return self._proceed()
        return [message]

    def cancel(self, message: Cancel) -> list[ToServer]:
        """Answer for jobs that are not begun; running jobs are not cancelled."""
        dropped: list[ToServer] = []
        for i, waiting in enumerate(self._waiting):
            if isinstance(waiting, Run):
                gone = [job.job_id for job in waiting.jobs if job.job_id in message.job_ids]
                self._waiting[i] = Run([job for job in waiting.jobs if job.job_id not in gone])
                dropped += [cancelled(job_id) for job_id in gone]
        return dropped

    def from_rank(self, rank: int, messages: Sequence[ToServer]) -> tuple[list[ToServer], list[ToWorker]]:
        """The messages for the server and for every rank, after those of one rank."""
        to_server: list[ToServer] = []
        for message in messages:
            if isinstance(message, Part) and message.last:
                to_server += self._end(rank, message.job_id, message)
            elif isinstance(message, Failed):
                for job_id in message.job_ids:
                    to_server += self._end(rank, job_id, structs.replace(message, job_ids=[job_id]))
            elif rank == 0 and isinstance(message, Part | Samples | EngineReport):
                to_server.append(message)
        return to_server, [] if self._left else self._proceed()

    def _end(self, rank: int, job_id: int, message: ToServer) -> list[ToServer]:
        left = self._left.get(job_id)
        if left is None:
            return []
        left.discard(rank)
        if rank == 0:
            self._ends[job_id] = message
        if left:
            return []
        del self._left[job_id]
        end = self._ends.pop(job_id)
        return [end] if end is not None else []

    def _proceed(self) -> list[ToWorker]:
        """The next batch if none runs; a stop after everything before it."""
        if self._left:
            return []
        while self._waiting:
            message = self._waiting.popleft()
            if isinstance(message, Stop):
                return [message]
            if message.jobs:
                self._left = {job.job_id: set(range(self._num_ranks)) for job in message.jobs}
                self._ends = dict.fromkeys(self._left)
                return [message]
        return []
