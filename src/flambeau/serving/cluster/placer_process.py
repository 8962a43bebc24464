"""PlacerProcess: the process that speaks with the cluster's manager. It is started again when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

from flambeau.serving.workers.launcher import ChildProcess, Launcher, kill_group
from flambeau.wire.cluster_messages import ControlChannel, FromPlacer, ToPlacer, from_placer_decoder

logger = logging.getLogger(__name__)

DELAYS_S = (0.2, 1.0, 2.0, 5.0)  # before it is started again; the last one repeats
STEADY_S = 30.0  # one that ran so long ends a series of failures
CHUNK_BYTES = 64 * 1024
KEPT_BYTES = 2000  # of what it printed last


class PlacerProcess:
    """`on_start` is called with each new process, before anything is sent to it."""

    def __init__(
        self,
        command: Sequence[str],
        launcher: Launcher,
        *,
        on_start: Callable[[], None],
        on_message: Callable[[FromPlacer], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._command = command
        self._launcher = launcher
        self._on_start = on_start
        self._on_message = on_message
        self._on_end = on_end
        self._channel: ControlChannel[FromPlacer] | None = None
        self._process: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_alive())

    def send(self, message: ToPlacer) -> None:
        """Send a message; without a process nothing is sent, and `on_start` follows."""
        if self._channel is not None:
            self._channel.send(message)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _keep_alive(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                words = await self._run()
            except OSError as error:
                words = str(error)
            failures = 0 if loop.time() - began > STEADY_S else failures + 1
            delay_s = DELAYS_S[min(failures, len(DELAYS_S) - 1)]
            self._on_end(words)
            logger.warning("the placer ended and is started again in %g s; workers go on. %s", delay_s, words)
            await asyncio.sleep(delay_s)
            self.num_restarts += 1

    async def _run(self) -> str:
        """Run one process to its end; what it printed last."""
        place = await self._launcher.take_place()
        ours, theirs = socket.socketpair()
        try:
            command = [*self._command, "--fd", str(theirs.fileno())]
            process = self._process = await self._launcher.start(
                place, command, folder=os.getcwd(), environment=os.environ, inherited=theirs
            )
        except BaseException:
            ours.close()
            raise
        closed = asyncio.get_running_loop().create_future()
        channel = ControlChannel(from_placer_decoder, self._on_message, closed.set_result)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, ours)
        self._channel = channel
        process.note_ready()
        tail = bytearray()
        readers = [asyncio.ensure_future(_keep_tail(stream.read, tail)) for stream in (process.stdout, process.stderr)]
        try:
            self._on_start()
            await process.wait()
            await asyncio.wait(readers, timeout=0.5)
        finally:
            kill_group(process.pid)
            self._channel = None
            channel.close()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            process.close()
            self._process = None
        lines = [line for line in tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:500] if lines else f"exit status {process.returncode}"


async def _keep_tail(read: Callable[[int], Awaitable[bytes]], tail: bytearray) -> None:
    while chunk := await read(CHUNK_BYTES):
        tail += chunk
        del tail[:-KEPT_BYTES]
