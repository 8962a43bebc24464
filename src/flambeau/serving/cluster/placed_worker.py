"""PlacedWorker: the life of a worker process on another machine. The end of its channel is its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from flambeau.errors import FlambeauError, PlacementFailed
from flambeau.serving.cluster.resources import node_environment
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.workers.process_state import GONE, Activity, ProcessState, ThreadState
from flambeau.serving.workers.stacks import Stacks
from flambeau.serving.workers.worker_output import WorkerOutput
from flambeau.serving.workers.worker_process import WorkerSpec, exit_of
from flambeau.wire.channel import ServerChannel
from flambeau.wire.cluster_messages import Adopt, Ended, Kill, Looked, Printed, Start, Started
from flambeau.wire.messages import Failed

if TYPE_CHECKING:
    from flambeau.serving.cluster.placement import Seat, SlotPlacement

logger = logging.getLogger(__name__)

T = TypeVar("T")
VERDICT_S = 0.5  # between the end of a channel and the exit status, where its agent lives
KILL_S = 2.0  # for a killed process to end
CONNECT_S = 60.0  # for a new process to dial
_serials = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RemoteEnd:
    """How a process ended; code None: it is not known, since its machine or its agent is gone."""

    code: int | None
    out_of_memory: bool = False
    reason: str = ""


class Ending(Exception):
    """The process has ended, or was killed before it began."""


class PlacedWorker:
    """Starts a process by an agent, gives it a channel, and reports its exit."""

    def __init__(
        self,
        spec: WorkerSpec,
        new_channel: Callable[[], ServerChannel],
        output: WorkerOutput,
        placement: SlotPlacement,
    ) -> None:
        self.load_failure: Failed | None = None
        self.key = f"{spec.name}-{next(_serials)}"  # a name for this life alone
        self.started: Started | None = None
        self.positions = [0, 0]  # in its output files
        self._spec = spec
        self._new_channel = new_channel
        self._output = output
        self._placement = placement
        self._seat: Seat | None = None
        self._channel: ServerChannel | None = None
        self._streams = (RemoteStream(), RemoteStream())
        self._kill_cause: WorkerExit | None = None
        self._token = ""
        self._resident_bytes = 0
        self._is_stopped = False  # as its agent reported it
        self._is_closed = False  # the channel
        self._end: asyncio.Future[RemoteEnd] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self.started.pid if self.started is not None else 0

    @property
    def local_pids(self) -> list[int]:
        return []

    @property
    def has_exited(self) -> bool:
        return self._end.done() or self._is_closed

    @property
    def resident_bytes(self) -> int:
        return self._resident_bytes

    @property
    def is_connected(self) -> bool:
        return self._channel is not None and not self._is_closed

    # ---- what it does ----

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    async def look(self) -> ProcessState:
        """Nothing is known without an agent."""
        try:
            return process_state_of(await self._seat.open_link.look(self.key)) if self._seat is not None else GONE
        except (PlacementFailed, TimeoutError):
            return GONE

    async def take_stacks(self, after_s: float = 0.0) -> Stacks:
        if self._seat is None:
            return Stacks()
        try:
            found = await self._seat.open_link.take_stacks(self.key, after_s)
        except (PlacementFailed, TimeoutError):
            return Stacks()
        return Stacks(found.text, found.is_endless)

    # ---- life ----

    async def run(self) -> WorkerExit:
        """Wait for a machine, start the process there, and wait for its end."""
        readers = [
            asyncio.ensure_future(self._output.forward(stream, is_error=number == 1))
            for number, stream in enumerate(self._streams)
        ]
        try:
            try:
                while not await self._start():
                    logger.info("%s: its agent was lost before it started; it waits for another", self._spec.name)
            except Ending:
                pass
            except (FlambeauError, OSError, TimeoutError) as error:
                if not self._end.done():
                    self._end.set_result(RemoteEnd(None, reason=f"it could not be started: {error}"))
            end = await self._end
            for stream in self._streams:
                stream.close()
            await asyncio.wait(readers)
            return self._exit_from(end)
        finally:
            self._abandon()
            for reader in readers:
                reader.cancel()

    async def _start(self) -> bool:
        """Whether an agent was asked to start the process; not if it was lost meanwhile."""
        spec, load = self._spec, self._spec.load
        if spec.restore_files is not None:
            await self._or_end(asyncio.to_thread(spec.restore_files))
        seat = self._seat = await self._or_end(self._placement.seat_of(load.rank))
        try:
            link = seat.open_link
            folder = await self._or_end(link.prepare(Path(load.folder), spec.remote))
            group = await self._or_end(self._placement.group_environment(load.rank))
        except PlacementFailed:
            if seat.is_open:
                raise
            return False
        self._load = msgspec.structs.replace(
            load, folder=folder, probe=None, watch=False, gpu_id=self._placement.gpu_id(load.rank)
        )
        link.workers[self.key] = self
        seat.lives.add(self)
        self._token = self._placement.port.expect(self._open)
        environment = {**node_environment(spec.environment), **group}
        python = spec.python if spec.has_own_python else ""
        link.send(Start(self.key, folder, environment, self._token, python, self._placement.port.local_name))
        asyncio.get_running_loop().call_later(CONNECT_S, self._check_connected)
        return True

    async def _or_end(self, work: Awaitable[T]) -> T:
        """The result, or Ending if this worker is killed meanwhile."""
        task = asyncio.ensure_future(work)
        waited: list[asyncio.Future[Any]] = [task, self._end]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise Ending
        if self._end.done():
            raise Ending
        return task.result()

    def _open(self) -> ServerChannel:
        """It has dialed and shown its token."""
        channel = self._channel = self._new_channel()
        asyncio.get_running_loop().call_soon(channel.send, self._load)
        return channel

    def _check_connected(self) -> None:
        if self._channel is None and not self._end.done():
            self.kill(WorkerExit(reason=f"its process did not connect within {CONNECT_S:g} s", while_loading=True))

    def note_ready(self) -> None:
        """Only local processes take turns to start."""

    def kill(self, cause: WorkerExit) -> None:
        if self._end.done():
            return
        self._kill_cause = self._kill_cause or cause
        if self._seat is None or self.key not in self._seat.keys:
            self._end.set_result(RemoteEnd(-signal.SIGKILL))
            return
        self._seat.send(Kill(self.key))
        if self._channel is not None:
            self._channel.abort()  # a worker ends with its channel, also where its agent is gone
        asyncio.get_running_loop().call_later(KILL_S, self._set_end, RemoteEnd(-signal.SIGKILL))

    def on_channel_closed(self) -> None:
        self._is_closed = True
        if self._seat is not None and self._seat.link is None:
            self._set_end(self._lost())
        else:
            asyncio.get_running_loop().call_later(VERDICT_S, self._on_no_verdict)

    def _on_no_verdict(self) -> None:
        """Its agent does not report an exit: the process hangs on, the machine is dying, or the agent is only slow."""
        if not self._end.done():
            if self._seat is not None:
                self._seat.send(Kill(self.key))
                self._placement.doubt_agent(self._seat)
            self._set_end(self._lost())

    def _lost(self) -> RemoteEnd:
        if self._seat is not None and self._seat.link is None:  # the process and its agent are gone together
            self._placement.on_node_lost(self._seat)
        where = self._seat.host if self._seat is not None else "its machine"
        return RemoteEnd(None, reason=f"the connection to {where} was lost")

    def _set_end(self, end: RemoteEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)

    def _abandon(self) -> None:
        """Leave nothing behind: the token, the place at the agent."""
        if self._token:
            self._placement.port.forget(self._token)
        if self._seat is not None:
            self._seat.leave(self)
        if self._channel is not None and not self._is_closed:
            self._channel.abort()

    def _exit_from(self, end: RemoteEnd) -> WorkerExit:
        lines = self._output.tail.lines()
        if end.code is None and self._kill_cause is None and self.load_failure is None:
            if end.reason.startswith("it could not be started"):
                return WorkerExit(reason=end.reason, while_loading=True, last_lines=lines)
            # As if killed from outside: the jobs have nothing to do with it.
            reason = end.reason or "its process ended, and its exit status is not known"
            return WorkerExit(reason=reason, signal=signal.SIGKILL, last_lines=lines)
        code = -signal.SIGKILL if end.code is None else end.code
        return exit_of(
            self._spec.name,
            code,
            failure=self.load_failure,
            kill_cause=self._kill_cause,
            lines=lines,
            has_kernel_kill=lambda: end.out_of_memory,
        )

    # ---- messages of the agent ----

    @property
    def adoption(self) -> Adopt | None:
        """The message for a new agent on its machine; None if it has not started."""
        if self.started is None:
            return None
        return Adopt(self.key, self.started.pid, self.started.ticks, self.started.files, [*self.positions])

    def on_started(self, message: Started) -> None:
        self.started = message

    def on_output(self, message: Printed) -> None:
        self.positions[message.is_error] = message.position
        self._streams[message.is_error].add(message.data)

    def on_ended(self, message: Ended) -> None:
        reason = f"it could not be started: {message.reason}" if message.reason else ""
        self._set_end(RemoteEnd(message.code, message.out_of_memory, reason))

    def on_usage(self, resident_bytes: int, *, is_stopped: bool) -> None:
        self._resident_bytes, self._is_stopped = resident_bytes, is_stopped

    def on_agent_lost(self) -> None:
        """Its agent is gone. If its channel is too, its machine is lost; otherwise it works on."""
        self._is_stopped = False  # nobody would report that it goes on
        if self._is_closed or self._channel is None:
            self._set_end(self._lost())


def process_state_of(looked: Looked) -> ProcessState:
    return ProcessState(
        activity=cast(Activity, looked.activity),
        user_s=looked.user_s,
        system_s=looked.system_s,
        num_events=looked.num_events,
        threads=tuple(ThreadState(*thread) for thread in looked.threads),
    )


class RemoteStream:
    """What a process of another machine prints, as a stream."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()

    def add(self, data: bytes) -> None:
        self._chunks.put_nowait(data)

    def close(self) -> None:
        self._chunks.put_nowait(b"")

    async def read(self, size: int, /) -> bytes:
        return await self._chunks.get()
