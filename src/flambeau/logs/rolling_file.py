"""RollingFile: a log file that is rolled daily and at a size; old files are compressed."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
import time
from pathlib import Path

MAX_BYTES = 100 << 20
KEPT = 5


class RollingFile:
    """Appends to a file; used by one thread. Compression runs in a thread of its own."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._kept = kept
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def write(self, data: bytes) -> None:
        """Append whole lines."""
        if self._size and (self._size + len(data) > self._max_bytes or day_of(time.time()) != self._day):
            self.roll()
        self._file.write(data)
        self._size += len(data)

    def roll(self) -> None:
        """Rename the current file and start an empty one."""
        self._file.close()
        aside = free_name(self.path, self._written)
        os.replace(self.path, aside)
        self._open()
        try:
            threading.Thread(target=self._compress, args=(aside,), name="compress-log").start()
        except RuntimeError:
            pass  # no more threads: the file stays uncompressed

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        state = os.fstat(self._file.fileno())
        self._size = state.st_size
        self._written = state.st_mtime if self._size else time.time()
        self._day = day_of(self._written)

    def _compress(self, aside: Path) -> None:
        try:
            with aside.open("rb") as source, gzip.open(f"{aside}.gz", "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            aside.unlink()
            for old in packed(self.path)[: -self._kept]:
                old.unlink()
        except OSError:
            pass  # the file stays uncompressed


def free_name(path: Path, written: float) -> Path:
    """`<name>.<dd-MMM>.log`, with a number if that name is taken."""
    stem = f"{path.stem}.{time.strftime('%d-%b', time.localtime(written))}"
    number = 0
    while True:
        aside = path.with_name(f"{stem}.{number}{path.suffix}" if number else f"{stem}{path.suffix}")
        if not aside.exists() and not aside.with_name(f"{aside.name}.gz").exists():
            return aside
        number += 1


def packed(path: Path) -> list[Path]:
    """The compressed files, oldest first."""
    found = path.parent.glob(f"{path.stem}.*{path.suffix}.gz")
    return sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name))


def day_of(seconds: float) -> tuple[int, int]:
    """(year, day of the year), local."""
    day = time.localtime(seconds)
    return day.tm_year, day.tm_yday
