"""Blocks of a network that several ranks share: each rank keeps its part of a block, and rank 0 decides.

Rank 0 has the only BlockStore. Its commands go to the others through a process group of their own, beside the steps,
and a thread of each rank obeys them. A command is over when all ranks have done it: so a block that still has its
content then was copied whole on each, and what one rank cannot read is restored on none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from flambeau.llm.core.block_pool import KEY_BYTES
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.tensor_parallel import IDLE, TensorParallelGroup
from flambeau.llm.kv_store.disk_blocks import DiskBlocks
from flambeau.llm.kv_store.transfer import BlockTransfer, Bytes

logger = logging.getLogger(__name__)

END, COPY_OUT, COPY_IN, WRITE, READ = range(5)


class StoreLeader:
    """Rank 0's transfer: copies on all ranks. Any thread may call."""

    def __init__(self, inner: BlockTransfer, group: dist.ProcessGroup) -> None:
        self.places: Bytes = inner.places
        self._inner, self._group = inner, group
        self._lock = threading.Lock()

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        if blocks:
            self._check(self._command(COPY_OUT, [*blocks, *places], lambda: self._inner.copy_out(blocks, places)))

    def copy_in(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        if blocks:
            self._check(self._command(COPY_IN, [*places, *blocks], lambda: self._inner.copy_in(places, blocks)))

    def write(self, key: bytes, place: int) -> None:
        """Have the other ranks write their parts to disk."""
        self._command(WRITE, [place, *key])

    def read(self, key: bytes, place: int) -> bool:
        """Have the other ranks read their parts from disk; False if one of them has none."""
        return self._command(READ, [place, *key])

    def close(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # of a rank that has died
            dist.broadcast(torch.tensor([END, 0]), src=0, group=self._group)

    def _command(self, kind: int, numbers: list[int], own: Callable[[], None] = lambda: None) -> bool:
        """Whether all other ranks have succeeded; an error of this one is raised."""
        failure: Exception | None = None
        with self._lock:
            dist.broadcast(torch.tensor([kind, len(numbers)]), src=0, group=self._group)
            dist.broadcast(torch.tensor(numbers), src=0, group=self._group)
            try:
                own()
            except Exception as error:
                failure = error
            is_done = have_all_done(failure is None, self._group)
        if failure is not None:
            raise failure
        return is_done

    def _check(self, is_done: bool) -> None:
        if not is_done:
            raise LLMError("another rank could not copy its part of these blocks; see its log")


class StoreFollower:
    """The parts of another rank, copied as rank 0 says, in a thread of its own."""

    def __init__(self, transfer: BlockTransfer, disk: DiskBlocks | None, ranks: TensorParallelGroup) -> None:
        self._transfer, self._disk, self._rank = transfer, disk, ranks.rank
        self._group = new_store_group()
        self._thread = threading.Thread(target=self._follow, name="kv-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, which rank 0 sends before it leaves."""
        self._thread.join()

    def _follow(self) -> None:
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, src=0, group=self._group)
            kind, size = header.tolist()
            if kind == END:
                break
            numbers = torch.zeros(size, dtype=torch.int64)
            dist.broadcast(numbers, src=0, group=self._group)
            have_all_done(self._do(kind, numbers.tolist()), self._group)
        if self._disk is not None:
            self._disk.close()

    def _do(self, kind: int, numbers: list[int]) -> bool:
        """Whether it has succeeded."""
        try:
            if kind in (COPY_OUT, COPY_IN):
                half = len(numbers) // 2
                copy = self._transfer.copy_out if kind == COPY_OUT else self._transfer.copy_in
                copy(numbers[:half], numbers[half:])
                return True
            assert self._disk is not None
            key, content = rank_key(bytes(numbers[1:]), self._rank), self._transfer.places[numbers[0]]
            if kind == READ:
                return key in self._disk and self._disk.read_into(key, content)
            self._disk.write(key, content)
        except Exception:  # rank 0 goes on without these blocks
            logger.exception("blocks of the KV cache could not be copied on rank %d", self._rank)
            return False
        return True


def new_store_group() -> dist.ProcessGroup:
    """The process group of a store's commands; all ranks make it at the same point."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=IDLE)
    return group


def have_all_done(is_done: bool, group: dist.ProcessGroup) -> bool:
    box = torch.tensor([int(is_done)])
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=group)
    return bool(box)


def rank_key(key: bytes, rank: int) -> bytes:
    """The key of a rank's part of a block. That of rank 0 is the key of the block."""
    return key if rank == 0 else hashlib.blake2b(key + rank.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()


def common_root(root: bytes, ranks: TensorParallelGroup) -> bytes:
    """The key before the first block: it depends on the weights of all ranks and on their number."""
    parts = [torch.zeros(len(root), dtype=torch.uint8) for _ in range(ranks.size)]
    dist.all_gather(parts, torch.frombuffer(bytearray(root), dtype=torch.uint8), group=ranks.control)
    whole = b"".join(bytes(part.tolist()) for part in parts)
    return hashlib.blake2b(whole, digest_size=KEY_BYTES).digest()
