"""Gives memory back to the system while weights are loaded and after that: Linux only."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)\s+(.*)")
MADV_DONTNEED = 4
SMAPS = Path("/proc/self/smaps")


def release_weight_files() -> None:
    """Unmap the pages of weight files from this process; what is still used is mapped again from the page cache."""
    try:
        regions = [*clean_regions(SMAPS.read_text())]
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, size in regions:
        madvise(start, size, MADV_DONTNEED)


def trim_heap() -> None:
    """Give back what the C library keeps of freed tensors, if it is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def clean_regions(smaps: str) -> Iterator[tuple[int, int]]:
    """Address and size of mapped weight files of which the process has changed no page: a changed one would be lost."""
    region: tuple[int, int] | None = None
    for line in smaps.splitlines():
        if head := HEAD.match(line):
            start, end = int(head[1], 16), int(head[2], 16)
            is_weights = head[3] != "0" and head[4].endswith(SUFFIXES)
            region = (start, end - start) if is_weights else None
        elif region is not None and line.startswith("Anonymous:"):
            if line.split()[1] == "0":
                yield region
            region = None
