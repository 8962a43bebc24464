"""BlockPool: which blocks of the KV cache are free, shared, or cached for prompts with the same prefix."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

FIRST_BLOCK = 1  # padding writes to block 0


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block holds: its tokens or parts of images, and the content of the block before it."""

    parent: int  # serial of the content before it; from 0 down: nothing, with the adapter of this number
    tokens: tuple[Hashable, ...]


class BlockPool:
    """Counts the users of each block. A block without users keeps its content until the block is needed."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks - FIRST_BLOCK
        self._prefix_cache = prefix_cache
        self._free: list[int] = [*range(num_blocks - 1, FIRST_BLOCK - 1, -1)]  # the block freed last is taken first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free too, but with content; oldest first
        self._users = [0] * num_blocks
        self._blocks: dict[BlockContent, tuple[int, int]] = {}  # content → its block and its serial
        self._contents: dict[int, BlockContent] = {}  # block → its content
        self._serials = itertools.count(1)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_needed(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, number: int) -> list[int]:
        """Take blocks for new content; the caller has checked `num_free`."""
        return [self._allocate_one() for _ in range(number)]

    def _allocate_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._evict(block)
        self._users[block] = 1
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one user of each block. A sequence's last blocks are reused first: other prompts share its first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._contents:
                self._evictable[block] = None
            else:
                self._free.append(block)

    # ---- prefix cache ----

    def match_prefix(self, tokens: Sequence[Hashable], root: int = 0) -> tuple[list[int], int]:
        """Return the cached blocks that these tokens begin with, and the serial of the last one's content.

        Sequences share blocks only with those of the same root, which is what comes before the first block.
        """
        blocks: list[int] = []
        parent = root
        if self._prefix_cache:
            for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
                found = self._blocks.get(BlockContent(parent, tuple(tokens[start : start + self.block_size])))
                if found is None:
                    break
                block, parent = found
                blocks.append(block)
        return blocks, parent

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks have no user."""
        return sum(self._users[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one user to each of these cached blocks."""
        for block in blocks:
            if self._users[block] == 0:
                del self._evictable[block]
            self._users[block] += 1

    def cache_block(self, block: int, parent: int, tokens: Sequence[Hashable]) -> int:
        """Make a full block available to other prompts; returns the serial of its content."""
        if not self._prefix_cache:
            return 0
        content = BlockContent(parent, tuple(tokens))
        if content in self._blocks:  # another sequence computed the same tokens at the same time
            return self._blocks[content][1]
        serial = next(self._serials)
        self._blocks[content] = (block, serial)
        self._contents[block] = content
        return serial

    def _evict(self, block: int) -> None:
        content = self._contents.pop(block)
        del self._blocks[content]
