"""Blocks of attention and a feed-forward layer that several recurrent layers share (Zamba 2).

A block reads the hidden states beside the embeddings. Each layer that uses it has keys and values of its own, small
adapters of the block's projections, and a projection of what the block gives, which the recurrence reads too.

Shapes: … any leading dimensions · E hidden · H heads · G key-value heads · D head size · F intermediate · R rank
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flambeau.llm.models.activations import ACTIVATIONS
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attend, AttentionOptions
from flambeau.llm.models.norms import make_norm
from flambeau.llm.models.rope import Rotations, rotate


class SharedBlock(nn.Module):
    """The weights that layers share."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        hidden, heads, kv_heads, size = arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_size
        self.head_size, self.heads = size, [heads, kv_heads, kv_heads]
        self.is_rotated = not arch.unrotated_layers
        self.options = AttentionOptions(size**-0.5 if arch.attention_scale is None else arch.attention_scale)
        self.input_layernorm = make_norm(arch, 2 * hidden)
        self.qkv_proj = nn.Linear(2 * hidden, sum(self.heads) * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)
        self.pre_feedforward_layernorm = make_norm(arch)
        self.gate_up_proj = nn.Linear(hidden, 2 * arch.intermediate_size, bias=False)
        self.down_proj = nn.Linear(arch.intermediate_size, hidden, bias=False)
        self.activate = ACTIVATIONS[arch.activation]

    def forward(
        self, x: Tensor, embedded: Tensor, layer: int, adapters: BlockAdapters, rotations: Rotations, attend: Attend
    ) -> Tensor:
        """[…, E] to […, E], with the keys and values of a layer and its adapters."""
        y = self.input_layernorm(torch.cat((x, embedded), dim=-1))
        qkv = adapters.adapted_qkv(self.qkv_proj(y), y)
        q, k, v = torch.split(torch.unflatten(qkv, -1, (-1, self.head_size)), self.heads, dim=-2)
        if self.is_rotated:
            q, k = rotate(q, *rotations.ordinary), rotate(k, *rotations.ordinary)
        y = self.o_proj(attend(layer, q, k, v, self.options).flatten(-2))
        y = self.pre_feedforward_layernorm(y)
        gate, up = (self.gate_up_proj(y) + adapters.gate_up(y)).chunk(2, dim=-1)
        return self.down_proj(self.activate(gate) * up)  # type: ignore[no-any-return]


class BlockAdapter(nn.Sequential):
    """A product of two small matrices; the second one has the name of the projection that it changes."""

    def __init__(self, inputs: int, rank: int, name: str, outputs: int) -> None:
        super().__init__()
        self.add_module("down", nn.Linear(inputs, rank, bias=False))
        self.add_module(name, nn.Linear(rank, outputs, bias=False))


class BlockAdapters(nn.Module):
    """What one layer changes in a block."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        hidden, size, rank = arch.hidden_size, arch.head_size, arch.adapter_rank
        self.gate_up = BlockAdapter(hidden, rank, "gate_up_proj", 2 * arch.intermediate_size)
        outputs = {"q": arch.num_heads * size, "k": arch.num_kv_heads * size, "v": arch.num_kv_heads * size}
        self.qkv = nn.ModuleDict(
            {key: BlockAdapter(2 * hidden, rank, f"{key}_proj", number) for key, number in outputs.items()}
            if arch.adapts_attention
            else {}
        )

    def adapted_qkv(self, qkv: Tensor, y: Tensor) -> Tensor:
        """Queries, keys and values of a block, and what is added."""
        return qkv + torch.cat([adapter(y) for adapter in self.qkv.values()], dim=-1) if self.qkv else qkv
