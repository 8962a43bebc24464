"""PrefixRestores: prefixes that are copied from a store into blocks while their sequences wait.

When the copies are done, the blocks are cached like those that were computed here, and the sequences find them there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flambeau.llm.core.block_pool import BlockPool, StoredBlocks

MIN_BLOCKS = 2  # fewer are computed as fast as they are copied


class StartedRestore(Protocol):
    """Copies that were started."""

    num_restored: int  # blocks from the first, when all is done

    @property
    def is_done(self) -> bool:
        """Whether nothing is written to the blocks any more."""

    def wait(self, timeout_s: float) -> None:
        """Wait until it is done, but no longer than this."""


class RestoringStore(StoredBlocks, Protocol):
    def restore(self, keys: Sequence[bytes], blocks: Sequence[int]) -> StartedRestore:
        """Start copying stored content to blocks, which are the caller's until it is done."""


@dataclass(slots=True)
class PrefixRestore:
    """Blocks with the next tokens of a prefix whose first blocks are cached."""

    started: StartedRestore
    shared: list[int]  # the first blocks, which stay meanwhile
    blocks: list[int]
    tokens: list[Sequence[Hashable]]  # of each block
    parent: int  # serial of the last shared block's content
    is_over: bool = False


class PrefixRestores:
    """The restores that run."""

    def __init__(self, pool: BlockPool, store: RestoringStore) -> None:
        self._pool, self._store = pool, store
        self._running: dict[bytes, PrefixRestore] = {}  # by the key of their first block

    @property
    def has_any(self) -> bool:
        return bool(self._running)

    def find(self, tokens: Sequence[Hashable], shared: list[int], parent: int) -> tuple[PrefixRestore | None, bool]:
        """The restore of what follows the shared blocks, and whether it was started now; None if nothing is stored.

        The caller has checked that there are blocks for all tokens.
        """
        keys = self._pool.match_stored(tokens, len(shared), parent)
        if len(keys) < MIN_BLOCKS:
            return None, False
        if keys[0] in self._running:  # of another sequence with this prefix
            return self._running[keys[0]], False
        size, first = self._pool.block_size, len(shared) * self._pool.block_size
        self._pool.share(shared)
        blocks = self._pool.allocate(len(keys))
        restore = PrefixRestore(
            self._store.restore(keys, blocks),
            shared,
            blocks,
            [tokens[start : start + size] for start in range(first, first + len(keys) * size, size)],
            parent,
        )
        self._running[keys[0]] = restore
        return restore, True

    def wait(self, timeout_s: float) -> None:
        """Wait until the first of them is done, but no longer than this."""
        for restore in self._running.values():  # they are done in order
            restore.started.wait(timeout_s)
            return

    def finish(self) -> None:
        """Cache the blocks of the restores that are done."""
        for key, restore in [*self._running.items()]:
            if not restore.started.is_done:
                continue
            del self._running[key]
            parent = restore.parent
            for i in range(restore.started.num_restored):
                parent = self._pool.cache_block(restore.blocks[i], parent, restore.tokens[i])
            self._pool.free([*restore.shared, *restore.blocks])
            restore.is_over = True
