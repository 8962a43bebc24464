"""IndexerShape: the shape of indexers, which choose the tokens that a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.llm.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShape:
    """How an indexer chooses the tokens that a token attends to (DeepSeek V3.2), or blocks of them (MiniMax M3)."""

    num_heads: int
    head_size: int  # of its queries and keys; `rotary_size` of them are rotated
    num_chosen: int  # tokens, or blocks
    rotates_last: bool = False  # the last coordinates of a head are rotated, not the first (Hy 4)
    key_epsilon: float = 1e-6  # of the norm of keys
    paired_rope: bool = False  # the two coordinates of a rotation lie side by side
    pool_size: int = 0  # tokens are chosen in groups of so many, by a mean of their keys (GLM-5.3); 0: one by one
    has_mean_keys: bool = False  # of groups: a mean without weights, which is normalized and rotated (Qwen 4)
    block_size: int = 0  # tokens of a block; each head chooses for a key-value head. 0: tokens are chosen
    num_local_blocks: int = 0  # the last ones, which are always chosen
    plain_layers: frozenset[int] = frozenset()  # that attend to all tokens
    reads_inputs: bool = False  # of a layer, instead of latents of queries (Mistral Large 4)
    reusing_layers: frozenset[int] = frozenset()  # layers without one: the choice of the layer before counts (GLM)

    def __post_init__(self) -> None:
        given = {
            "heads": self.num_heads,
            "numbers of a head": self.head_size,
            "tokens or blocks to choose": self.num_chosen,
        }
        if wrong := [f"{number} {name}" for name, number in given.items() if number < 1]:
            raise CheckpointError(f"an indexer with {' and '.join(wrong)} is not supported; it needs at least 1")

    @property
    def cached_size(self) -> int:
        """The numbers of a token in the cache: its key, and the weights of its group's mean, if there are any."""
        return 2 * self.head_size if self.pool_size and not self.has_mean_keys else self.head_size

    def chooses_in(self, layer: int) -> bool:
        return layer not in self.reusing_layers and layer not in self.plain_layers
