"""BlockPool: which blocks of the KV cache are free, shared, or cached for prompts with the same prefix."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FIRST_BLOCK = 1  # padding writes to block 0
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block holds: its tokens or parts of files, and the content of the block before it."""

    parent: int  # serial of the content before it; from 0 down: nothing, with the adapter of this number
    tokens: tuple[Hashable, ...]


class StoredBlocks(Protocol):
    """Where the content of blocks is kept after they were evicted, by keys that are the same in every process."""

    def __contains__(self, key: bytes) -> bool:
        """Whether there is content of this key; it may be gone when it is needed."""

    def offer(self, block: int, content: BlockContent, key: bytes) -> None:
        """A block that no sequence uses, and that may be evicted from now on."""

    def set_num_free(self, number: int) -> None:
        """How many blocks can be allocated."""


class BlockPool:
    """Counts the users of each block. A block without users keeps its content until the block is needed."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        store: StoredBlocks | None = None,
        on_evict: Callable[[int], None] | None = None,
    ) -> None:
        """`on_evict` is called with the serial of content that is no longer cached."""
        self.block_size = block_size
        self.num_blocks = num_blocks - FIRST_BLOCK
        self.has_prefix_cache = prefix_cache
        self._free: list[int] = [*range(num_blocks - 1, FIRST_BLOCK - 1, -1)]  # the block freed last is taken first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free too, but with content; oldest first
        self._users = [0] * num_blocks
        self._blocks: dict[BlockContent, tuple[int, int]] = {}  # content → its block and its serial
        self._contents: dict[int, BlockContent] = {}  # block → its content
        self._serials = itertools.count(1)
        self._on_evict = on_evict
        self._store = store
        self._keys: dict[int, bytes] = {}  # with a store: serial of a content, or a root → its key

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
        blocks = [self._allocate_one() for _ in range(number)]
        if self._store is not None:
            self._store.set_num_free(self.num_free)
        return blocks

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
                if self._store is not None:
                    self._offer(block, self._store)
            else:
                self._free.append(block)
        if self._store is not None:
            self._store.set_num_free(self.num_free)

    # ---- prefix cache ----

    def match_prefix(self, tokens: Sequence[Hashable], root: int = 0) -> tuple[list[int], list[int]]:
        """Return the cached blocks that these tokens begin with, and the serials of their contents.

        Sequences share blocks only with those of the same root, which is what comes before the first block.
        """
        blocks: list[int] = []
        serials: list[int] = []
        parent = root
        if self.has_prefix_cache:
            for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
                found = self._blocks.get(BlockContent(parent, tuple(tokens[start : start + self.block_size])))
                if found is None:
                    break
                block, parent = found
                blocks.append(block)
                serials.append(parent)
        return blocks, serials

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
        if not self.has_prefix_cache:
            return 0
        content = BlockContent(parent, tuple(tokens))
        if content in self._blocks:  # another sequence computed the same tokens at the same time
            return self._blocks[content][1]
        serial = next(self._serials)
        self._blocks[content] = (block, serial)
        self._contents[block] = content
        parent_key = self._keys.get(parent)
        if parent_key is not None and (key := key_after(parent_key, tokens)) is not None:
            self._keys[serial] = key
        return serial

    def _evict(self, block: int) -> None:
        content = self._contents.pop(block)
        _, serial = self._blocks.pop(content)
        self._keys.pop(serial, None)
        if self._on_evict is not None:
            self._on_evict(serial)

    # ---- what a store keeps ----

    def set_root(self, root: int, key: bytes) -> None:
        """Blocks after this root are offered to the store; the key says what they depend on besides their tokens."""
        self._keys[root] = key

    def forget_root(self, root: int) -> None:
        """No sequence has this root any more; blocks after it stay until they are evicted."""
        self._keys.pop(root, None)

    def holds(self, block: int, content: BlockContent) -> bool:
        """Whether a block has had this content all the time since it was offered. Any thread may ask."""
        return self._contents.get(block) is content

    def match_stored(self, tokens: Sequence[Hashable], num_blocks: int, parent: int) -> list[bytes]:
        """The keys of stored blocks that follow the first `num_blocks` of these tokens, whose last has this serial."""
        keys: list[bytes] = []
        key = self._keys.get(parent)
        if self._store is None or key is None:
            return keys
        for start in range(num_blocks * self.block_size, len(tokens) - self.block_size + 1, self.block_size):
            key = key_after(key, tokens[start : start + self.block_size])
            if key is None or key not in self._store:
                break
            keys.append(key)
        return keys

    def _offer(self, block: int, store: StoredBlocks) -> None:
        content = self._contents[block]
        key = self._keys.get(self._blocks[content][1])
        if key is not None:
            store.offer(block, content, key)


def key_after(parent: bytes, tokens: Sequence[object]) -> bytes | None:
    """The key of a block: a digest of its tokens and of all that comes before it; None if it holds more than tokens."""
    if not all(type(token) is int for token in tokens):
        return None
    numbers: Any = tokens
    return hashlib.blake2b(parent + array("q", numbers).tobytes(), digest_size=KEY_BYTES).digest()
