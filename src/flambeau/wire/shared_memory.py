"""Shared memory for large bodies: the server writes them once, and the worker maps them.

A segment is an anonymous memory file that the worker opens through /proc. So it has no name that could be guessed or
left behind, and the kernel frees it when the server exits for any reason.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import sys
import threading
from collections import OrderedDict, defaultdict

from flambeau.wire.messages import Shared

SMALLEST = 128 * 1024
KEPT_BYTES = 64 << 20  # of free segments kept for reuse: the first access to a page costs more than the copy
MAPPED_BYTES = 256 << 20  # that a worker keeps mapped, besides the body it reads


class Segment:
    """A piece of shared memory, used by one job at a time."""

    def __init__(self, serial: int, capacity: int) -> None:
        self.serial = serial
        self.capacity = capacity
        self.fd = -1
        self.fd = os.memfd_create("flambeau", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self.memory = mmap.mmap(self.fd, capacity)

    def describe(self, size_bytes: int) -> Shared:
        """The message with which a worker reads the first `size_bytes`."""
        return Shared(self.serial, f"/proc/{os.getpid()}/fd/{self.fd}", size_bytes)

    def __del__(self) -> None:  # a safety net: owners give segments back or close them
        self.close()

    def close(self) -> None:
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1  # first, so that the number is never closed twice
        os.close(fd)
        try:
            self.memory.close()
        except (BufferError, AttributeError):  # a view is still in use and frees the map later; or there is no map
            pass


class SegmentPool:
    """Provides segments by size and keeps some free ones for reuse."""

    def __init__(self, max_open: int = 1 << 30) -> None:
        self.max_open = max_open  # segments, free ones included; each is an open file
        self.num_open = 0
        self._serials = itertools.count(1)
        self._free: defaultdict[int, list[Segment]] = defaultdict(list)
        self._free_bytes = 0
        self._is_in_use = False  # a segment was taken since `close_unused`

    @staticmethod
    def is_supported() -> bool:
        return sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")

    def take(self, size_bytes: int) -> Segment:
        """A segment of at least `size_bytes`; raises OSError at the limit of open segments."""
        capacity = max(SMALLEST, 1 << (size_bytes - 1).bit_length())
        self._is_in_use = True
        if free := self._free[capacity]:
            self._free_bytes -= capacity
            return free.pop()
        if self.num_open >= self.max_open:
            self._close_one()
        segment = Segment(next(self._serials), capacity)
        self.num_open += 1
        return segment

    def give_back(self, segment: Segment) -> None:
        """Keep a segment for reuse, or close it if enough are kept."""
        if self._free_bytes + segment.capacity > KEPT_BYTES:
            self._close(segment)
            return
        self._free_bytes += segment.capacity
        self._free[segment.capacity].append(segment)

    def close_unused(self) -> None:
        """Called periodically: close the free segments if none was taken since the last call."""
        if not self._is_in_use and self._free_bytes:
            self.close()
        self._is_in_use = False

    def close(self) -> None:
        """Close every segment that is not in use."""
        for free in self._free.values():
            for segment in free:
                self._close(segment)
        self._free.clear()
        self._free_bytes = 0

    def _close_one(self) -> None:
        """Close a free segment, so that another can be opened; raises OSError if there is none."""
        for capacity, free in self._free.items():
            if free:
                self._free_bytes -= capacity
                self._close(free.pop())
                return
        raise OSError(errno.EMFILE, f"{self.num_open} segments of shared memory are in use, which is the limit")

    def _close(self, segment: Segment) -> None:
        segment.close()
        self.num_open -= 1


class SegmentReader:
    """The worker's side: opens segments and keeps the most recent maps."""

    def __init__(self) -> None:
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._mapped_bytes = 0
        self._lock = threading.Lock()  # a pipelined worker reads in two threads

    def read(self, shared: Shared) -> bytearray:
        """A private copy of a body in shared memory."""
        with self._lock:
            return self._read(shared)

    def _read(self, shared: Shared) -> bytearray:
        memory = self._maps.get(shared.serial)
        if memory is None:
            memory = self._maps[shared.serial] = self._open(shared.path)
            self._mapped_bytes += len(memory)
            while self._mapped_bytes > MAPPED_BYTES and len(self._maps) > 1:
                oldest = self._maps.popitem(last=False)[1]
                self._mapped_bytes -= len(oldest)
                oldest.close()
        else:
            self._maps.move_to_end(shared.serial)
        with memoryview(memory) as view:
            return bytearray(view[: shared.size_bytes])

    def can_read(self, shared: Shared | None) -> bool:
        """Whether this process can open the server's segments."""
        if shared is None:
            return False
        try:
            self._open(shared.path).close()
        except (OSError, ValueError):
            return False
        return True

    @staticmethod
    def _open(path: str) -> mmap.mmap:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
