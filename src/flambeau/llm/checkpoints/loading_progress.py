"""How far a model is loaded: a bar on a terminal, else lines of the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, total bytes
WIDTH = 30
INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0


class LoadingBar:
    """Redraws one line, at most ten times a second."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, stream or sys.stderr
        self._drawn_at = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if done_bytes < total_bytes and now - self._drawn_at < INTERVAL_S:
            return
        self._drawn_at = now
        self._stream.write("\r" + bar(self._name, done_bytes, total_bytes))
        if done_bytes >= total_bytes:
            self._stream.write("\n")
        self._stream.flush()


class LoadingLog:
    """Logs a line every ten seconds: nothing for a model that is loaded sooner."""

    def __init__(self, name: str) -> None:
        self._name, self._logged_at = name, time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.info("loading %s: %s", self._name, amount(done_bytes, total_bytes))


def progress_of(name: str) -> Progress:
    """A bar if stderr is a terminal, else lines of the log."""
    return LoadingBar(name) if sys.stderr.isatty() else LoadingLog(name)


def bar(name: str, done_bytes: int, total_bytes: int) -> str:
    """One line: `loading tiny  [#####.....]  50%  1.2 of 2.4 GB`."""
    part = done_bytes / total_bytes if total_bytes else 1.0
    filled = round(part * WIDTH)
    return f"loading {name}  [{'#' * filled}{'.' * (WIDTH - filled)}]  {part:4.0%}  {amount(done_bytes, total_bytes)}"


def amount(done_bytes: int, total_bytes: int) -> str:
    unit, size = ("GB", 1e9) if total_bytes >= 1e9 else ("MB", 1e6)
    return f"{done_bytes / size:.1f} of {total_bytes / size:.1f} {unit}"
