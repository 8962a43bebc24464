"""What the kernel knows of a process: whether it is stopped, computes, or waits, and for what. Linux only."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flambeau.serving.workers.host_resources import descendants
from flambeau.wire.stack_dumps import WATCHER

# stopped: by a signal. locked: every thread waits for a lock, without a time limit. computing: one thread runs and
# every other one waits for a lock. active: anything else, such as a wait for a timer, a socket or a child.
Activity = Literal["stopped", "locked", "computing", "active", "gone"]

FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine(), "")
FUTEX_WAITS = (0, 9, 6, 13, 11)  # WAIT, WAIT_BITSET, LOCK_PI, LOCK_PI2, WAIT_REQUEUE_PI of linux/futex.h
FUTEX_COMMAND = 0x7F  # without the flags
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MAX_SHOWN_THREADS = 50


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread. `state` is the kernel's letter; `call` the line of its system call, empty if it is hidden."""

    name: str
    state: str
    call: str
    num_waits: int  # voluntary context switches so far

    @property
    def is_locked(self) -> bool:
        """Whether it waits for a lock without a time limit."""
        return self.state == "S" and is_endless_lock(self.call)

    @property
    def is_watcher(self) -> bool:
        """Whether it is the worker's own thread that waits for the end of the server."""
        return self.name == WATCHER

    def __str__(self) -> str:
        return f"{self.name}: {STATES.get(self.state, self.state)}, system call {self.call or 'not shown'}"


STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "exited",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """A process at one moment; counters grow from its start."""

    activity: Activity
    user_s: float = 0.0  # computing time in its own code, of all threads
    system_s: float = 0.0  # … and in the kernel
    num_events: int = 0  # page faults, reads, writes and waits
    threads: tuple[ThreadState, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self.threads[:MAX_SHOWN_THREADS]))


GONE = ProcessState(activity="gone")


def is_endless_lock(call: str) -> bool:
    """Whether a line of /proc/PID/task/TID/syscall is a wait for a lock without a time limit."""
    words = call.split()  # the number and its arguments; empty if the kernel hides it
    if len(words) < 5 or words[0] != FUTEX:
        return False
    return int(words[2], 16) & FUTEX_COMMAND in FUTEX_WAITS and int(words[4], 16) == 0


def activity_of(threads: Sequence[ThreadState], *, has_active_children: bool) -> Activity:
    """What a process does; `has_active_children`: one of its children may end its wait."""
    if any(thread.state in "Tt" for thread in threads):
        return "stopped" if all(thread.state in "TZX" for thread in threads) else "active"  # t: in a debugger
    own = [thread for thread in threads if not thread.is_watcher]
    busy = [thread for thread in own if not thread.is_locked]
    if has_active_children or not own:
        return "active"
    if not busy:
        return "locked"
    return "computing" if len(busy) == 1 and busy[0].state == "R" else "active"


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process: one small read, for workers that are idle as well."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(512).rpartition(b")")[2][1:2] == b"T"
    except OSError:
        return False


def read_process(pid: int) -> ProcessState:
    """The state of a process with its children. It reads several files for each thread: call it in a thread."""
    threads = read_threads(pid)
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if not threads or not fields:
        return GONE
    children = [read_threads(child) for child in descendants(pid)]
    active = [child for child in children if not all(thread.is_locked or thread.state == "Z" for thread in child)]
    minor_faults, major_faults, user, system = (int(fields[i]) for i in (7, 9, 11, 12))
    return ProcessState(
        activity=activity_of(threads, has_active_children=bool(active)),
        user_s=user / TICKS_PER_S,
        system_s=system / TICKS_PER_S,
        num_events=minor_faults + major_faults + _num_transfers(pid) + sum(thread.num_waits for thread in threads),
        threads=tuple(threads),
    )


def read_threads(pid: int) -> list[ThreadState]:
    """The threads of a process; empty if it has exited."""
    try:
        folders = [*Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [thread for folder in folders if (thread := read_thread(folder)) is not None]


def read_thread(folder: Path) -> ThreadState | None:
    """The thread of a folder in /proc; None if it has ended."""
    before, _, after = _read(folder / "stat").rpartition(")")
    if not after:
        return None
    return ThreadState(before.partition("(")[2], after[1], _read(folder / "syscall").strip(), _num_waits(folder))


def _num_waits(folder: Path) -> int:
    lines = _read(folder / "status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:")), 0)


def _num_transfers(pid: int) -> int:
    lines = _read(Path(f"/proc/{pid}/io")).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("syscr:", "syscw:")))


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:  # the thread has ended, or the kernel hides the file
        return ""
