"""CompressionShape: attention to a window of tokens, and to entries that stand for several tokens each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flambeau.llm.errors import LLMError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionShape:
    """Attention whose keys are its values, to a window and to compressed entries (DeepSeek V4)."""

    rates: tuple[int, ...]  # of each layer: the tokens of an entry; 0: there are none
    overlapping_layers: frozenset[int]  # entries are made of two groups of tokens, and an indexer chooses some
    num_index_heads: int
    index_size: int  # of the indexer's queries, and of what it keeps of an entry
    num_chosen: int
    num_output_groups: int  # of heads, whose outputs are projected apart …
    output_rank: int  # … to so many numbers each

    @property
    def compressing_layers(self) -> frozenset[int]:
        return frozenset(layer for layer, rate in enumerate(self.rates) if rate)

    def part(self, num_ranks: int) -> CompressionShape:
        """One rank's: some of the heads, and all of the rest."""
        return replace(self, num_output_groups=self.num_output_groups // num_ranks)

    def entries_of_block(self, layer: int, block_size: int) -> int:
        """How many entries of a layer a block of the cache holds."""
        rate = self.rates[layer]
        if block_size % rate and rate % block_size:
            raise LLMError(
                f"blocks of {block_size} tokens do not fit compressed entries, which stand for {rate} tokens each; set "
                f"block_size to a divisor or a multiple of {math.lcm(*filter(None, self.rates))}"
            )
        return max(1, block_size // rate)
