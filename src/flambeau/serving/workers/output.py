"""What workers print: passed on to the model log, with the last lines kept as evidence."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from flambeau.logs.layouts import MODEL
from flambeau.logs.writer import Logs
from flambeau.metrics.log_lines import MARK as METRICS_MARK
from flambeau.metrics.log_lines import parse_line
from flambeau.metrics.samples import Sample

logger = logging.getLogger(__name__)

MARK = METRICS_MARK.encode()

KEPT_LINES = 30
KEPT_LINE_BYTES = 500
CHUNK_BYTES = 64 * 1024


class Tail:
    """The last lines a worker wrote."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)

    def add(self, lines: list[bytes]) -> None:
        """Take note of whole lines."""
        self._lines.extend(line[:KEPT_LINE_BYTES] for line in lines[-KEPT_LINES:])

    def lines(self) -> tuple[str, ...]:
        """The last lines as text, without the empty ones."""
        return tuple(line.decode("utf-8", "replace") for line in self._lines if line.strip())


class WorkerOutput:
    """Takes what one worker prints: metrics are counted, the rest goes to the model log."""

    def __init__(self, logs: Logs, name: str, on_samples: Callable[[list[Sample]], None]) -> None:
        self.tail = Tail()
        self._logs = logs
        self._name = name
        self._on_samples = on_samples
        self.is_told = not logs.is_terminal  # what TorchServe's workers would say is said for them

    def of_rank(self, rank: int) -> WorkerOutput:
        """The same for another process of the worker, with last lines of its own."""
        return WorkerOutput(self._logs, f"{self._name}-rank-{rank}", self._on_samples) if rank else self

    def say(self, *lines: str) -> None:
        """Write what tools expect to find among a worker's output; a terminal is spared."""
        if self.is_told:
            encoded = [line.encode("utf-8", "backslashreplace") for line in lines]
            self._logs.put(MODEL, logging.INFO, f"{self._name}-stdout", MODEL, encoded)

    async def forward(self, stream: asyncio.StreamReader, *, is_error: bool) -> None:
        """Pass one of its streams on until it ends.

        Whole chunks are handled at once, so a handler that prints megabytes costs the server little.
        """
        rest = b""
        while chunk := await stream.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK_BYTES:  # a line without an end
                lines, rest = [*lines, rest], b""
            if lines:
                self._take(lines, is_error=is_error)
        if rest:
            self._take([rest], is_error=is_error)

    def _take(self, lines: list[bytes], *, is_error: bool) -> None:
        if not is_error and any(MARK in line for line in lines):
            lines = [line for line in lines if not self._is_metric(line)]
            if not lines:
                return
        level, end = (logging.WARNING, "stderr") if is_error else (logging.INFO, "stdout")
        self._logs.put(MODEL, level, f"{self._name}-{end}", MODEL, lines)
        self.tail.add(lines)

    def _is_metric(self, line: bytes) -> bool:
        """Whether a line stands for a metric, which is then counted."""
        start = line.find(MARK)
        if start < 0:
            return False
        text = line[start + len(MARK) :].decode("utf-8", "replace")
        sample = parse_line(text)
        if sample is None:
            logger.error('Failed to parse metrics line: "%s".', text, extra={"worker": f"{self._name}-stdout"})
        else:
            self._on_samples([sample])
        return True


def count_kernel_kills() -> int:
    """How many processes the kernel has killed for want of memory, so far: in our control group, or at all."""
    for source in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(source).read_text().splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0
