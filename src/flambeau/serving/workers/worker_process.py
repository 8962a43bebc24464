"""WorkerProcess: one worker's process, from its start to the cause of its exit."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

from flambeau.config.server import SECRET_VARIABLES, SequenceHeaders
from flambeau.errors import FlambeauError
from flambeau.metrics.system import resident_bytes
from flambeau.serving.crash_recovery import WorkerExit, describe_exit
from flambeau.serving.events import ServerEvents, WorkerRef
from flambeau.serving.workers.launcher import ChildProcess, Launcher, StartPlace, kill_group
from flambeau.serving.workers.process_state import GONE, ProcessState, is_stopped, read_process
from flambeau.serving.workers.stacks import Stacks, take_stacks
from flambeau.serving.workers.worker_output import KernelKills, WorkerOutput
from flambeau.wire.channel import ServerChannel
from flambeau.wire.cluster_messages import RemoteFiles
from flambeau.wire.messages import Failed, Load
from flambeau.wire.stack_dumps import stack_lines
from flambeau.wire.tls import TOKEN_VARIABLE

logger = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES = 1 << 20
TOKEN_TIMEOUT_S = 10.0  # a worker sends its token as soon as it is connected
KERNEL_KILLS_S = 5.0
SILENT_EXIT = "it printed nothing: the handler or a library called os._exit or exit. Raise an exception instead"
MAX_LINES, FIRST_LINES = 14, 4  # of the traceback of a failed load
OUTPUT_GRACE_S = 0.5  # until its output ends: a daemon that it started may hold the pipes open


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a worker process needs to start."""

    id: int
    load: Load
    environment: Mapping[str, str]
    max_frame_bytes: int
    transport: str = "unix"
    python: str = sys.executable
    others: tuple[WorkerSpec, ...] = ()  # the other ranks, if this is rank 0 of a group
    keeps_step: bool = False  # every rank of the group gets every batch
    restore_files: Callable[[], None] | None = None  # unpacks files of the model again that were deleted
    remote: Sequence[RemoteFiles] = ()  # where other machines may get the files

    @property
    def has_own_python(self) -> bool:
        """Whether the model has an environment of its own."""
        return self.python != sys.executable

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.id, self.load.model, self.load.version)

    @property
    def name(self) -> str:
        """The worker's name in logs and metrics."""
        return self.ref.name


class WorkerProcess:
    """Starts the process, connects its channel, forwards its output, and reports its exit."""

    def __init__(
        self,
        spec: WorkerSpec,
        new_channel: Callable[[], ServerChannel],
        output: WorkerOutput,
        events: ServerEvents,
        launcher: Launcher,
    ) -> None:
        self.load_failure: Failed | None = None  # as the worker reported it
        self._spec = spec
        self._new_channel = new_channel
        self._process: ChildProcess | None = None
        self._place: asyncio.Future[StartPlace] | None = None  # it starts when it has one
        self._launcher = launcher
        self._output = output
        self._events = events
        self._kill_cause: WorkerExit | None = None  # set when this server ends the process

    @property
    def pid(self) -> int:
        """The process id, or 0 before there is one."""
        return self._process.pid if self._process else 0

    @property
    def local_pids(self) -> list[int]:
        return [self.pid] if self._process else []

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.pid) if self._process else 0

    @property
    def has_exited(self) -> bool:
        return self._process is not None and self._process.has_exited

    @property
    def is_stopped(self) -> bool:
        return self._process is not None and is_stopped(self.pid)

    async def look(self) -> ProcessState:
        return await asyncio.to_thread(read_process, self.pid) if self._process else GONE

    async def take_stacks(self, after_s: float = 0.0) -> Stacks:
        return await asyncio.to_thread(take_stacks, self.pid, after_s) if self._process else Stacks()

    async def run(self) -> WorkerExit:
        """Run the process to its end."""
        self._kernel_kills = KernelKills()
        try:
            if self._spec.restore_files is not None:
                await asyncio.to_thread(self._spec.restore_files)
            if (place := await self._take_place()) is None:
                assert self._kill_cause is not None
                return replace(self._kill_cause, by_server=True)
            if self._spec.transport == "tcp":
                return await self._run_over_tcp(place)
            return await self._run_over_socket_pair(place)
        except FlambeauError as error:
            return WorkerExit(reason=f"it could not be started: {error}", while_loading=True)
        except Exception as error:  # the supervisor handles it as a failed start
            logger.exception("%s could not be started or watched", self._spec.ref)
            return WorkerExit(reason=f"it could not be started: {error}")

    async def _take_place(self) -> StartPlace | None:
        """Wait until it may start; None if it is killed before."""
        if self._kill_cause is None:
            self._place = asyncio.ensure_future(self._launcher.take_place())
            try:
                return await self._place
            except asyncio.CancelledError:
                if self._kill_cause is None:
                    raise
        return None

    async def _run_over_socket_pair(self, place: StartPlace) -> WorkerExit:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        try:
            await self._start(place, "--fd", str(theirs.fileno()), inherited=theirs)
        except BaseException:
            ours.close()
            raise
        # Not create_unix_connection: uvloop's takes the socket object over only after connection_made. If the worker
        # is dead by then, the loop has closed the descriptor and the object closes that number again.
        _, channel = await asyncio.get_running_loop().connect_accepted_socket(self._new_channel, ours)
        self._open(channel)
        return await self._watch()

    async def _run_over_tcp(self, place: StartPlace) -> WorkerExit:
        """Listen on loopback for this worker alone, which authenticates with a token."""
        token = secrets.token_hex(16)
        strangers: set[TokenGate] = set()
        listener = await asyncio.get_running_loop().create_server(
            lambda: TokenGate(token.encode(), self._new_channel, self._open, strangers), "127.0.0.1", 0
        )
        port = listener.sockets[0].getsockname()[1]
        try:
            await self._start(place, "--connect", f"127.0.0.1:{port}", variables={TOKEN_VARIABLE: token})
            return await self._watch()
        finally:
            listener.close()
            for gate in [*strangers]:
                gate.close()

    def _open(self, channel: ServerChannel) -> None:
        """Send the model once the connection is open; if the worker has exited by now, that is noticed as usual."""
        channel.send(self._spec.load)

    async def _start(
        self,
        place: StartPlace,
        *arguments: str,
        inherited: socket.socket | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._process = await self._launcher.start(
            place,
            (self._spec.python, "-P", "-m", "flambeau.worker", *arguments),
            folder=self._spec.load.folder,
            environment={**self._spec.environment, **(variables or {})},
            inherited=inherited,
        )
        self._events.process_started(self._output.name, self.pid)
        if self._kill_cause is not None:
            kill_group(self.pid)

    async def _watch(self) -> WorkerExit:
        process = self._process
        assert process is not None
        with closing(process):
            return self._exit_from(await self._wait(process))

    async def _wait(self, process: ChildProcess) -> int:
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(self._output.forward(process.stdout, is_error=False)),
                tasks.create_task(self._output.forward(process.stderr, is_error=True)),
            ]
            exited = tasks.create_task(process.wait())
            try:
                while exited not in (await asyncio.wait([exited], timeout=KERNEL_KILLS_S))[0]:
                    self._kernel_kills.look()
                code = exited.result()
                await asyncio.wait(readers, timeout=OUTPUT_GRACE_S)
            finally:
                for reader in readers:
                    reader.cancel()
                self.kill(WorkerExit(reason="the server stopped"))
        return code

    def note_ready(self) -> None:
        """The worker has loaded its model."""
        if self._process is not None:
            self._process.note_ready()

    def on_channel_closed(self) -> None:
        """The exit of the process tells more."""

    def kill(self, cause: WorkerExit) -> None:
        """Kill the process and its children; one that waits for its start is not started."""
        if self._process is None:
            self._kill_cause = self._kill_cause or cause
            if self._place is not None:
                self._place.cancel()
        elif self._process.returncode is None:
            self._kill_cause = self._kill_cause or cause
            kill_group(self.pid)

    def _exit_from(self, code: int) -> WorkerExit:
        return exit_of(
            self._spec.name,
            code,
            failure=self.load_failure,
            kill_cause=self._kill_cause,
            lines=self._output.tail.lines(),
            has_kernel_kill=lambda: self._kernel_kills.has_new,
        )


def exit_of(
    name: str,
    code: int,
    *,
    failure: Failed | None,
    kill_cause: WorkerExit | None,
    lines: tuple[str, ...],
    has_kernel_kill: Callable[[], bool],
) -> WorkerExit:
    """Combine the exit status, the reported failure and the reason of a kill."""
    words, by_signal = describe_exit(code)
    if failure is not None:
        if failure.is_final:  # its message suffices
            logger.debug("%s could not load its model:\n%s", name, failure.detail)
            lines = ()
        return WorkerExit(
            reason=f"the model could not be loaded: {failure.message}",
            exit_code=code,
            out_of_memory=failure.status == 507,
            while_loading=True,
            is_final=failure.is_final,
            needs_install=failure.needs_install,
            last_lines=lines if failure.is_final else shown_lines(failure) or lines,
        )
    if kill_cause is not None:
        return WorkerExit(
            reason=kill_cause.reason,
            exit_code=code,
            signal=by_signal,
            out_of_memory=kill_cause.out_of_memory,
            by_server=True,
            spares_jobs=kill_cause.spares_jobs,
            while_loading=kill_cause.while_loading,
            is_hung=kill_cause.is_hung,
            stacks=kill_cause.stacks,
            last_lines=(*lines, *kill_cause.last_lines, *stack_lines(kill_cause.stacks)),
        )
    by_kernel = by_signal == signal.SIGKILL and has_kernel_kill()
    if by_kernel:
        words += ", by the kernel because memory ran out"
    elif by_signal == signal.SIGKILL:
        words += ", probably from outside: an operator, or the kernel's out-of-memory killer"
    out_of_memory = by_kernel or code == 137  # 137: SIGKILL, as a shell reports it
    if code > 0 and not lines:
        lines = (SILENT_EXIT,)
    return WorkerExit(reason=words, exit_code=code, signal=by_signal, out_of_memory=out_of_memory, last_lines=lines)


def shown_lines(failure: Failed) -> tuple[str, ...]:
    """The traceback of a failed load, without the sentence that its reason begins with.

    Of a long one, the first call, which is the author's, and the end.
    """
    lines = failure.detail.strip().splitlines()
    if lines and lines[0] == failure.message:
        del lines[0]
    return tuple(
        lines if len(lines) <= MAX_LINES else [*lines[:FIRST_LINES], "…", *lines[FIRST_LINES + 1 - MAX_LINES :]]
    )


class TokenGate(asyncio.Protocol):
    """Accepts a TCP connection once it has sent the token, and closes any other."""

    def __init__(
        self,
        token: bytes,
        new_channel: Callable[[], ServerChannel],
        on_open: Callable[[ServerChannel], None],
        strangers: set[TokenGate],
    ) -> None:
        self._token = token
        self._new_channel = new_channel
        self._on_open = on_open
        self._strangers = strangers  # connections that have not sent it yet
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._timer = asyncio.get_running_loop().call_later(TOKEN_TIMEOUT_S, self.close)
        self._strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()

    def close(self) -> None:
        self._let_go()
        self._transport.abort()

    def _let_go(self) -> None:
        self._timer.cancel()
        self._strangers.discard(self)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if len(self._seen) < len(self._token):
            return
        if not hmac.compare_digest(self._seen, self._token):
            self.close()
            return
        self._let_go()
        channel = self._new_channel()
        self._transport.pause_reading()  # and resume with the reader of the new protocol
        self._transport.set_protocol(channel)
        channel.connection_made(self._transport)
        self._transport.resume_reading()
        self._on_open(channel)


def environment_for(load: Load, *, threads: int, hidden: str, sequence_headers: SequenceHeaders) -> dict[str, str]:
    """The environment variables of a worker: the server's, without keys and hidden ones, and its share of threads."""
    pattern = re.compile(hidden) if hidden else None
    visible = {k: v for k, v in os.environ.items() if k not in SECRET_VARIABLES}
    environment = {k: v for k, v in visible.items() if not (pattern and pattern.fullmatch(k))}
    if "OMP_NUM_THREADS" not in environment:  # else PyTorch would take MKL's number, and not the user's
        environment["OMP_NUM_THREADS"] = str(threads)
        environment.setdefault("MKL_NUM_THREADS", str(threads))
    with contextlib.suppress(OSError):  # the folder was deleted
        environment["FLAMBEAU_START_FOLDER"] = os.getcwd()  # a worker runs in the folder of its model
    environment["TS_DECODE_INPUT_REQUEST"] = str(load.decode_input).lower()
    environment["TS_REQUEST_SEQUENCE_ID"] = sequence_headers.id
    environment["TS_REQUEST_SEQUENCE_START"] = sequence_headers.start
    environment["TS_REQUEST_SEQUENCE_END"] = sequence_headers.end
    return environment
