"""LogProcess: logs that a process of its own formats and writes. `python -m flambeau.logs.log_process FD` is it.

A server that logs nine lines for each request spends more time on them than on the request, and Python runs one thread
at a time. It passes the values on instead: that costs a tenth of the lines. Under load the event loop itself does so:
for another thread, on another core, the same takes five times as long, because it has none of the objects in its cache.
"""

from __future__ import annotations

import fcntl
import logging
import marshal
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from flambeau.logs.line_formats import LineFormat, LineGroup
from flambeau.logs.rolling_file import MAX_BYTES, RollingFile
from flambeau.logs.writer import ENTRY_BYTES, FLUSH_S, NOTE_S, QUIET_S, Entry, Logs

CLOSE_S = 3.0  # for the process to write the last lines
MAX_FORMATS = 2000  # then all are sent again: those of workers that have ended would stay for ever
FLUSH = -1  # in place of the number of dropped lines: tell that all before is written
FEW, MANY = 10, 200  # entries of a frame: the server has little to do, or is busy
LATE_S = 0.5  # how old entries may be before they are written although others want the core
GATHERED = 450  # entries without a text: those of about 50 requests, which take 0.1 ms
GATHER_MANY_S = 0.2  # pause of the writing thread meanwhile: it takes only what is left over
AT_ONCE = 100  # entries in QUIET_S that are passed on one by one
PIPE_BYTES = 1 << 20
MARSHAL_VERSION = 2  # without references, which take longer to find than to repeat
_size = struct.Struct("<I")

# New formats with their numbers, pickled; the formats' numbers, the times and the payloads of entries, a list for each,
# which takes less time than a tuple for each entry; lines dropped before they got here.
Frame = tuple[bytes, tuple[list[int], tuple[float, ...], tuple[Any, ...]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTargets:
    """Where lines go."""

    console: int | None
    files: Mapping[str, Path]
    max_bytes: int = MAX_BYTES  # of a file, before it is rolled
    levels: Mapping[str, int] = field(default_factory=dict)
    is_json: bool = False

    def open_files(self) -> dict[str, RollingFile]:
        return {channel: RollingFile(path, self.max_bytes) for channel, path in self.files.items()}

    def open(self, files: Mapping[str, RollingFile] | None = None, *, has_access_log: bool = False) -> Logs:
        """Logs that write there themselves."""
        return Logs(
            self.console,
            self.open_files() if files is None else files,
            levels=self.levels,
            is_terminal=False,
            is_json=self.is_json,
            has_access_log=has_access_log,
        )


class LogProcess(Logs):
    """Collects entries as Logs does, and passes them to the process. If that ends, it writes them itself."""

    _gathers_bytes = GATHERED * ENTRY_BYTES
    _gather_many_s = GATHER_MANY_S

    def __init__(self, targets: LogTargets, *, has_access_log: bool = False) -> None:
        super().__init__(None, is_terminal=False, is_json=targets.is_json, has_access_log=has_access_log)
        self._targets = targets
        self._numbers: dict[LineFormat | LineGroup, int] = {}
        self._own: Logs | None = None  # in place of the process
        self._unsent = b""  # the rest of a frame
        self._quiet_since, self._num_at_once = 0.0, 0
        from_server, self._pipe = open_pipe()  # no other process inherits it: its end is that of the server
        self._flushed, to_server = os.pipe()  # a byte for each `flush`
        # In a session of its own: Ctrl-C ends the server, whose last lines are still to be written.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(from_server), str(to_server)],
            pass_fds=(from_server, to_server),
            start_new_session=True,
        )
        os.close(from_server)
        os.close(to_server)
        self._pass_on(pickle.dumps(targets))

    @property
    def pid(self) -> int:
        return self._process.pid

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        super().flush(timeout_s)
        try:
            with self._writing:
                if self._own is not None:
                    return
                self._unsent += framed(marshal.dumps(self._frame([], FLUSH), MARSHAL_VERSION))
                self._send_rest()
            if select.select([self._flushed], [], [], timeout_s)[0]:
                os.read(self._flushed, 1)
        except OSError:
            pass  # the writing thread notices that the process has ended

    def close(self, timeout_s: float = CLOSE_S) -> None:
        super().close(timeout_s)
        if self._own is not None:
            self._own.close(timeout_s)
            return
        os.close(self._pipe)
        os.close(self._flushed)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # it goes on until all is written
        self._own = Logs(self._targets.console, is_terminal=False, is_json=self.is_json)  # for what comes after the end

    def _wake_up(self) -> None:
        """Pass the entry on in the thread that has added it, if the server has little to do.

        The process has the line before the client has its answer, and looks for it. Waking the other thread takes
        longer than this.
        """
        if not self._is_closing and self._is_quiet():
            self._take_gathered()
            if not self._waiting and not self._unsent:
                return
        super()._wake_up()

    def _is_quiet(self) -> bool:
        if (now := time.monotonic()) - self._quiet_since > QUIET_S:
            self._quiet_since, self._num_at_once = now, 0
        self._num_at_once += 1
        return self._num_at_once <= AT_ONCE

    def _take_gathered(self) -> None:
        if not self._writing.acquire(blocking=False):
            return  # another thread is at it
        try:
            if not self._unsent and self._own is None:
                self._pass_on_gathered()
        finally:
            self._writing.release()

    def _pass_on_gathered(self) -> None:
        waiting = self._waiting
        batch = [waiting.popleft() for _ in range(len(waiting))]
        try:
            self._unsent = framed(marshal.dumps(self._frame(batch), MARSHAL_VERSION))
            self._write_unsent()
        except Exception:  # the writing thread meets it too, and handles it
            self._unsent = b""
            waiting.extendleft(reversed(batch))
        else:
            self._taken_bytes += sum([entry[-1] for entry in batch])
            self._num_taken += len(batch)

    def _write_unsent(self) -> None:
        """Write as much as the pipe takes."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]
        except BlockingIOError:
            pass

    # ---- the writing thread ----

    def _write(self, batch: list[Entry]) -> None:
        if self._own is None and self._pass_on(marshal.dumps(self._frame(batch), MARSHAL_VERSION)):
            return
        assert self._own is not None
        self._own.write_batch(batch)

    def _frame(self, batch: list[Entry], dropped: int = 0) -> Frame:
        lines, times, payloads, _ = zip(*batch, strict=True) if batch else ((), (), (), ())
        number_of, new = self._numbers.__getitem__, b""
        try:
            numbers = [*map(number_of, lines)]
        except KeyError:
            new = pickle.dumps(self._number(lines))
            numbers = [*map(number_of, lines)]
        return new, (numbers, times, payloads), dropped

    def _number(self, lines: Iterable[LineFormat | LineGroup]) -> list[tuple[int, LineFormat | LineGroup]]:
        """Number the formats that the process does not know."""
        if len(self._numbers) > MAX_FORMATS:
            self._numbers.clear()
        new = [line for line in dict.fromkeys(lines) if line not in self._numbers]
        self._numbers.update((line, number) for number, line in enumerate(new, len(self._numbers)))
        return [(self._numbers[line], line) for line in new]

    def _pass_on(self, data: bytes) -> bool:
        """Send to the process; False: it has ended, and is replaced."""
        self._unsent += framed(data)
        return self._pass_on_rest()

    def _pass_on_rest(self) -> bool:
        try:
            self._send_rest()
        except OSError as error:
            self._replace_process(error)
            return False
        return True

    def _send_rest(self) -> None:
        while self._unsent:
            self._write_unsent()
            if self._unsent:
                select.select([], [self._pipe], [])

    def _replace_process(self, error: OSError) -> None:
        self._unsent = b""
        os.close(self._pipe)
        os.close(self._flushed)
        self._own = self._targets.open()
        text = f"the log process {self.pid} has ended ({error.strerror}); the server writes its logs itself"
        self._own.write_batch([self._note(text)])

    @property
    def has_gap(self) -> bool:
        return self.num_dropped > self._reported_dropped or (self._own is not None and self._own.has_gap)

    def _report_dropped(self) -> None:
        if self._unsent:
            self._pass_on_rest()
        dropped, self._reported_dropped = self.num_dropped - self._reported_dropped, self.num_dropped
        if self._own is None and dropped and self._pass_on(marshal.dumps(self._frame([], dropped), MARSHAL_VERSION)):
            return
        if self._own is not None:
            self._own.num_dropped += dropped
            self._own.write_batch([])


def framed(data: bytes) -> bytes:
    return _size.pack(len(data)) + data


def open_pipe() -> tuple[int, int]:
    """A large pipe, of which writing does not block."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(AttributeError, OSError):  # not Linux, or more than this user may have
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def main() -> None:
    """Write what the server sends, until it closes the pipe or ends."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to a group or a container: the server ends first
        signal.signal(each, signal.SIG_IGN)
    pipe = int(sys.argv[1])
    first = read_frame(pipe)
    if first is None:
        return
    logs = pickle.loads(first).open()
    formats: dict[int, LineFormat | LineGroup] = {}
    priority = Priority()
    while True:
        if logs.has_gap and not select.select([pipe], [], [], NOTE_S)[0]:
            logs.write_batch([])
            continue
        data = read_frame(pipe)
        if data is None:
            break
        frames: list[Frame] = [marshal.loads(data)]
        times = frames[0][1][1]
        waits = bool(times) and yields(len(times), time.time() - times[0], priority.yields)
        while len(times) < FEW and len(frames) < MANY and frames[-1][-1] != FLUSH and is_readable(pipe):
            data = read_frame(pipe)  # lines that a quiet server sends one by one are written together
            if data is None:
                break
            frames.append(marshal.loads(data))
        priority.run(partial(take_frames, frames, formats, logs), yields=waits)
        if frames[-1][-1] == FLUSH:
            os.write(int(sys.argv[2]), b"f")
        if data is None:
            break
    logs.close()


def yields(num_entries: int, age_s: float, yielded: bool) -> bool:
    """Whether such entries are written only while a core is idle.

    A server with little to do has its lines at once. A busy one would wait for a core while its lines are written; it
    sends many at a time, and a few in between.
    """
    return num_entries >= (FEW if yielded else MANY) and age_s < LATE_S


class Priority:
    """Runs functions in this thread, or in one that runs only while a core is idle.

    A process of a user other than root that has given up its priority cannot take it back; a second thread need not.
    """

    def __init__(self) -> None:
        self.yields = False
        self._idle: ThreadPoolExecutor | None = None

    def run(self, function: Callable[[], None], *, yields: bool) -> None:
        self.yields = yields
        if not yields:
            function()
            return
        self._idle = self._idle or ThreadPoolExecutor(1, initializer=wait_for_idle_cores)
        self._idle.submit(function).result()


def wait_for_idle_cores() -> None:
    """Give the calling thread the lowest priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        pass  # not Linux, or a sandbox that does not allow it


def take_frames(frames: list[Frame], formats: dict[int, LineFormat | LineGroup], logs: Logs) -> None:
    """Write the entries of frames."""
    batch: list[Entry] = []
    for new, (numbers, times, payloads), dropped in frames:
        formats.update(pickle.loads(new) if new else ())
        logs.num_dropped += max(0, dropped)  # FLUSH is none
        batch += zip(map(formats.__getitem__, numbers), times, payloads, repeat(0))
    logs.write_batch(batch)


def is_readable(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


def read_frame(pipe: int) -> bytes | None:
    """The next frame; None if the server is gone."""
    head = read_exactly(pipe, _size.size)
    return None if head is None else read_exactly(pipe, _size.unpack(head)[0])


def read_exactly(pipe: int, size: int) -> bytes | None:
    pieces = []
    while size:
        piece = os.read(pipe, size)
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


if __name__ == "__main__":
    logging.raiseExceptions = False
    main()
