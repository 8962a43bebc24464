"""RemoteWorker: the server's end of one worker: its process, its channel, the jobs it holds."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flambeau.errors import JobFailed
from flambeau.serving import output
from flambeau.serving.batching import smoothed
from flambeau.serving.job import Job
from flambeau.serving.recovery import Death, describe_exit
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import Cancel, Failed, Load, Part, Ready, Run, Samples, Stop, ToServer

logger = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES = 1 << 20
EXIT_GRACE_S = 2.0  # between the end of the channel and SIGKILL


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs sent together; `progress` is when the worker last showed a sign of work on it."""

    size: int
    remaining: int
    progress: float
    started: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a worker process needs to start."""

    id: int
    load: Load
    environment: Mapping[str, str]
    max_frame_bytes: int
    transport: str = "unix"
    python: str = sys.executable


class RemoteWorker:
    """One worker process. `ready` ends when the model is loaded, `ended` when the process is gone."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        on_free: Callable[[], None],
        on_lost: Callable[[Death, list[tuple[Job, int]], list[Job]], None],
        on_samples: Callable[[Samples], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Death] = loop.create_future()
        self.started_at = time.time()
        self.is_ready = False
        self.is_retiring = False
        self.is_concurrent = False
        self.shares_memory = False
        self.service_s: float | None = None
        self.has_answered = False
        self.batches: deque[Batch] = deque()
        self._jobs: dict[int, tuple[Job | None, Batch]] = {}
        self._on_free = on_free
        self._on_lost = on_lost
        self._on_samples = on_samples
        self._now = loop.time
        self._channel: ServerChannel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tail = output.Tail()
        self._fate: Death | None = None  # decided by us, before the process is gone
        self._load_failure: Failed | None = None
        self._kernel_kills = 0

    # ---- life ----

    @property
    def pid(self) -> int:
        """The process id, or -1 before there is one."""
        return self._process.pid if self._process else -1

    @property
    def num_in_flight(self) -> int:
        """Batches it holds."""
        return len(self.batches)

    @property
    def is_idle(self) -> bool:
        """Whether it could start on a job this instant."""
        return self.is_ready and not self.is_retiring and not self.batches

    async def run(self) -> Death:
        """Start the process, let it live, and return how it ended; jobs it held go to `on_lost`."""
        self._kernel_kills = output.count_kernel_kills()
        ours: socket.socket | None = None
        listener: asyncio.Server | None = None
        if self.spec.transport == "tcp":
            arguments, listener = await self._listen()
            inherited: tuple[int, ...] = ()
        else:
            ours, theirs = socket.socketpair()
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            arguments, inherited = ["--fd", str(theirs.fileno())], (theirs.fileno(),)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(self.spec.python, "-P", "-m", "flambeau.worker", *arguments),
                cwd=self.spec.load.folder,
                env=dict(self.spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=inherited,
                start_new_session=True,  # a Ctrl-C in the terminal is for the server, which then drains
            )
        except OSError as error:
            if ours is not None:
                ours.close()
            return self._end(Death(reason=f"could not be started: {error}"))
        finally:
            if inherited:
                theirs.close()
        if ours is not None:
            await asyncio.get_running_loop().create_unix_connection(self._new_channel, sock=ours)
        try:
            return await self._watch(self._process)
        finally:
            if listener is not None:
                listener.close()

    async def _listen(self) -> tuple[list[str], asyncio.Server]:
        """A TCP listener on loopback for this worker alone; the worker proves itself with a token."""
        import secrets

        token = secrets.token_hex(16)
        server = await asyncio.get_running_loop().create_server(
            lambda: TokenGate(token.encode(), self._new_channel), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        return ["--connect", f"127.0.0.1:{port}", "--token", token], server

    def _new_channel(self) -> ServerChannel:
        self._channel = ServerChannel(self._receive, self._on_channel_closed, self.spec.max_frame_bytes)
        self._channel.on_open = self._on_open
        return self._channel

    def _on_open(self) -> None:
        assert self._channel is not None
        self._channel.send(self.spec.load)

    async def _watch(self, process: asyncio.subprocess.Process) -> Death:
        name = f"W-{self.spec.id}-{self.spec.load.model}_{self.spec.load.version}"
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(output.forward(process.stdout, f"{name}-stdout", None)),
                tasks.create_task(output.forward(process.stderr, f"{name}-stderr", self._tail)),
            ]
            try:
                code = await process.wait()
                # A grandchild may hold the pipes open; the worker's own last words are there by now.
                await asyncio.wait(readers, timeout=0.5)
            finally:
                for reader in readers:
                    reader.cancel()
                if process.returncode is None:
                    self.kill(Death(reason="the server stopped"))
        return self._end(self._death_from(code))

    def _death_from(self, code: int) -> Death:
        """Put together what is known about the end of the process."""
        words, by_signal = describe_exit(code)
        lines = self._tail.lines()
        if self._load_failure is not None:
            failure = self._load_failure
            return Death(
                reason=f"the model could not be loaded: {failure.message}",
                exit_code=code,
                out_of_memory=failure.status == 507,
                last_lines=tuple(failure.detail.strip().splitlines()[-12:]) or lines,
            )
        if self._fate is not None:
            fate = self._fate
            return Death(
                reason=fate.reason,
                exit_code=code,
                signal=by_signal,
                out_of_memory=fate.out_of_memory,
                by_server=True,
                last_lines=lines,
            )
        by_kernel = by_signal == signal.SIGKILL and output.count_kernel_kills() > self._kernel_kills
        if by_kernel:
            words += ", by the kernel because memory ran out"
        elif by_signal == signal.SIGKILL:
            words += ", from outside the server: an operator, or the kernel's out-of-memory killer"
        return Death(
            reason=words,
            exit_code=code,
            signal=by_signal,
            out_of_memory=by_kernel or code == 137,
            last_lines=lines,
        )

    def _end(self, death: Death) -> Death:
        """Hand back the jobs: those of the batch it worked on, and those it had not begun."""
        self.is_ready = False
        if self._channel is not None:
            self._channel.close()
        begun = [*self.batches] if self.is_concurrent else [*self.batches][:1]
        suspects, innocent = [], []
        for job, batch in self._jobs.values():
            if job is None:
                continue
            if job.body.segment is not None:
                job.body.release()
            if job.is_over:
                continue
            if batch in begun:
                suspects.append((job, batch.size))
            else:
                innocent.append(job)
        self._jobs.clear()
        self.batches.clear()
        if not self.ready.done():
            self.ready.cancel()
        self.ended.set_result(death)
        self._on_lost(death, suspects, innocent)
        return death

    def kill(self, fate: Death) -> None:
        """End the process and its children now; `fate` says why."""
        self._fate = self._fate or fate
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    async def retire(self, timeout_s: float) -> None:
        """Let it finish what it holds, then stop it; kill it when that takes too long."""
        self.is_retiring = True
        if self._channel is not None:
            self._channel.send(Stop())
        done, _ = await asyncio.wait([self.ended], timeout=timeout_s)
        if not done:
            self.kill(Death(reason=f"did not stop within {timeout_s:g} s"))

    # ---- work ----

    def send(self, jobs: Sequence[Job]) -> None:
        """Send these jobs as one batch."""
        now = self._now()
        batch = Batch(len(jobs), len(jobs), now, now)
        self.batches.append(batch)
        share = self.shares_memory
        requests = []
        for job in jobs:
            job.sent = now
            job.on_cancel = self._cancel
            self._jobs[job.id] = (job, batch)
            if job.body.segment is not None:
                job.body.hold()
            requests.append(job.to_request(share=share))
        assert self._channel is not None
        self._channel.send(Run(requests))

    def take_back(self) -> list[Job]:
        """Jobs it has not begun, taken away from it so that an idle worker can have them."""
        if self.is_concurrent or len(self.batches) < 2:
            return []
        current = self.batches[0]
        taken: dict[int, Job] = {}
        for job_id, (job, batch) in self._jobs.items():
            if batch is not current and job is not None and not job.is_over and job.body.segment is None:
                taken[job_id] = job
        for job_id, job in taken.items():
            self._jobs[job_id] = (None, self._jobs[job_id][1])
            job.renew_id()  # the old one stays with this worker until it has let go
        if taken and self._channel is not None:
            self._channel.send(Cancel([*taken]))
        return [*taken.values()]

    def _cancel(self, job: Job) -> None:
        if self._channel is not None and job.id in self._jobs:
            self._channel.send(Cancel([job.id]))

    def seconds_without_progress(self) -> float:
        """How long the batch it works on has shown no sign of progress; 0 when it is idle."""
        if not self.batches:
            return 0.0
        stalled = min(batch.progress for batch in self.batches) if self.is_concurrent else self.batches[0].progress
        return self._now() - stalled

    # ---- what it says ----

    def _receive(self, message: ToServer) -> None:
        if type(message) is Part:
            self._on_part(message)
        elif type(message) is Failed:
            self._on_failed(message)
        elif type(message) is Ready:
            self.is_concurrent = message.is_concurrent
            self.shares_memory = message.can_share_memory
            self.is_ready = True
            if not self.ready.done():
                self.ready.set_result(None)
            self._on_free()
        elif type(message) is Samples:
            self._on_samples(message)

    def _on_part(self, part: Part) -> None:
        entry = self._jobs.get(part.job_id)
        if entry is None:
            return
        job, batch = entry
        if job is not None:
            job.deliver(part)
        if part.last:
            self._finish(part.job_id, job, batch)
        else:
            batch.progress = self._now()

    def _on_failed(self, failed: Failed) -> None:
        if not failed.job_ids:
            self._load_failure = failed
            return
        for job_id in failed.job_ids:
            entry = self._jobs.get(job_id)
            if entry is None:
                continue
            job, batch = entry
            if job is not None:
                job.fail(JobFailed(failed.message, status=failed.status, cause=failed.detail))
            self._finish(job_id, job, batch)

    def _finish(self, job_id: int, job: Job | None, batch: Batch) -> None:
        """A job has left the worker; when it was the last of its batch, there is room for another."""
        del self._jobs[job_id]
        self.has_answered = True
        if job is not None and job.body.segment is not None:
            job.body.release()
        batch.remaining -= 1
        if batch.remaining:
            batch.progress = self._now()
            return
        now = self._now()
        self.service_s = smoothed(self.service_s, now - batch.started)
        self.batches.remove(batch)
        if self.batches and not self.is_concurrent:
            following = self.batches[0]
            following.started = following.progress = now
        self._on_free()

    def _on_channel_closed(self, fault: str) -> None:
        """The worker is ending, or has lost its mind: give it a moment to exit by itself."""
        self.is_ready = False
        if fault:
            self.kill(Death(reason=f"it {fault}"))
        elif not self.ended.done():
            fate = Death(reason="it closed its channel without exiting")
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.kill, fate)


class TokenGate(asyncio.Protocol):
    """Lets a TCP worker through once it has shown its token, and nobody else."""

    def __init__(self, token: bytes, new_channel: Callable[[], ServerChannel]) -> None:
        self._token = token
        self._new_channel = new_channel
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        import hmac

        self._seen += data
        if len(self._seen) < len(self._token):
            return
        if not hmac.compare_digest(self._seen, self._token):
            self._transport.abort()
            return
        channel = self._new_channel()
        self._transport.pause_reading()  # reading restarts in the way the new protocol wants it
        self._transport.set_protocol(channel)
        channel.connection_made(self._transport)
        self._transport.resume_reading()


def environment_for(load: Load, *, threads: int, paths: Sequence[str], hidden: str) -> dict[str, str]:
    """The environment of a worker: the server's, less what is hidden, with threads and import path set."""
    import re

    pattern = re.compile(hidden) if hidden else None
    environment = {k: v for k, v in os.environ.items() if not (pattern and pattern.fullmatch(k))}
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(variable, str(threads))
    inherited = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [inherited])])
    environment["FLAMBEAU_MODEL_PATH"] = str(Path(load.folder).resolve())
    environment["TS_DECODE_INPUT_REQUEST"] = str(load.decode_input).lower()
    if not environment["PYTHONPATH"]:
        del environment["PYTHONPATH"]
    return environment
