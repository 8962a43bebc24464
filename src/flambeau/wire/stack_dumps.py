"""Stacks of a worker on request, also while a call keeps the interpreter's lock: enabled there, read by the server."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NAME = "flambeau-stacks"  # of the memory file that the dumps are written to
WATCHER = "flambeau-watch"  # the thread that takes the signal; at most 15 characters
PR_SET_NAME = 15  # of linux/prctl.h
MAX_DUMP_BYTES = 256 << 10
MAX_SHOWN = 6  # frames in the cause of a failure
ARRIVAL_S = 0.5  # a signal handler in C needs microseconds, but the machine may be busy
POLL_S = 0.01
WORKER_CODE = f"{Path(__file__).parents[1] / 'worker'}{os.sep}"
HIDDEN = (WORKER_CODE, "<frozen ")  # calls that tell an author nothing
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def dump_signal() -> int:
    """A signal that nothing else uses. Its number depends on the C library."""
    return int(signal.SIGRTMIN) + 7


# ---- in the worker ----


def enable() -> None:
    """Write the stacks of all threads to a memory file on the signal. Call it before any thread starts.

    The signal is blocked, also in threads that start later: a system call of a handler must not be interrupted.
    """
    if sys.platform == "linux":
        faulthandler.register(dump_signal(), file=os.memfd_create(NAME), all_threads=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {dump_signal()})


def receive_here() -> None:
    """Let this thread take the signal. It may wait for anything: the handler in C runs without the interpreter."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_NAME, WATCHER.encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {dump_signal()})


# ---- in the server ----


class StackDump:
    """One dump of a worker's stacks. It is empty if the process cannot write any."""

    def __init__(self, pid: int) -> None:
        self._file = dump_file_of(pid)
        self._before = self._size()
        self.is_requested = self._file is not None and takes_signal(pid)
        if self.is_requested:
            with suppress(OSError):
                os.kill(pid, dump_signal())

    def wait(self) -> str:
        """The text when it is complete, or what there is after ARRIVAL_S. Call it in a thread."""
        size, end = self._before, time.monotonic() + ARRIVAL_S
        while self.is_requested and time.monotonic() < end:
            time.sleep(POLL_S)
            if self._before < (now := self._size()) == size:
                break
            size = now
        return self.text()

    def text(self) -> str:
        """What was written since it was requested."""
        if self._file is None:
            return ""
        try:
            with self._file.open("rb") as file:
                file.seek(self._before)
                return file.read(MAX_DUMP_BYTES).decode("utf-8", "replace")
        except OSError:  # the process has exited
            return ""

    def _size(self) -> int:
        try:
            return self._file.stat().st_size if self._file is not None else 0
        except OSError:
            return 0


def dump_file_of(pid: int) -> Path | None:
    """The memory file of a process, or None if it has none that this process may read."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(f"/memfd:{NAME} "):
                    return link
    return None


def takes_signal(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would end it otherwise."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
        return bool(caught >> (dump_signal() - 1) & 1)
    return False


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A line of Python code that a thread executes."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function}, line {self.line} of {Path(self.file).name}"


def main_stack(dump: str) -> list[StackFrame]:
    """The frames of the main thread, which faulthandler writes last; the innermost comes first."""
    return [StackFrame(*found) for found in FRAME.findall(dump.rstrip().rpartition("\n\n")[2])]


def stack_lines(dump: str) -> list[str]:
    """Where the main thread was, for the cause of a failure: the innermost frames, without the worker's own calls."""
    frames = main_stack(dump)
    shown = [frame for frame in frames if not frame.file.startswith(HIDDEN)] or frames
    return [f'File "{frame.file}", line {frame.line} in {frame.function}' for frame in shown[:MAX_SHOWN]]


def is_same_place(one: Sequence[StackFrame], other: Sequence[StackFrame]) -> bool:
    """Whether a thread was in the same call of the same function; the lines in that function may differ."""
    if not one or not other or [*one[1:]] != [*other[1:]]:
        return False
    return (one[0].file, one[0].function) == (other[0].file, other[0].function)
