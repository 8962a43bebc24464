"""BlockPool: which blocks of the KV cache are free, shared, or kept for a prompt that begins the same way."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FIRST_BLOCK = 1  # block 0 is where padding writes


@dataclass(frozen=True, slots=True)
class Content:
    """What a full block holds, told exactly: its tokens after the content of the block before it."""

    parent: int  # serial of the content before it; 0: nothing
    tokens: tuple[int, ...]


class BlockPool:
    """Counts who uses a block. A block nobody uses keeps its content until it is needed for something else."""

    def __init__(self, num_blocks: int, block_size: int, *, keeps_prefixes: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks - FIRST_BLOCK
        self._keeps_prefixes = keeps_prefixes
        self._free: list[int] = [*range(num_blocks - 1, FIRST_BLOCK - 1, -1)]  # the last one given back is taken first
        self._kept: OrderedDict[int, None] = OrderedDict()  # free too, but with content; the oldest first
        self._users = [0] * num_blocks
        self._blocks: dict[Content, tuple[int, int]] = {}  # content → its block and its serial
        self._contents: dict[int, Content] = {}  # block → its content
        self._serials = itertools.count(1)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody uses."""
        return self.num_blocks - self.num_free

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def take(self, number: int) -> list[int]:
        """Blocks for new content; the caller has looked whether there are so many."""
        return [self._take_one() for _ in range(number)]

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """One user less of each; the last ones of a sequence are reused first, for others begin like it."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._contents:
                self._kept[block] = None
            else:
                self._free.append(block)

    # ---- prompts that begin alike ----

    def find_prefix(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The kept blocks with which these tokens begin, and the serial of the last one's content."""
        blocks: list[int] = []
        parent = 0
        if self._keeps_prefixes:
            for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
                found = self._blocks.get(Content(parent, tuple(tokens[start : start + self.block_size])))
                if found is None:
                    break
                block, parent = found
                blocks.append(block)
        return blocks, parent

    def num_kept(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody uses now."""
        return sum(self._users[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One user more of each."""
        for block in blocks:
            if self._users[block] == 0:
                del self._kept[block]
            self._users[block] += 1

    def publish(self, block: int, parent: int, tokens: Sequence[int]) -> int:
        """A block is full: whoever begins the same way may share it. Returns the serial of its content."""
        if not self._keeps_prefixes:
            return 0
        content = Content(parent, tuple(tokens))
        if content in self._blocks:  # somebody computed the same at the same time
            return self._blocks[content][1]
        serial = next(self._serials)
        self._blocks[content] = (block, serial)
        self._contents[block] = content
        return serial

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        del self._blocks[content]
