"""Logs: collects lines of the whole server, access lines too; one thread writes them, so no disk blocks the server."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any

from flambeau.logs.line_formats import (
    ACCESS,
    MODEL,
    MODEL_METRICS,
    SERVER,
    TS_METRICS,
    full_line,
    local_time,
    masked,
    printable,
    short_line,
    terminal_line,
    tidy,
)
from flambeau.logs.rolling_file import RollingFile

MAX_WAITING = 200_000  # entries; further ones are dropped and counted
GATHER_S = 0.005  # pause between two writes, so that lines are written together
GATHER_MANY_S = 0.05  # the same under load: each wake-up of this thread takes the interpreter from the server
MANY = 50
QUIET_S = 0.2  # below MANY lines in this time, there is no pause
AT_A_TIME = 500
PATIENCE_S = 0.5  # how long a console may block before lines are dropped
PIPE_BYTES = 4096  # a pipe that is ready accepts this much without blocking

_SHORT = frozenset((ACCESS, TS_METRICS, MODEL_METRICS))

# A text, several lines of output, or a function with its arguments; the time is appended to them.
Payload = str | list[bytes] | tuple[Any, ...]
Entry = tuple[str, float, int, str, str, Payload]


class Logs:
    """Accepts entries without blocking; its own thread formats and writes them.

    With files, every line also goes to the server's file and, in the same layout, to the console.
    """

    def __init__(
        self,
        console: int | None = 2,
        files: Mapping[str, RollingFile] | None = None,
        *,
        levels: Mapping[str, int] | None = None,
        is_terminal: bool = True,
        has_access_log: bool = False,
    ) -> None:
        self.has_access_log = has_access_log
        self.num_dropped = 0
        self._console = console
        self._files = dict(files or {})
        self._levels = dict(levels or {})
        self.is_terminal = is_terminal
        self._waiting: deque[Entry] = deque()
        self._wake = threading.Event()
        self._is_closing = self._is_closed = False
        self._reported_dropped = 0
        self._starting = threading.Lock()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, channel: str, level: int, thread: str, logger: str, payload: Payload) -> None:
        """Log an entry; never blocks."""
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        self._waiting.append((channel, time.time(), level, thread, logger, payload))
        if self._is_closed:  # from the end of the process
            self._write_all()
            return
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._start()

    def put_now(self, channel: str, level: int, thread: str, logger: str, text: str) -> None:
        """Log a rare event: immediately if that cannot block, else like `put`."""
        if not self._waiting and not self._is_closed and self._writing.acquire(blocking=False):
            try:
                if self._write_at_once((channel, time.time(), level, thread, logger, text)):
                    return
            finally:
                self._writing.release()
        self.put(channel, level, thread, logger, text)

    def close(self, timeout_s: float = 3.0) -> None:
        """Write the waiting entries, for at most `timeout_s`."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return  # the thread continues until the process ends
        self._is_closed = True
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
        since, recent = 0.0, 0
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_closing
            try:
                count = self._write_all()
            except Exception:  # the logs must survive any error
                traceback.print_exc()
                count = 0
            if is_last:
                break
            if (now := time.monotonic()) - since > QUIET_S:
                since, recent = now, 0
            recent += count
            if recent > MANY:  # an idle server writes at once, so that a client that has its answer finds the line
                time.sleep(GATHER_MANY_S if count > MANY else GATHER_S)

    def _write_all(self) -> int:
        count = 0
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_A_TIME))]
            with self._writing:
                self._write(batch)
            count += len(batch)
            time.sleep(0)  # yield the interpreter to the server
        if self.num_dropped > self._reported_dropped:
            dropped, self._reported_dropped = self.num_dropped - self._reported_dropped, self.num_dropped
            text = f"{dropped} log lines were dropped: they arrived faster than they could be written"
            with self._writing:
                self._write([(SERVER, time.time(), logging.WARNING, "logs", __name__, text)])
        return count

    def _write(self, batch: list[Entry]) -> None:
        console, files = self._format_all(batch)
        for channel, data in files.items():
            self._append(channel, data)
        if self._console is not None and not write_patiently(self._console, console):
            self.num_dropped += console.count(b"\n")

    def _write_at_once(self, entry: Entry) -> bool:
        """Write to the console only: whether it accepts the line can be known; for a disk it cannot."""
        if self._console is None or self._files:
            return False
        console, _ = self._format_all([entry])
        if len(console) > PIPE_BYTES or not is_ready(self._console):
            return False
        return write_patiently(self._console, console)

    def _format_all(self, batch: list[Entry]) -> tuple[bytes, dict[str, bytes]]:
        console: list[str] = []
        files: dict[str, list[str]] = {channel: [] for channel in self._files}
        for entry in batch:
            self._format(entry, console, files)
        formatted = {channel: encode(lines) for channel, lines in files.items() if lines}
        is_same = not self.is_terminal and SERVER in files  # the server's file then equals the console
        return formatted.get(SERVER, b"") if is_same else encode(console), formatted

    def _format(self, entry: Entry, console: list[str], files: dict[str, list[str]]) -> None:
        channel, created, level, thread, logger, payload = entry
        if level < self._levels.get(channel, 0):
            return
        if type(payload) is list:
            messages = [line.decode("utf-8", "replace") for line in payload]
        elif type(payload) is tuple:
            messages = [payload[0](*payload[1:], created)]
        else:
            messages = [str(payload)]
        if self.is_terminal:
            is_output = channel == MODEL
            console += [f"{thread} {m}\n" if is_output else terminal_line(created, level, m) for m in messages]
            if not files:
                return
        stamp = local_time(created)
        lines = [full_line(stamp, level, thread, logger, message) for message in messages]
        if SERVER in files:
            files[SERVER] += lines
        elif not self.is_terminal:
            console += lines
        if channel in files and channel != SERVER:
            files[channel] += [short_line(stamp, m) for m in messages] if channel in _SHORT else lines

    def _append(self, channel: str, data: bytes) -> None:
        try:
            self._files[channel].write(data)
        except (OSError, ValueError) as error:
            file = self._files.pop(channel)
            text = f"{file.path} cannot be written any more ({error}); its lines go to the console only"
            self._waiting.append((SERVER, time.time(), logging.WARNING, "logs", __name__, text))


class QueueHandler(logging.Handler):
    """Passes records of Python's logging to Logs; a record's `worker` is shown as its thread."""

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except Exception:
            self.handleError(record)
            return
        thread = getattr(record, "worker", None) or record.threadName or "main"
        thread = "main" if thread == "MainThread" else thread
        channel = record.name if record.name in (ACCESS, MODEL, TS_METRICS, MODEL_METRICS) else SERVER
        self._logs.put_now(channel, record.levelno, printable(thread), record.name, tidy(message))


def encode(lines: list[str]) -> bytes:
    return "".join(lines).encode("utf-8", "backslashreplace")


def is_ready(descriptor: int) -> bool:
    """Whether a console accepts data now; a closed one always does."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(0))


def write_patiently(descriptor: int, data: bytes) -> bool:
    """Write to a console; False if it accepts nothing for PATIENCE_S, as a pipe without a reader."""
    view = memoryview(data)
    poller = select.poll()
    try:
        poller.register(descriptor, select.POLLOUT)
        while view:
            if not poller.poll(PATIENCE_S * 1000):
                return False
            view = view[os.write(descriptor, view[:PIPE_BYTES]) :]
    except OSError:
        pass  # a closed terminal is ignored
    return True


class AccessLog:
    """Logs each call: client, request, status and duration."""

    def __init__(self, logs: Logs) -> None:
        self._put = logs.put

    def http(self, remote: str, method: str, path: str, query: str, version: str, status: int, seconds: float) -> None:
        """Log an HTTP exchange; the logs' thread formats the line."""
        payload = (http_line, remote, method, path, query, version, status, seconds)
        self._put(ACCESS, logging.INFO, "main", ACCESS, payload)

    def grpc(self, peer: str, method: str, code: int, seconds: float) -> None:
        """Log a gRPC call: `peer` and `method` in grpc's form, `code` as a number."""
        self._put(ACCESS, logging.INFO, "main", ACCESS, (grpc_line, peer, method, code, seconds))


def http_line(
    remote: str, method: str, path: str, query: str, version: str, status: int, seconds: float, created: float
) -> str:
    target = printable(f"{path}?{masked(query)}" if query else path or "-")
    return f'{remote} "{method or "-"} {target} HTTP/{version}" {status} {max(0, round(seconds * 1000))}'


def grpc_line(peer: str, method: str, code: int, seconds: float, created: float) -> str:
    return f'{remote_of(peer)} "gRPC {method.lstrip("/")} HTTP/2.0" {code} {max(0, round(seconds * 1000))}'


def remote_of(peer: object) -> str:
    """`/host:port` of a socket's peer name or of grpc's `ipv4:host:port`; `/local` for a unix socket."""
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"/{peer[0]}:{peer[1]}"
    if isinstance(peer, str):
        scheme, _, rest = peer.partition(":")
        if scheme in ("ipv4", "ipv6"):
            return "/" + rest.replace("%5B", "").replace("%5D", "").replace("[", "").replace("]", "")
    return "/local"
