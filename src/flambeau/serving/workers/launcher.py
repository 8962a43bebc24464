"""Launcher: starts worker processes beside the event loop. ChildProcess: one of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

MIN_AT_A_TIME = 2  # more than the cores only keep the event loop waiting for one
PLACE_S = 1.0  # a model that takes long to load must not delay the start of others
REAPER_REST_S = 1.0  # one that cannot live must not be started in a loop
REAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("orphan_reaper.py")))


class Launcher:
    """Starts processes in a thread of its own, a few at a time, so that the event loop keeps its share of the cores.

    The thread lives as long as the server: Linux sends the parent-death signal of a process when the thread that
    started it ends. The reaper kills the children of the workers as well; one that dies is replaced.
    """

    def __init__(self, num_cores: int) -> None:
        self._places = StartPlaces(max(MIN_AT_A_TIME, num_cores))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        self._groups: set[int] = set()  # used only in that thread, as is the reaper
        self._reaper: subprocess.Popen[bytes] | None = None

    async def take_place(self) -> StartPlace:
        """Wait until a process may start."""
        return await self._places.take()

    async def start(
        self,
        place: StartPlace,
        command: Sequence[str],
        *,
        folder: str,
        environment: Mapping[str, str],
        inherited: socket.socket | None,
    ) -> ChildProcess:
        """Start a process that leads its own session. The inherited socket is closed here in any case."""
        job = self._thread.submit(
            self._start,
            command,
            folder,
            environment,
            () if inherited is None else (inherited.fileno(),),
        )
        if inherited is not None:  # by whichever thread is done with it: before that its number must not be reused
            job.add_done_callback(lambda _: inherited.close())
        try:
            popen = await asyncio.wrap_future(job)
        except BaseException:
            place.leave()
            job.add_done_callback(self._discard)
            raise
        return ChildProcess(popen, place, on_exit=partial(self._submit, self._forget, popen.pid))

    def close(self) -> None:
        """End the reaper. Call it when every process has exited."""
        self._thread.submit(self._end_reaper)
        self._thread.shutdown()

    def _discard(self, job: Future[subprocess.Popen[bytes]]) -> None:
        """End a process that nobody waits for any more."""
        if not job.cancelled() and job.exception() is None:
            self._submit(self._reap, job.result())

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # closed: the reaper is gone
            self._thread.submit(work, *arguments)

    # ---- in the thread ----

    def _start(
        self, command: Sequence[str], folder: str, environment: Mapping[str, str], inherited: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        popen = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C in the terminal must reach only the server, which then drains
        )
        self._groups.add(popen.pid)
        self._tell_reaper(f"+{popen.pid}\n")
        return popen

    def _forget(self, pid: int) -> None:
        self._groups.discard(pid)
        self._tell_reaper(f"-{pid}\n")

    def _reap(self, popen: subprocess.Popen[bytes]) -> None:
        kill_group(popen.pid)
        for pipe in (popen.stdout, popen.stderr):
            assert pipe is not None
            pipe.close()
        popen.wait()
        self._forget(popen.pid)

    def _tell_reaper(self, line: str) -> None:
        """Pass a change on; a reaper that is gone or stopped is replaced."""
        reaper = self._reaper
        if reaper is None or reaper.poll() is not None or not _write(reaper, line):
            self._replace_reaper()

    def _replace_reaper(self) -> None:
        self._end_reaper()
        try:
            reaper = subprocess.Popen(REAPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:  # the workers still get the parent-death signal
            logger.warning("children of workers would outlive a killed server: no reaper could be started: %s", error)
            return
        self._reaper = reaper
        assert reaper.stdin is not None
        os.set_blocking(reaper.stdin.fileno(), False)
        _write(reaper, "".join(f"+{pid}\n" for pid in self._groups))
        threading.Thread(target=self._watch_reaper, args=(reaper,), daemon=True, name="reaper-watch").start()

    def _note_reaper_gone(self, reaper: subprocess.Popen[bytes]) -> None:
        if self._reaper is reaper:
            self._replace_reaper()

    def _end_reaper(self) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.kill()
            self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None

    # ---- in a thread for each reaper ----

    def _watch_reaper(self, reaper: subprocess.Popen[bytes]) -> None:
        """Replace the reaper when it is gone: what was written to its pipe while it died is lost with it."""
        started = time.monotonic()
        assert reaper.stdout is not None
        with reaper.stdout as pipe:
            pipe.read()  # it writes nothing: this is its end
        if self._reaper is reaper:
            time.sleep(max(0.0, started + REAPER_REST_S - time.monotonic()))
            self._submit(self._note_reaper_gone, reaper)


def _write(reaper: subprocess.Popen[bytes], lines: str) -> bool:
    """Whether all of it was written."""
    assert reaper.stdin is not None
    data = lines.encode()
    try:
        return os.write(reaper.stdin.fileno(), data) == len(data)
    except OSError:
        return False


class StartPlaces:
    """Limits how many processes start at a time. A place is left when the process is up, and after PLACE_S."""

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)

    async def take(self) -> StartPlace:
        await self._free.acquire()
        return StartPlace(self._free)


class StartPlace:
    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._is_taken = True
        self._timer = asyncio.get_running_loop().call_later(PLACE_S, self.leave)

    def leave(self) -> None:
        """Let the next process start; harmless if that has happened."""
        self._timer.cancel()
        if self._is_taken:
            self._is_taken = False
            self._free.release()


class ChildProcess:
    """A running process. `wait` returns as soon as it has exited, even if others hold its pipes open."""

    def __init__(self, popen: subprocess.Popen[bytes], place: StartPlace, on_exit: Callable[[], object]) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.pid = popen.pid
        self.returncode: int | None = None
        self.stdout, self.stderr = PipeReader(popen.stdout), PipeReader(popen.stderr)
        self._popen = popen
        self._place = place
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._watch()

    async def wait(self) -> int:
        """The exit status; negative: the number of the signal that ended it."""
        return await asyncio.shield(self._exited)

    @property
    def has_exited(self) -> bool:
        """Asks the kernel: the event loop may not know yet."""
        if self.returncode is not None or sys.platform == "darwin":
            return self.returncode is not None
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        try:  # a killed process with threads is a zombie before the kernel reports its exit
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return False

    def note_ready(self) -> None:
        """It is up: the next one may start."""
        self._place.leave()

    def close(self) -> None:
        """Close the pipes."""
        self.stdout.close()
        self.stderr.close()

    def _watch(self) -> None:
        try:
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or an old one
            threading.Thread(target=self._wait_in_thread, daemon=True, name=f"wait-{self.pid}").start()
        else:
            self._loop.add_reader(fd, self._on_pidfd, fd)

    def _on_pidfd(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        self._set_exited()

    def _wait_in_thread(self) -> None:
        self._popen.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set_exited)

    def _set_exited(self) -> None:
        # Children that outlived it hold memory, ports and pipes. Its pid is not reused before `wait`.
        kill_group(self.pid)
        self.returncode = self._popen.wait()
        self._place.leave()
        self._on_exit()
        if not self._exited.done():
            self._exited.set_result(self.returncode)


class PipeReader:
    """The server's end of a pipe. Its descriptor has one owner, which closes it once."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._fd = pipe.fileno()
        os.set_blocking(self._fd, False)

    async def read(self, size: int) -> bytes:
        """What has arrived, after at least one turn of the event loop; empty at the end."""
        while True:
            await self._wait_readable()
            with suppress(BlockingIOError):
                return os.read(self._fd, size)

    def close(self) -> None:
        self._pipe.close()

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._fd, _set_done, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._fd)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def kill_group(pid: int) -> None:
    """Kill the processes of a group."""
    with suppress(OSError):  # no process is left
        os.killpg(pid, signal.SIGKILL)
