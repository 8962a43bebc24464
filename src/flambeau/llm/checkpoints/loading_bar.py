"""A progress bar on the terminal for loading a checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[int, int], None]  # bytes done, total bytes

WIDTH = 30
INTERVAL_S = 0.1


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


def bar(name: str, done_bytes: int, total_bytes: int) -> str:
    """One line: `loading tiny  [#####.....]  50%  1.2 of 2.4 GB`."""
    part = done_bytes / total_bytes if total_bytes else 1.0
    filled = round(part * WIDTH)
    unit, size = ("GB", 1e9) if total_bytes >= 1e9 else ("MB", 1e6)
    amount = f"{done_bytes / size:.1f} of {total_bytes / size:.1f} {unit}"
    return f"loading {name}  [{'#' * filled}{'.' * (WIDTH - filled)}]  {part:4.0%}  {amount}"


def terminal_bar(name: str) -> Progress | None:
    """A bar if stderr is a terminal, else None."""
    return LoadingBar(name) if sys.stderr.isatty() else None
