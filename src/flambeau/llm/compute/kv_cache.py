"""KVCache: the keys and values of every layer, in blocks that any sequence may use.

A contiguous cache is one whose blocks are as long as a sequence: there is no second kind.

Shapes: L layers · P blocks · K tokens of a block · G key-value heads · D head size · T tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from flambeau.llm.models.architecture import Architecture

TRASH_BLOCK = 0  # never given to a sequence: padding writes its keys and values there


class KVCache:
    """Tensors [P, K, G, D] of keys and of values for each layer; block 0 is nobody's."""

    def __init__(
        self,
        arch: Architecture,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, block_size, arch.num_kv_heads, arch.head_size)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(arch.num_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(arch.num_layers)]

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Keep the keys and values of these tokens; a slot is block times block size plus place."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots_T, k_TGD)
        self.values[layer].flatten(0, 1).index_copy_(0, slots_T, v_TGD)


def block_bytes(arch: Architecture, block_size: int, dtype: torch.dtype) -> int:
    """The memory that one block takes in all layers."""
    return 2 * arch.num_layers * block_size * arch.num_kv_heads * arch.head_size * dtype.itemsize
