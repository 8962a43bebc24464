"""Copies blocks between the KV cache and host memory, in the calling thread and beside the steps.

A place in host memory holds a block of all layers: the bytes of each tensor of the cache, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.executor.kv_cache import KVCache

Bytes = NDArray[np.uint8]


class BlockTransfer(Protocol):
    """Copies between blocks of the cache and places in host memory, and returns when that is done."""

    @property
    def places(self) -> Bytes:
        """[places, bytes of a block]"""

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """From the cache to host memory."""

    def copy_in(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """From host memory to blocks that no step uses."""


def block_bytes(cache: KVCache) -> int:
    """The size of one block in all layers."""
    return sum(tensor[0].numel() * tensor.itemsize for tensor in cache.tensors)


def make_transfer(cache: KVCache, num_places: int, max_group: int) -> BlockTransfer:
    """The transfer for the device of a cache; a call copies at most `max_group` blocks."""
    if cache.tensors[0].is_cuda:
        return CudaTransfer(cache, num_places, max_group)
    return HostTransfer(cache, num_places)


class HostTransfer:
    """For a cache that is in host memory itself. NumPy copies without holding the interpreter, and in one thread."""

    def __init__(self, cache: KVCache, num_places: int) -> None:
        self.places: Bytes = np.empty((num_places, block_bytes(cache)), np.uint8)
        self._rows = [byte_rows(tensor).numpy() for tensor in cache.tensors]
        ends = np.cumsum([rows.shape[1] for rows in self._rows]).tolist()
        self._columns = [slice(end - rows.shape[1], end) for end, rows in zip(ends, self._rows, strict=True)]

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        for block, place in zip(blocks, places, strict=True):
            for rows, columns in zip(self._rows, self._columns, strict=True):
                self.places[place, columns] = rows[block]

    def copy_in(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        for block, place in zip(blocks, places, strict=True):
            for rows, columns in zip(self._rows, self._columns, strict=True):
                rows[block] = self.places[place, columns]


class CudaTransfer:
    """For a cache on a GPU: pinned memory, and a stream of its own that waits for the steps started before."""

    def __init__(self, cache: KVCache, num_places: int, max_group: int) -> None:
        size, device = block_bytes(cache), cache.tensors[0].device
        self._device = device
        self._pinned = torch.empty((num_places, size), dtype=torch.uint8, pin_memory=True)
        self.places: Bytes = self._pinned.numpy()
        self._rows = [words(byte_rows(tensor)) for tensor in cache.tensors]
        self._widths = [rows.shape[1] * rows.itemsize for rows in self._rows]
        self._steps: Any = torch.cuda.current_stream(device)
        # One thread copies in each direction. It has a stream, and memory on the device where blocks are gathered.
        self._out, self._in = (
            (torch.cuda.Stream(device), torch.empty((max_group, size), dtype=torch.uint8, device=device))  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    @torch.inference_mode()
    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        stream, gathered = self._out
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_stream(self._steps)
            index = torch.tensor(blocks, device=self._device)
            for rows, columns in zip(
                self._rows, torch.split(gathered[: len(blocks)], self._widths, dim=1), strict=True
            ):
                columns.copy_(rows.index_select(0, index).view(torch.uint8))
            for i, place in enumerate(places):
                self._pinned[place].copy_(gathered[i], non_blocking=True)
            stream.synchronize()

    @torch.inference_mode()
    def copy_in(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        stream, gathered = self._in
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_stream(self._steps)  # one that has ended meanwhile may still write to these blocks
            index = torch.tensor(blocks, device=self._device)
            for i, place in enumerate(places):
                gathered[i].copy_(self._pinned[place], non_blocking=True)
            for rows, columns in zip(
                self._rows, torch.split(gathered[: len(blocks)], self._widths, dim=1), strict=True
            ):
                rows.index_copy_(0, index, columns.clone().view(rows.dtype))
            stream.synchronize()


def byte_rows(tensor: Tensor) -> Tensor:
    """The bytes [blocks, bytes] of a tensor of the cache, without a copy."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def words(rows: Tensor) -> Tensor:
    """The same bytes in larger units, where they divide: those are copied faster."""
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows
