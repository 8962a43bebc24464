"""Large bodies in shared memory: written once by the server, mapped by the worker.

A segment is an anonymous memory file. The worker opens it through /proc, so it has no name that
could be guessed or left behind, and the kernel frees it when the server ends, however it ends.
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
KEPT_BYTES = 64 << 20  # free segments kept for reuse: touching fresh pages costs more than copying
MAPPED_BYTES = 256 << 20  # what a worker keeps mapped, besides the body it reads


class Segment:
    """A piece of shared memory that belongs to one job until it is released."""

    def __init__(self, serial: int, capacity: int) -> None:
        self.serial = serial
        self.capacity = capacity
        self.fd = -1
        self.fd = os.memfd_create("flambeau", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self.memory = mmap.mmap(self.fd, capacity)

    def describe(self, size_bytes: int) -> Shared:
        """What a worker needs to find the first `size_bytes` of it."""
        return Shared(self.serial, f"/proc/{os.getpid()}/fd/{self.fd}", size_bytes)

    def __del__(self) -> None:  # a net: whoever takes a segment gives it back or closes it
        self.close()

    def close(self) -> None:
        """Give the memory back to the system."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1  # first, so that the number is never closed twice
        os.close(fd)
        try:
            self.memory.close()
        except (BufferError, AttributeError):  # a view is still held, and the map goes with it; or there is no map
            pass


class SegmentPool:
    """Hands out segments by size and keeps a few free ones."""

    def __init__(self, max_open: int = 1 << 30) -> None:
        self.max_open = max_open  # segments at a time, free ones included: each is an open file
        self.num_open = 0
        self._serials = itertools.count(1)
        self._free: defaultdict[int, list[Segment]] = defaultdict(list)
        self._free_bytes = 0

    @staticmethod
    def is_supported() -> bool:
        """Whether this system has what sharing needs."""
        return sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")

    def take(self, size_bytes: int) -> Segment:
        """A segment that holds at least `size_bytes`; raises OSError when there can be no more."""
        capacity = max(SMALLEST, 1 << (size_bytes - 1).bit_length())
        if free := self._free[capacity]:
            self._free_bytes -= capacity
            return free.pop()
        if self.num_open >= self.max_open:
            self._close_one()
        segment = Segment(next(self._serials), capacity)
        self.num_open += 1
        return segment

    def give_back(self, segment: Segment) -> None:
        """Keep a segment for reuse, or free it when enough are kept."""
        if self._free_bytes + segment.capacity > KEPT_BYTES:
            self._close(segment)
            return
        self._free_bytes += segment.capacity
        self._free[segment.capacity].append(segment)

    def close(self) -> None:
        """Free every segment that is not in use."""
        for free in self._free.values():
            for segment in free:
                self._close(segment)
        self._free.clear()
        self._free_bytes = 0

    def _close_one(self) -> None:
        """Close a free segment, so that another may be opened."""
        for capacity, free in self._free.items():
            if free:
                self._free_bytes -= capacity
                self._close(free.pop())
                return
        raise OSError(errno.EMFILE, f"{self.num_open} bodies lie in shared memory already")

    def _close(self, segment: Segment) -> None:
        segment.close()
        self.num_open -= 1


class SegmentReader:
    """The worker's side: opens segments and remembers the last few maps."""

    def __init__(self) -> None:
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._mapped_bytes = 0
        self._lock = threading.Lock()  # a pipelined worker reads in two threads

    def read(self, shared: Shared) -> bytearray:
        """A private copy of a body that lies in shared memory."""
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
        """Whether the server's segments can be opened from here."""
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
