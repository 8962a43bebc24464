"""RollingFile: a log file that is rolled daily and at a size; old files are compressed."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import stat
import threading
import time
from functools import lru_cache
from pathlib import Path

MAX_BYTES = 100 << 20
KEPT = 5
MODE = 0o640  # lines may hold what clients send; log shippers read them by group
RETRY_S = 1.0  # until a file that failed is opened again
CHECK_S = 1.0  # between two checks that the path still names the open file
ROLL_RETRY_S = 60.0


class RollingFile:
    """Appends to a file; used by one thread. Compression runs in a thread of its own.

    It never raises: lines that cannot be written are counted, and the file is opened again later. The same happens
    if it is deleted or moved away.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self.path = path
        self.problem = ""  # why it cannot be written; empty if it can
        self.num_lost = 0  # lines, until somebody resets it
        self._max_bytes = max_bytes
        self._kept = kept
        self._file: io.FileIO | None = None
        self._size = 0
        self._retry_at = self._check_at = self._roll_at = 0.0
        self._is_cut = False  # the last line was written in part
        self.write(b"")

    def write(self, data: bytes) -> None:
        """Append whole lines."""
        now = time.monotonic()
        if self._file is None and now < self._retry_at:
            self.num_lost += data.count(b"\n")
            return
        sent = 0
        try:
            file = self._prepare(len(data), now)
            if self._is_cut and data:
                self._size += file.write(b"\n" if self._size else b"")
                self._is_cut = False
            view = memoryview(data)
            while sent < len(data):  # a disk that gets full accepts a part
                sent += file.write(view[sent:])
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.num_lost += data.count(b"\n", sent)
            self._is_cut = self._is_cut or (sent > 0 and data[sent - 1 : sent] != b"\n")
            self._retry_at = now + RETRY_S
            self.close()
        else:
            self.problem = ""
        self._size += sent

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass  # the data is lost either way

    def _prepare(self, num_bytes: int, now: float) -> io.FileIO:
        """The file to append to: opened again if need be, rolled if it is due."""
        if self._file is not None and now >= self._check_at:
            self._check_at = now + CHECK_S
            if self._is_moved(self._file):
                self.close()
        file = self._file or self._open()
        is_due = self._size + num_bytes > self._max_bytes or day_of(int(time.time())) != self._day
        if self._size and num_bytes and is_due and now >= self._roll_at:
            file = self._roll(now)
        return file

    def _is_moved(self, file: io.FileIO) -> bool:
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return not os.path.samestat(there, os.fstat(file.fileno()))

    def _roll(self, now: float) -> io.FileIO:
        """Rename the current file and start an empty one; a folder that does not allow it keeps the file."""
        self.close()
        aside = free_name(self.path, self._written)
        try:
            os.replace(self.path, aside)
        except OSError:
            self._roll_at = now + ROLL_RETRY_S
            return self._open()
        file = self._open()
        try:
            threading.Thread(target=self._compress, args=(aside,), name="compress-log").start()
        except RuntimeError:
            pass  # no more threads: the file stays uncompressed
        return file

    def _open(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        self._file = io.FileIO(descriptor, "ab")
        state = os.fstat(descriptor)
        self._size = state.st_size
        self._written = state.st_mtime if self._size else time.time()
        self._day = day_of(int(self._written))
        return self._file

    def _compress(self, aside: Path) -> None:
        target = aside.with_name(f"{aside.name}.gz")
        try:
            compress(aside, target)
            aside.unlink()
        except OSError:
            target.unlink(missing_ok=True)  # a full disk: the file stays uncompressed
        try:
            for old in rolled(self.path)[: -self._kept]:
                old.unlink(missing_ok=True)
        except OSError:
            pass


def compress(source: Path, target: Path) -> None:
    """Compress a file; the target has its permissions."""
    with source.open("rb") as plain:
        mode = stat.S_IMODE(os.fstat(plain.fileno()).st_mode)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file, gzip.GzipFile(source.name, "wb", 6, file) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)


def free_name(path: Path, written: float) -> Path:
    """`<name>.<dd-MMM>.log`, with a number if that name is taken."""
    stem = f"{path.stem}.{time.strftime('%d-%b', time.localtime(written))}"
    number = 0
    while True:
        aside = path.with_name(f"{stem}.{number}{path.suffix}" if number else f"{stem}{path.suffix}")
        if not aside.exists() and not aside.with_name(f"{aside.name}.gz").exists():
            return aside
        number += 1


def rolled(path: Path) -> list[Path]:
    """The earlier files, compressed or not, oldest first; those that are being compressed count once."""
    name = re.compile(rf"{re.escape(path.stem)}\.\d\d-[^.]+(\.\d+)?{re.escape(path.suffix)}(\.gz)?")
    names = {one.name for one in path.parent.iterdir() if name.fullmatch(one.name)}
    found = [path.with_name(one) for one in names if f"{one}.gz" not in names]
    return sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name))


@lru_cache(16)  # asked for with every write, and `localtime` may look at the file of the time zone
def day_of(second: int) -> tuple[int, int]:
    """(year, day of the year), local."""
    day = time.localtime(second)
    return day.tm_year, day.tm_yday
