"""DiskBlocks: one file for each stored block, in a folder of a bounded size.

Files are written under another name and then renamed. What a crash has left, or somebody else has put there, is not
read: a file has its key, its size and a checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.core.block_pool import KEY_BYTES
from flambeau.llm.errors import LLMError

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

MAGIC = b"FLAMBKV1"
HEADER = struct.Struct(f"<8s{KEY_BYTES}sI")  # magic, key, checksum of what follows
SUFFIX, UNFINISHED = ".kv", ".part"
LOCK = "lock"
MAX_FOLDERS = 64  # of workers that share a folder


class DiskBlocks:
    """Files by key; the one that was used least recently is deleted first. Any thread may call."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._mutex = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of files by key, the oldest first
        self._total = 0
        self._is_failing = False
        try:
            self.folder, self._lock = claim_folder(folder)
            self._scan()
        except OSError as error:
            raise LLMError(
                f"kv_disk_folder {folder} cannot be used: {error}; name a folder that can be written"
            ) from error

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def size_bytes(self) -> int:
        return self._total

    def write(self, key: bytes, content: Bytes) -> None:
        """Store a block; a full or broken disk costs one line in the log."""
        size = HEADER.size + content.nbytes
        if key in self._sizes or size > self._limit_bytes:
            return
        path = self._path(key)
        unfinished = path.with_suffix(UNFINISHED)
        self._make_room(size)
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(HEADER.pack(MAGIC, key, zlib.crc32(content.data)))
                file.write(content.data)
            unfinished.replace(path)
        except OSError as error:
            remove(unfinished)
            if not self._is_failing:
                logger.warning("blocks of the KV cache are not written to %s: %s", self.folder, error)
            self._is_failing = True
            return
        self._is_failing = False
        with self._mutex:
            self._sizes[key] = size
            self._total += size

    def read_into(self, key: bytes, content: Bytes) -> bool:
        """Read a block; False if there is none, or none that can be used."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                is_whole = has_content(file.read(HEADER.size), key, file.readinto(content.data), content)
                is_whole = is_whole and not file.read(1)
        except OSError:
            is_whole = False
        if not is_whole:
            logger.warning("%s is damaged, or not of this model; it is deleted and its tokens are computed", path)
            self.delete(key)
            return False
        with self._mutex:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        with contextlib.suppress(OSError):  # deleted meanwhile
            os.utime(path)  # the order of use, for the next start
        return True

    def delete(self, key: bytes) -> None:
        with self._mutex:
            self._total -= self._sizes.pop(key, 0)
        remove(self._path(key))

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def _make_room(self, size: int) -> None:
        while self._total + size > self._limit_bytes and self._sizes:
            self.delete(next(iter(self._sizes)))

    def _scan(self) -> None:
        """Find the files of earlier runs, of this model and of others."""
        found, ignored = [], []
        for entry in os.scandir(self.folder):
            status = entry.stat(follow_symlinks=False)
            key = key_of(entry.name)
            if entry.name.endswith(UNFINISHED) and stat.S_ISREG(status.st_mode):
                os.unlink(entry)
            elif key is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                found.append((status.st_mtime_ns, key, status.st_size))
            elif entry.name != LOCK:
                ignored.append(entry.name)
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._total += size
        if ignored:
            logger.warning(
                "%s has %d files that are not its own, like %s; they are ignored",
                self.folder,
                len(ignored),
                min(ignored),
            )
        self._make_room(0)


def remove(path: Path) -> None:
    """Delete a file if that is possible."""
    with contextlib.suppress(OSError):
        path.unlink()


def has_content(header: bytes, key: bytes, num_read: int | None, content: Bytes) -> bool:
    """Whether a file that was read is the whole block of this key."""
    if len(header) != HEADER.size or num_read != content.nbytes:
        return False
    magic, found, checksum = HEADER.unpack(header)
    return bool(magic == MAGIC and found == key and checksum == zlib.crc32(content.data))


def key_of(name: str) -> bytes | None:
    """The key of a file by its name; None if it is no block."""
    digits, suffix = os.path.splitext(name)
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        return None
    return key if suffix == SUFFIX and len(key) == KEY_BYTES else None


def claim_folder(parent: Path) -> tuple[Path, LockedFile]:
    """The first folder in this one that no other process uses; each worker has its own, and finds it again."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in candidates(parent):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            continue
        lock = LockedFile(folder / LOCK)
        if lock.is_held:
            return folder, lock
    raise LLMError(f"{MAX_FOLDERS} workers use kv_disk_folder {parent} already; name another folder")


def candidates(parent: Path) -> Iterator[Path]:
    return (parent / f"worker-{number}" for number in range(MAX_FOLDERS))


class LockedFile:
    """A file that this process has locked, unless another one has; the kernel unlocks it when the process ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.is_held = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()

    def close(self) -> None:
        if self.is_held:
            os.close(self._descriptor)
        self.is_held = False
