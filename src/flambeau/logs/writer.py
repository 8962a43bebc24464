"""Logs: collects lines of the whole server, access lines too; one thread writes them, so no disk blocks the server."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any

from flambeau.logs.console import PIPE_BYTES, Console
from flambeau.logs.json_lines import json_lines
from flambeau.logs.line_formats import (
    MODEL,
    SERVER,
    LineFormat,
    LineGroup,
    local_time,
    message_format,
    terminal_line,
)
from flambeau.logs.rolling_file import RollingFile

MAX_WAITING_BYTES = 32 << 20  # further entries are dropped and counted
ENTRY_BYTES = 400  # of an entry without its text, roughly
LINE_BYTES = 50  # the same of each line in a list
GATHER_S = 0.005  # pause between two writes, so that lines are written together
GATHER_MANY_S = 0.05  # the same under load: each wake-up of this thread takes the interpreter from the server
MANY = 50
QUIET_S = 0.2  # below MANY lines in this time, there is no pause
AT_A_TIME = 1000  # about a millisecond, in which the server waits for the interpreter
BYTES_AT_A_TIME = 1 << 20
FLUSH_S = 2.0
NOTE_S = 1.0  # between two attempts to report dropped lines

# A text, several lines of output, or the values that the format makes a text of.
Payload = str | list[bytes] | tuple[Any, ...]
# Format, time, payload and bytes. The payload of a group has a value for each of its lines.
Entry = tuple[LineFormat | LineGroup, float, Payload, int]
Line = tuple[LineFormat, float, Payload, int]


class Logs:
    """Accepts entries without blocking; its own thread formats and writes them.

    With files, every line also goes to the server's file and, in the same layout, to the console. What waits is
    bounded; a line reports how many were dropped, as soon as it can be written.
    """

    _gathers_bytes = sys.maxsize  # nobody but its thread takes entries
    _gather_many_s = GATHER_MANY_S

    def __init__(
        self,
        console: int | None = 2,
        files: Mapping[str, RollingFile] | None = None,
        *,
        levels: Mapping[str, int] | None = None,
        is_terminal: bool = True,
        is_json: bool = False,
        has_access_log: bool = False,
    ) -> None:
        self.has_access_log = has_access_log
        self.is_json = is_json  # every line is a JSON document, also in the files of the single logs
        self.num_dropped = 0
        self._console = None if console is None else Console(console, self._console_note)
        self._files = dict(files or {})
        self._failed = {channel for channel, file in self._files.items() if file.problem}  # and reported
        self._levels = dict(levels or {})
        self.is_terminal = is_terminal
        self._waiting: deque[Entry] = deque()
        # Several threads add, only the writing one takes: the difference may be off by an entry until it is empty.
        self._added_bytes = self._taken_bytes = 0
        self._num_taken = 0
        self._wake = threading.Event()
        self._will_write = False  # the writing thread has yet to look for entries
        self._is_closing = self._is_closed = False
        self._reported_dropped = 0
        self._starting = threading.Lock()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, channel: str, level: int, thread: str, logger: str, payload: str | list[bytes]) -> None:
        """Log a text or several lines of output; never blocks."""
        self.add(message_format(channel, level, thread, logger), payload, bytes_of(payload))

    def add(self, line: LineFormat | LineGroup, payload: Payload, num_bytes: int = 0) -> None:
        """Log an entry; never blocks. Each request logs several, so this only stores them.

        `num_bytes` is the size of the payload, if it may be large.
        """
        size = ENTRY_BYTES + num_bytes
        waiting_bytes = self._added_bytes - self._taken_bytes + size
        if waiting_bytes > MAX_WAITING_BYTES:
            self.num_dropped += len(payload) if type(payload) is list or type(line) is LineGroup else 1
            return
        self._added_bytes += size
        self._waiting.append((line, time.time(), payload, size))
        if not self._will_write:
            self._wake_up()
        elif waiting_bytes >= self._gathers_bytes:
            self._take_gathered()

    def _take_gathered(self) -> None:
        """`_gathers_bytes` wait: take all in the thread that has added the last, if that cannot block."""

    def _wake_up(self) -> None:
        if self._is_closed:  # from the end of the process
            self._write_all()
            return
        self._will_write = True
        self._wake.set()
        if self._thread is None:
            self._start()

    def add_now(self, line: LineFormat, payload: Payload, num_bytes: int = 0) -> None:
        """Log a rare event: immediately if that cannot block, else like `add`."""
        if not self._waiting and not self._is_closed and self._writing.acquire(blocking=False):
            try:
                if self._write_at_once((line, time.time(), payload, 0)):
                    return
            finally:
                self._writing.release()
        self.add(line, payload, num_bytes)

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until what was added so far is written, for at most `timeout_s`. Not for the event loop."""
        deadline, wanted = time.monotonic() + timeout_s, self._added_bytes
        while self._taken_bytes < wanted and not self._is_closed and time.monotonic() < deadline:
            time.sleep(0.001)

    def close(self, timeout_s: float = 3.0) -> None:
        """Write the waiting entries, for at most `timeout_s`."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return  # the thread continues until the process ends
        self._is_closed = True
        self._will_write = False
        if self._waiting:  # added while the thread ended
            self._write_all()
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
                self._thread.start()

    # ---- the writing thread ----

    def _run(self) -> None:
        since, recent, before = 0.0, 0, 0
        while True:
            self._wake.wait(NOTE_S if self.has_gap else None)
            self._wake.clear()
            self._will_write = False  # before it looks: what is added from now on wakes it again
            is_last = self._is_closing
            self._write_waiting()
            if is_last:
                break
            if (now := time.monotonic()) - since > QUIET_S:
                since, recent = now, 0
            count, before = self._num_taken - before, self._num_taken
            recent += count
            if recent > MANY:  # an idle server writes at once, so that a client that has its answer finds the line
                time.sleep(self._gather_many_s if count > MANY else GATHER_S)

    def write_batch(self, batch: list[Entry]) -> None:
        """Write entries that were collected elsewhere, in the calling thread; it is the only one that writes."""
        self._write_waiting(batch)

    def _write_waiting(self, collected: list[Entry] | None = None) -> None:
        try:
            if collected:
                self._write(collected)
            self._write_all()
        except Exception:  # the logs must survive any error
            self._report(f"a log line could not be written:\n{traceback.format_exc()}", logging.ERROR)
            self._wake.set()

    def _write_all(self) -> None:
        while self._waiting:
            with self._writing:
                batch, num_bytes = self._next_batch()
                try:
                    self._write(batch)
                finally:
                    self._taken_bytes += num_bytes
            self._num_taken += len(batch)
            time.sleep(0)  # yield the interpreter to the server
        self._taken_bytes = self._added_bytes
        with self._writing:
            self._report_dropped()

    def _next_batch(self) -> tuple[list[Entry], int]:
        batch: list[Entry] = []
        num_bytes = 0
        waiting = self._waiting
        for _ in range(min(len(waiting), AT_A_TIME)):
            entry = waiting.popleft()
            batch.append(entry)
            num_bytes += entry[-1]
            if num_bytes > BYTES_AT_A_TIME:
                break
        return batch, num_bytes

    def _write(self, batch: list[Entry]) -> None:
        console, files = self._format_all(batch)
        for channel, data in files.items():
            self._append(channel, data)
        if self._console is not None:
            self._console.write(console)

    @property
    def has_gap(self) -> bool:
        """Whether lines were dropped and this is not reported yet."""
        return self.num_dropped > self._reported_dropped or (self._console is not None and self._console.num_lost > 0)

    def _report_dropped(self) -> None:
        """Report the lines that were dropped while too much was waiting, and those that the console missed."""
        file = self._files.get(SERVER)
        dropped = self.num_dropped - self._reported_dropped
        if file is None and self._console is not None:
            self._console.num_lost += dropped  # its own note reports them, as soon as it accepts one
        elif file is not None and dropped and not file.problem:
            self._write([self._note(dropped_text(dropped))])
        elif file is not None:
            dropped = 0  # the file reports them when it can be written again
        self._reported_dropped += dropped
        if self._console is not None:
            self._console.write(b"")

    def _report(self, text: str, level: int = logging.WARNING) -> None:
        self._waiting.append(self._note(text, level))

    @staticmethod
    def _note(text: str, level: int = logging.WARNING) -> tuple[LineFormat, float, str, int]:
        return message_format(SERVER, level, "logs", __name__), time.time(), text, 0

    def _console_note(self, lost: int) -> bytes:
        line, now, text, _ = self._note(dropped_text(lost))
        if self.is_json:
            return json_lines(line, now, text)
        if self.is_terminal:
            return terminal_line(now, line.level, str(text)).encode()
        return f"{local_time(now)}{line.full}{text}\n".encode()

    def _write_at_once(self, entry: Entry) -> bool:
        """Write to the console only: whether it accepts the line can be known; for a disk it cannot."""
        if self._console is None or self._files:
            return False
        console, _ = self._format_all([entry])
        if len(console) > PIPE_BYTES or not self._console.accepts_at_once:
            return False
        self._console.write(console)
        return True

    def _format_all(self, batch: list[Entry]) -> tuple[bytes, dict[str, bytes]]:
        if self._levels:
            batch = [line for line in lines_of(batch) if line[0].level >= self._levels.get(line[0].channel, 0)]
        if self.is_json:
            return self._format_json(lines_of(batch))
        files: dict[str, list[str]] = {channel: [] for channel in self._files}
        lines: list[str] = files.pop(SERVER, [])
        if self._files or not self.is_terminal:
            self._format(batch, lines, files)
        formatted = {channel: encode(own) for channel, own in files.items() if own}
        every = encode(lines)
        if lines and SERVER in self._files:
            formatted[SERVER] = every
        return encode(terminal_lines(lines_of(batch))) if self.is_terminal else every, formatted

    def _format_json(self, found: list[Line]) -> tuple[bytes, dict[str, bytes]]:
        made = [(line.channel, json_lines(line, created, payload)) for line, created, payload, _ in found]
        every = b"".join([text for _, text in made])
        files = {SERVER: every} if every and SERVER in self._files else {}
        for channel in self._files.keys() - {SERVER}:
            if own := b"".join([text for its, text in made if its == channel]):
                files[channel] = own
        return every, files

    @staticmethod
    def _format(batch: list[Entry], lines: list[str], files: dict[str, list[str]]) -> None:
        """Add every line to `lines`, and those of logs with files of their own to `files`.

        Under load this loop takes most of the time of the logs: it calls no more than it must.
        """
        since = until = 0.0  # of the millisecond that `stamp` names
        stamp, second = "", 0
        for line, created, payload, _ in batch:
            if not since <= created < until:
                since, until = created, (int(created * 1000) + 1) / 1000
                stamp, second = local_time(created), int(created)
            if isinstance(line, LineGroup):
                for one, value in zip(line.lines, payload, strict=True):
                    text = one.to_text(value, second)
                    lines.append(f"{stamp}{one.full}{text}\n")
                    if (own := files.get(one.channel)) is not None:
                        own.append(f"{stamp}{one.own}{text}\n")
                continue
            if type(payload) is tuple:
                text = line.to_text(*payload, second) if payload else line.text_at(second)
            elif type(payload) is list:
                text = f"\n{stamp}{line.full}".join([one.decode("utf-8", "replace") for one in payload])
            else:
                text = str(payload)
            lines.append(f"{stamp}{line.full}{text}\n")
            if (own := files.get(line.channel)) is not None:
                own.append(f"{stamp}{line.own}{text}\n")

    def _append(self, channel: str, data: bytes) -> None:
        file = self._files[channel]
        file.write(data)
        if file.problem and channel not in self._failed:
            self._failed.add(channel)
            self._report(f"{file.path} cannot be written ({file.problem}); its lines go to the console only")
        elif not file.problem and channel in self._failed:
            self._failed.remove(channel)
            lost, file.num_lost = file.num_lost, 0
            self._report(f"{file.path} is written again; {lost} log lines were dropped")


def bytes_of(payload: str | list[bytes]) -> int:
    """What a text or several lines take in memory, roughly."""
    return len(payload) if isinstance(payload, str) else sum(map(len, payload)) + LINE_BYTES * len(payload)


def lines_of(batch: list[Entry]) -> list[Line]:
    """The entries, and the lines of groups one by one."""
    lines: list[Line] = []
    for line, created, payload, _ in batch:
        if isinstance(line, LineGroup):
            lines += [(one, created, (value,), 0) for one, value in zip(line.lines, payload, strict=True)]
        else:
            lines.append((line, created, payload, 0))
    return lines


def terminal_lines(found: list[Line]) -> list[str]:
    lines: list[str] = []
    for line, created, payload, _ in found:
        if type(payload) is list:
            texts = [one.decode("utf-8", "replace") for one in payload]
        elif type(payload) is tuple:
            texts = [line.to_text(*payload, int(created))]
        else:
            texts = [str(payload)]
        is_output = line.channel == MODEL
        lines += [f"{line.thread} {one}\n" if is_output else terminal_line(created, line.level, one) for one in texts]
    return lines


def dropped_text(number: int) -> str:
    return f"{number} log lines were dropped: they could not be written in time"


def encode(lines: list[str]) -> bytes:
    return "".join(lines).encode("utf-8", "backslashreplace")
