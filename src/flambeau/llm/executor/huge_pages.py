"""Host memory in huge pages: large tensors are read with fewer misses of the address cache."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
SMALL_BYTES = 1 << 16


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, *, first_is_small: bool = False) -> Tensor:
    """A tensor of zeros on the host; in huge pages if it is large and the system has them.

    Memory of the system is zero from the start: no thread fills it. With `first_is_small`, what would be the first huge
    page is small ones: of a tensor that is used from its start, little is touched by little use.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < SMALL_BYTES:
        return torch.zeros(shape, dtype=dtype)
    # One page more: the start is moved to a huge page's. What is beyond the last whole one stays in small pages.
    # Private: shared memory has huge pages on few systems.
    size = count * dtype.itemsize + HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages until it is freed
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    length = count * dtype.itemsize // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    skipped = HUGE_PAGE_BYTES if first_is_small else 0
    if length > skipped and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE, start + skipped, length - skipped)
    return whole[start : start + count * dtype.itemsize].view(dtype).view(shape)
