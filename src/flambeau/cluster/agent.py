"""An agent: a process on a machine of the cluster that starts and watches workers for a server.

It dials the server. A worker runs in a session of its own and ends with its own channel to the server, so it outlives
its agent; another agent can adopt it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import cast

import msgspec

from flambeau import __version__
from flambeau.cluster.model_cache import ModelCache, ModelTransfer
from flambeau.config.server import SECRET_VARIABLES
from flambeau.serving.workers.host_resources import family_bytes
from flambeau.serving.workers.process_state import GONE, is_stopped, read_process
from flambeau.serving.workers.stacks import Stacks, take_stacks
from flambeau.serving.workers.worker_output import count_kernel_kills
from flambeau.wire.cluster_messages import (
    Adopt,
    ControlChannel,
    Ended,
    FilePiece,
    FindPort,
    FoundPort,
    Joined,
    Kill,
    Look,
    Looked,
    Prepare,
    Prepared,
    Printed,
    Start,
    Started,
    TakeStacks,
    ToAgent,
    TookStacks,
    Usage,
    WantPieces,
    to_agent_decoder,
)
from flambeau.wire.tls import (
    CONNECT_S,
    HEARTBEAT_S,
    HEARTBEAT_VARIABLE,
    LOCAL_VARIABLE,
    PIN_VARIABLE,
    TOKEN_VARIABLE,
    WrongServer,
    check_pin,
    client_context,
    keep_alive,
    split_address,
)

TAIL_S = 0.05  # between two looks at the output of workers
USAGE_S = 1.0
CHUNK_BYTES = 64 * 1024
MAX_FILE_BYTES = 1 << 20  # an output file that has been read is emptied beyond this size
REPORTED_PACKAGES = ("torch", "ray")


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to know; the token is secret."""

    agent: str
    address: str  # of the server
    fingerprint: str
    token: str
    node: str  # the cluster's id of this machine
    host: str = ""  # the machine's name; empty: as it is
    node_address: str = ""  # for groups of processes; empty: the one that reaches the server
    heartbeat_s: float = HEARTBEAT_S


@dataclass(slots=True)
class OutputFile:
    """A file that a worker appends to."""

    path: str
    is_error: bool
    position: int = 0

    def read(self) -> bytes:
        """What has arrived since the last call, in chunks; the file is emptied when it is large and was read."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read(CHUNK_BYTES)
        except OSError:  # deleted by somebody else
            return b""
        self.position += len(data)
        if not data and self.position > MAX_FILE_BYTES:
            with suppress(OSError):
                if os.stat(self.path).st_size == self.position:
                    os.truncate(self.path, 0)  # the worker appends, so it goes on at the start
                    self.position = 0
        return data


@dataclass(slots=True)
class OwnWorker:
    """A worker of this machine."""

    name: str
    pid: int
    files: list[OutputFile]
    popen: subprocess.Popen[bytes] | None  # None: adopted
    kernel_kills: int


class Agent:
    """Connects to the server and does what it says until the connection ends."""

    def __init__(self, settings: AgentSettings, cache: ModelCache | None = None) -> None:
        self._settings = settings
        self._workers: dict[str, OwnWorker] = {}
        self._cache = cache or ModelCache()
        self._transfers: dict[int, ModelTransfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Return when the server is gone, or this agent is no longer wanted."""
        loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._channel: ControlChannel[ToAgent] = ControlChannel(to_agent_decoder, self._on_message, self._on_closed)
        settings = self._settings
        async with asyncio.timeout(CONNECT_S):
            gate = PinCheck(settings.fingerprint, settings.token, self._channel)
            host, port = split_address(settings.address)
            transport, _ = await loop.create_connection(lambda: gate, host, port, ssl=client_context())
            if gate.problem is not None:
                raise gate.problem
            sock = transport.get_extra_info("socket")
            own_address = sock.getsockname()[0]
            keep_alive(sock, settings.heartbeat_s)
        self._channel.send(self._joined(own_address))
        watch = loop.create_task(self._watch())
        try:
            await self._closed
        finally:
            watch.cancel()
            for task in self._tasks:
                task.cancel()

    def _joined(self, own_address: str) -> Joined:
        return Joined(
            agent=self._settings.agent,
            node=self._settings.node,
            host=self._settings.host or socket.gethostname(),
            address=self._settings.node_address or own_address,
            pid=os.getpid(),
            devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            versions=versions(),
        )

    def _on_closed(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    # ---- messages ----

    def _on_message(self, message: ToAgent) -> None:
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Adopt):
            self._adopt(message)
        elif isinstance(message, Kill):
            if (worker := self._workers.get(message.worker)) is not None:
                kill_group(worker.pid)
        elif isinstance(message, FindPort):
            self._channel.send(FoundPort(message.serial, free_port()))
        elif isinstance(message, Look):
            self._run(self._look(message))
        elif isinstance(message, TakeStacks):
            self._run(self._take_stacks(message))
        elif isinstance(message, Prepare):
            self._run(self._prepare(message))
        elif isinstance(message, FilePiece) and (transfer := self._transfers.get(message.serial)) is not None:
            transfer.add(message.path, message.data)

    def _run(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, message: Prepare) -> None:
        """Answer where the files are; ask for them if they are nowhere."""
        try:
            folder = await asyncio.to_thread(self._cache.find, message.folder, message.files, message.digest)
            if not folder and message.digest:
                folder = await self._receive(message)
            self._channel.send(Prepared(message.serial, folder))
        except (OSError, ValueError) as error:
            self._channel.send(Prepared(message.serial, "", str(error)))
        finally:
            self._transfers.pop(message.serial, None)

    async def _receive(self, message: Prepare) -> str:
        """Get the files from where they came from, and the others from the server."""
        transfer = self._transfers[message.serial] = ModelTransfer(self._cache, message.digest)
        if folder := await transfer.fetch(message.remote, message.files):
            return folder
        self._channel.send(WantPieces(message.serial, transfer.held, transfer.problem))
        try:
            return await transfer.run()
        except ValueError:
            if not transfer.held:
                raise
        transfer.start_over()
        self._channel.send(WantPieces(message.serial, [], transfer.problem))
        return await transfer.run()

    # ---- workers that make no progress ----

    async def _look(self, message: Look) -> None:
        worker = self._workers.get(message.worker)
        state = await asyncio.to_thread(read_process, worker.pid) if worker is not None else GONE
        threads = [(thread.name, thread.state, thread.call, thread.num_waits) for thread in state.threads]
        self._channel.send(
            Looked(message.serial, state.activity, state.user_s, state.system_s, state.num_events, threads)
        )

    async def _take_stacks(self, message: TakeStacks) -> None:
        worker = self._workers.get(message.worker)
        found = await asyncio.to_thread(take_stacks, worker.pid, message.after_s) if worker is not None else Stacks()
        self._channel.send(TookStacks(message.serial, found.text, found.is_endless))

    # ---- workers ----

    def _start(self, message: Start) -> None:
        kernel_kills = count_kernel_kills()
        try:
            files = [OutputFile(new_file(message.worker, kind), kind == "errors") for kind in ("output", "errors")]
            popen = self._popen(message, files)
        except OSError as error:
            self._channel.send(Ended(message.worker, None, reason=f"{error.strerror}: {error.filename}"))
            return
        self._workers[message.worker] = OwnWorker(message.worker, popen.pid, files, popen, kernel_kills)
        paths = [file.path for file in files]
        self._channel.send(Started(message.worker, popen.pid, start_ticks(popen.pid) or 0, paths))
        self._watch_exit(message.worker, popen.pid)

    def _popen(self, message: Start, files: list[OutputFile]) -> subprocess.Popen[bytes]:
        settings = self._settings
        secret = {
            TOKEN_VARIABLE: message.token,
            PIN_VARIABLE: settings.fingerprint,
            HEARTBEAT_VARIABLE: str(settings.heartbeat_s),
            LOCAL_VARIABLE: message.local,
        }
        with open(files[0].path, "ab") as out, open(files[1].path, "ab") as errors:
            return subprocess.Popen(
                (message.python or sys.executable, "-P", "-m", "flambeau.worker", "--connect", settings.address),
                cwd=message.folder,
                env={**own_environment(os.environ), **message.environment, **secret},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,  # it must outlive this agent
            )

    def _adopt(self, message: Adopt) -> None:
        """Watch a process that another agent has started; it has ended if its id is another process's by now."""
        if start_ticks(message.pid) != message.ticks:
            self._channel.send(Ended(message.worker, None))
            return
        files = [
            OutputFile(path, is_error=number == 1, position=position)
            for number, (path, position) in enumerate(zip(message.files, message.positions, strict=True))
        ]
        self._workers[message.worker] = OwnWorker(message.worker, message.pid, files, None, count_kernel_kills())
        self._channel.send(Started(message.worker, message.pid, message.ticks, message.files))
        self._watch_exit(message.worker, message.pid)

    def _watch_exit(self, name: str, pid: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(self._on_exit, name, -1)
        else:
            loop.add_reader(fd, self._on_exit, name, fd)

    def _on_exit(self, name: str, fd: int) -> None:
        if fd >= 0:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        worker = self._workers.pop(name)
        kill_group(worker.pid)  # the children that outlived it
        code = worker.popen.wait() if worker.popen is not None else None
        self._forward(worker)
        for file in worker.files:
            with suppress(OSError):
                os.unlink(file.path)
        by_kernel = code == -signal.SIGKILL and count_kernel_kills() > worker.kernel_kills
        self._channel.send(Ended(name, code, by_kernel))

    async def _watch(self) -> None:
        """Forward output, and report memory from time to time."""
        rounds = 0
        while True:
            await asyncio.sleep(TAIL_S)
            for worker in [*self._workers.values()]:
                self._forward(worker)
            rounds += 1
            if rounds % round(USAGE_S / TAIL_S) == 0 and self._workers:
                self._channel.send(Usage(await asyncio.to_thread(usage_of, [*self._workers.values()])))

    def _forward(self, worker: OwnWorker) -> None:
        for file in worker.files:
            while data := file.read():
                self._channel.send(Printed(worker.name, file.is_error, data, file.position))


class PinCheck(asyncio.Protocol):
    """Checks the server's certificate, shows the token and hands over to the channel."""

    def __init__(self, fingerprint: str, token: str, channel: ControlChannel[ToAgent]) -> None:
        self._fingerprint = fingerprint
        self._token = token
        self._channel = channel
        self.problem: WrongServer | None = None

    def connection_made(self, base: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, base)  # uvloop's transport does not inherit from it
        try:
            check_pin(transport.get_extra_info("ssl_object"), self._fingerprint)
        except WrongServer as error:
            self.problem = error
            transport.abort()
            return
        transport.write(self._token.encode())
        transport.set_protocol(self._channel)
        self._channel.connection_made(transport)


def own_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This machine's variables for a worker, without secrets and those of the cluster's manager."""
    return {
        name: value for name, value in variables.items() if not name.startswith("RAY_") and name not in SECRET_VARIABLES
    }


def versions() -> dict[str, str]:
    """The versions that must fit those of the server."""
    found = {"python": platform.python_version(), "flambeau": __version__}
    for package in REPORTED_PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version_of(package)
    return found


def new_file(worker: str, kind: str) -> str:
    folder = Path(tempfile.gettempdir()) / f"flambeau-output-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    fd, path = tempfile.mkstemp(prefix=f"{worker.replace('/', '_')[:60]}-", suffix=f".{kind}", dir=folder)
    os.close(fd)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def start_ticks(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def usage_of(workers: list[OwnWorker]) -> list[tuple[str, int, bool]]:
    return [(worker.name, family_bytes([worker.pid], 0), is_stopped(worker.pid)) for worker in workers]


def kill_group(pid: int) -> None:
    with suppress(OSError):  # no process is left
        os.killpg(pid, signal.SIGKILL)


def main() -> int:
    """Run an agent as a process; its settings are JSON on standard input."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentSettings)
    try:
        asyncio.run(Agent(settings).run())
    except (OSError, TimeoutError, WrongServer) as error:
        print(f"flambeau agent: {settings.address} cannot be reached: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
