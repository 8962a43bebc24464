"""WorkerOutput: forwards what a worker prints to the model log and keeps the last lines for error reports."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from flambeau.logs.json_lines import record_format
from flambeau.logs.line_formats import MODEL, LineFormat
from flambeau.logs.writer import Logs, bytes_of
from flambeau.metrics.definitions import Sample
from flambeau.metrics.log_lines import MARK as METRICS_MARK
from flambeau.metrics.log_lines import parse_line
from flambeau.serving.events import ServerEvents
from flambeau.wire.log_records import RECORD, WorkerRecord, read_record

MARK = METRICS_MARK.encode()

KEPT_LINES = 100
REPORTED_LINES = 30  # of them, with a failure
KEPT_LINE_BYTES = 500
CHUNK_BYTES = 64 * 1024
LINES_A_TURN = 64  # a metric takes tens of microseconds; other work of the server goes on in between


class OutputStream(Protocol):
    """What a worker prints, in chunks; an empty one is the end."""

    async def read(self, size: int, /) -> bytes: ...


class Tail:
    """The last lines of a worker's output."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)

    def add(self, lines: list[bytes]) -> None:
        self._lines.extend(line[:KEPT_LINE_BYTES] for line in lines[-KEPT_LINES:])

    def lines(self, most: int = REPORTED_LINES) -> tuple[str, ...]:
        """The last lines as text, without the empty ones."""
        found = [line for line in self._lines if line.strip()]
        return tuple(line.decode("utf-8", "replace") for line in found[-most:])


class WorkerOutput:
    """The output of one worker process: metrics lines become samples, the rest goes to the model log.

    Workers of a server with JSON logs print records of Python's logging as WorkerRecords.
    """

    def __init__(
        self,
        logs: Logs,
        name: str,
        on_samples: Callable[[list[Sample]], None],
        events: ServerEvents,
        model: str = "",
    ) -> None:
        self.name = name
        self.tail = Tail()
        self._logs = logs
        self._model = model
        self._out = LineFormat(MODEL, logging.INFO, f"{name}-stdout", MODEL, worker=name, model=model)
        self._error = LineFormat(MODEL, logging.WARNING, f"{name}-stderr", MODEL, worker=name, model=model)
        self._on_samples = on_samples
        self._events = events

    def of_rank(self, rank: int) -> WorkerOutput:
        """The output of another process of the same worker."""
        if rank == 0:
            return self
        return WorkerOutput(self._logs, f"{self.name}-rank-{rank}", self._on_samples, self._events, self._model)

    async def forward(self, stream: OutputStream, *, is_error: bool) -> None:
        """Forward stdout or stderr until it ends, in chunks: handlers may print megabytes."""
        rest = b""
        while chunk := await stream.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK_BYTES:  # a line without an end: pass it on in pieces
                lines, rest = [*lines, rest], b""
            for start in range(0, len(lines), LINES_A_TURN):
                if start:
                    await asyncio.sleep(0)
                self._take(lines[start : start + LINES_A_TURN], is_error=is_error)
        if rest:
            self._take([rest], is_error=is_error)

    def _take(self, lines: list[bytes], *, is_error: bool) -> None:
        if not is_error and any(MARK in line for line in lines):
            lines = [line for line in lines if not self._is_metric(line)]
            if not lines:
                return
        line = self._error if is_error else self._out
        if self._logs.is_json and any(one.startswith(RECORD) for one in lines):
            self._take_records(line, lines)
            return
        self._logs.add(line, lines, bytes_of(lines))
        self.tail.add(lines)

    def _take_records(self, line: LineFormat, lines: list[bytes]) -> None:
        """Log records under their own level and logger; what is none, as it is."""
        for one in lines:
            record = read_record(one) if one.startswith(RECORD) else None
            if record is None:
                self._logs.add(line, [one], bytes_of([one]))
                self.tail.add([one])
            else:
                self._log_record(record)

    def _log_record(self, record: WorkerRecord) -> None:
        line = record_format(MODEL, record.level, self.name, record.logger, self.name, self._model)
        self._logs.add(line, (record.message, record.fields), len(record.message))
        text = f"{record.message}\n{record.fields.get('exception', '')}".rstrip()
        self.tail.add(text.encode("utf-8", "replace").split(b"\n"))

    def _is_metric(self, line: bytes) -> bool:
        """Whether a line is a metric; then its sample is taken."""
        start = line.find(MARK)
        if start < 0:
            return False
        text = line[start + len(MARK) :].decode("utf-8", "replace")
        sample = parse_line(text)
        if sample is None:
            self._events.metric_rejected(self.name, text[:KEPT_LINE_BYTES])
        else:
            self._on_samples([sample])
        return True


class KernelKills:
    """Whether the kernel has just killed a process for lack of memory. One that it killed long ago explains nothing."""

    def __init__(self) -> None:
        self._before = self._latest = count_kernel_kills()

    def look(self) -> None:
        """Call it from time to time: a kill counts until the second call after it."""
        self._before, self._latest = self._latest, count_kernel_kills()

    @property
    def has_new(self) -> bool:
        return count_kernel_kills() > self._before


def count_kernel_kills() -> int:
    """How many processes the kernel has killed for lack of memory so far, in this control group or on this host."""
    for source in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(source).read_text().splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0
