"""CacheAllocator: gives sequences blocks of the KV cache and slots for states, and lets them share prefixes."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from typing import NamedTuple

from flambeau.llm.core.block_pool import BlockPool
from flambeau.llm.core.prefix_restores import PrefixRestores
from flambeau.llm.core.sequence import Sequence
from flambeau.llm.core.state_slots import StateSlots, snapshot_ends


class PrefixMatch(NamedTuple):
    """What of a sequence is in the cache."""

    reusable: list[Hashable]  # its contents that may be
    cached: list[int]  # the blocks that are
    cached_end: int  # the serial of the last of these
    shared: list[int]  # those that it uses; it computes the rest again
    parent: int  # the serial of the last of these
    num_needed: int  # further blocks


class CacheAllocator:
    """The blocks and the state slot of each sequence, and how much of it is computed."""

    def __init__(
        self,
        pool: BlockPool,
        state_slots: StateSlots,
        *,
        restores: PrefixRestores | None = None,
        switch_length: int | None = None,
        num_recomputed_blocks: int = 0,
    ) -> None:
        self._pool, self._state_slots, self._restores = pool, state_slots, restores
        self._switch_length = switch_length  # the longest sequence with the first rotary factors; None: they stay
        self._num_recomputed = num_recomputed_blocks  # of a cached prefix, at its end

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self._pool.num_free

    def num_spare(self, num_running: int) -> int:
        """One spare block per running sequence, so that the next step does not preempt the newcomer."""
        return min(num_running, self._pool.num_blocks // 16)

    # ---- sequences that wait ----

    def num_needed(self, sequence: Sequence) -> int:
        """Blocks for all its tokens, whatever is cached."""
        return self._pool.num_needed(len(sequence.tokens))

    def num_taken(self, sequence: Sequence) -> int:
        """How many fewer blocks are free once it is admitted."""
        match = self._match(sequence)
        return match.num_needed + self._pool.num_evictable(match.shared)

    def admit(self, sequence: Sequence, num_spare: int) -> bool:
        """Give it blocks for all its tokens, cached ones where the prefix matches.

        False if too few are free, or if its prefix is copied to blocks first.
        """
        if num_spare + 1 > self._pool.num_free:  # it needs at least one: skip the prefix lookup
            return False
        match = self._match(sequence)
        shared = match.shared
        if match.num_needed + num_spare > self._pool.num_free - self._pool.num_evictable(shared):
            return False
        if self._restores is not None and sequence.may_restore:
            sequence.restore, is_own = self._restores.find(match.reusable, match.cached, match.cached_end)
            if sequence.restore is not None:
                sequence.may_restore = not is_own
                return False
        self._pool.share(shared)
        sequence.blocks = shared + self._pool.allocate(match.num_needed)
        self._state_slots.allocate(sequence, match.parent if shared else None)
        sequence.num_cached_blocks, sequence.parent = len(shared), match.parent
        sequence.num_computed = len(shared) * self._pool.block_size
        if self._state_slots.number and self._pool.has_prefix_cache:
            size = self._pool.block_size
            ends = snapshot_ends(len(sequence.tokens), sequence.num_computed, len(match.cached) * size, size)
            sequence.snapshot_ends = ends
        if sequence.num_cached is None:  # recomputed tokens after a preemption do not count as prefix-cache hits
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What of its tokens is cached, for a sequence that waits."""
        sequence.is_long = self._switch_length is not None and len(sequence.tokens) > self._switch_length
        # The last token is always computed, even if all blocks are cached: its logits are needed.
        reusable = [] if sequence.needs_prompt_logits else sequence.contents(0, len(sequence.tokens) - 1)
        cached, serials = self._pool.match_prefix(reusable, sequence.root)
        num_shared = max(0, len(cached) - self._num_recomputed)
        if self._state_slots.number:
            num_shared = self._state_slots.num_restorable(serials)
        ends = [sequence.root, *serials]
        num_needed = self._pool.num_needed(len(sequence.tokens)) - num_shared
        return PrefixMatch(reusable, cached, ends[-1], cached[:num_shared], ends[num_shared], num_needed)

    # ---- sequences that run ----

    def num_missing(self, sequence: Sequence, lookahead: int = 0) -> int:
        """Blocks needed for the next token and the proposed ones."""
        length = len(sequence.tokens)
        if lookahead:
            length += max(0, min(lookahead, sequence.room - 1))
        return max(0, self._pool.num_needed(length) - len(sequence.blocks))

    def has_room(self, lookahead: int, sequences: Many[Sequence]) -> bool:
        """Whether all decoding sequences can have blocks, and slots for states, for proposed tokens.

        None is preempted for those.
        """
        decoding = [sequence for sequence in sequences if sequence.is_decoding]
        if self._state_slots.number and len(decoding) * lookahead > self._state_slots.num_spare:
            return False
        return sum(self.num_missing(sequence, lookahead) for sequence in decoding) <= self._pool.num_free

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        """Give it further blocks; the caller has checked `num_free`."""
        sequence.blocks += self._pool.allocate(num_blocks)

    def grow_ahead(self, sequences: Many[Sequence]) -> bool:
        """Give them blocks for the token after the next one. False, without giving any, if too few are free."""
        size = self._pool.block_size
        full = [sequence for sequence in sequences if len(sequence.blocks) * size <= len(sequence.tokens)]
        needed = [self._pool.num_needed(len(sequence.tokens) + 1) - len(sequence.blocks) for sequence in full]
        if sum(needed) > self._pool.num_free:
            return False
        for sequence, number in zip(full, needed, strict=True):
            self.grow(sequence, number)
        return True

    def outgrown(self, sequences: Many[Sequence], ahead: int = 0) -> list[Sequence]:
        """Those that so many more tokens make longer than their rotary factors allow."""
        limit = self._switch_length
        if limit is None:
            return []
        return [each for each in sequences if not each.is_long and len(each.tokens) + ahead > limit]

    def set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The keys and values of the first `num_tokens` are in the cache; full blocks can be shared from now on."""
        sequence.num_computed = num_tokens
        size = self._pool.block_size
        while (sequence.num_cached_blocks + 1) * size <= num_tokens:
            start = sequence.num_cached_blocks * size
            block = sequence.blocks[sequence.num_cached_blocks]
            sequence.parent = self._pool.cache_block(block, sequence.parent, sequence.contents(start, start + size))
            sequence.num_cached_blocks += 1

    def free(self, sequence: Sequence) -> None:
        """Take its blocks and its slot; it is computed from the beginning if it runs again."""
        self._pool.free(sequence.blocks)
        self._state_slots.free(sequence)
        sequence.blocks = []
        sequence.num_computed = sequence.num_cached_blocks = sequence.num_in_draft = 0
        sequence.parent = sequence.root
