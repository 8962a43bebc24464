"""Indexer: which cached tokens a token attends to (sparse attention of DeepSeek V3.2, GLM-5 and MiniMax M3).

A few small heads score every token against those before it, by keys of their own, which are cached beside the latents.
Attention is to the tokens with the best scores only. Up to so many tokens, that is all of them.

The original code rounds these queries and keys to fp8, after a rotation (Hadamard's) that leaves products as they are.
Here they have the type of the network, and keys that of the cache.

Shapes: … any leading dimensions · E hidden · L latent of queries · I heads · K size of a head
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.norms import CenteredNorm, PositionScale, make_norm
from flambeau.llm.models.rope import Angles, Rotations, both_halves, rotate, unpaired


class BlockChoice(NamedTuple):
    """How heads choose blocks of tokens, each for a key-value head."""

    size: int  # tokens of a block
    num_local: int  # the last blocks, which are always chosen
    num_heads: int  # of this rank
    first_head: int = 0


class Selection(NamedTuple):
    """What an indexer says of tokens; attention is to the keys that match best."""

    q: Tensor  # […, I, K]
    k: Tensor  # […, K], to be cached; with pools […, 2·K]
    weights: Tensor | None  # […, I] of the heads, in float32; None: each chooses for itself
    num_chosen: int
    blocks: BlockChoice | None = None
    pools: Pools | MeanPools | None = None


class Pools(NamedTuple):
    """Groups of tokens that are chosen together. Beside the key of a token, the cache has weights of its numbers."""

    size: int
    bias: Tensor  # [size, K], added to the weights, whose softmax is a mean of the keys

    def keys(self, cached: Tensor) -> Tensor:
        """Of tokens […, C, 2·K] to groups […, P, K]; the last group may have padding."""
        missing = -cached.shape[-2] % self.size
        groups = torch.unflatten(F.pad(cached, (0, 0, 0, missing)), -2, (-1, self.size))
        keys, weights = groups.chunk(2, dim=-1)
        return ((weights.float() + self.bias.float()).softmax(dim=-2).to(keys.dtype) * keys).sum(dim=-2)


class MeanPools(NamedTuple):
    """Groups of tokens that are chosen together, by a mean of their keys, which has the place of the first token."""

    size: int
    norm: nn.Module
    inverse: Tensor  # [rotary_size / 2]: the rotation of each pair of coordinates from one place to the next
    factor: float  # of cosine and sine

    def keys(self, cached: Tensor) -> Tensor:
        """Of tokens […, C, K] to groups […, P, K]; the last group may have padding."""
        missing = -cached.shape[-2] % self.size
        groups = torch.unflatten(F.pad(cached, (0, 0, 0, missing)), -2, (-1, self.size))
        keys = self.norm(groups.float().mean(dim=-2).to(cached.dtype))
        starts = torch.arange(keys.shape[-2], device=keys.device) * self.size
        angles = starts.unsqueeze(-1).float() * self.inverse
        first, rest = keys.unsqueeze(-2).tensor_split([2 * len(self.inverse)], dim=-1)
        turned = rotate(first, *both_halves(angles.cos() * self.factor, angles.sin() * self.factor))
        return torch.cat((turned, rest), dim=-1).squeeze(-2)


class HeadWeights(nn.Module):
    """A linear layer in float32, never quantized: it decides between scores that are close."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size, dtype=torch.float32))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


class Indexer(nn.Module):
    """Scores of tokens by several heads with one key for all, whose first part is rotated."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        assert arch.indexer is not None
        assert arch.rotary_size is not None
        shape = self.shape = arch.indexer
        self.rotary_size = arch.rotary_size
        size = arch.hidden_size if shape.reads_inputs else arch.query_latent_size
        self.q_input_norm = CenteredNorm(size, shape.key_epsilon, bias=True) if shape.reads_inputs else None
        self.position_scale = PositionScale(shape.num_heads) if arch.position_scales else None
        self.wq_b = nn.Linear(size, shape.num_heads * shape.head_size, bias=False)
        self.wk = nn.Linear(arch.hidden_size, shape.head_size, bias=False)
        self.k_norm = CenteredNorm(shape.head_size, shape.key_epsilon, bias=True)
        self.weights_proj = HeadWeights(arch.hidden_size, shape.num_heads)
        self.scale = (shape.num_heads * shape.head_size) ** -0.5
        if shape.pool_size:
            self.pool_gate = nn.Parameter(torch.empty(shape.head_size, arch.hidden_size))
            nn.init.normal_(self.pool_gate, std=arch.hidden_size**-0.5)
            self.pool_bias = nn.Parameter(torch.zeros(shape.pool_size, shape.head_size, dtype=torch.float32))

    def forward(self, x: Tensor, query_latent: Tensor | None, rotations: Rotations) -> Selection:
        """From inputs […, E] of a layer, and latents […, L] of its queries if there are any."""
        given = query_latent if self.q_input_norm is None else self.q_input_norm(x)
        q = torch.unflatten(self.wq_b(given), -1, (self.shape.num_heads, -1))
        if self.position_scale is not None:
            assert rotations.log_positions is not None
            q = self.position_scale(q, rotations.log_positions)
        k = self.k_norm(self.wk(x)).unsqueeze(-2)
        if self.rotary_size:
            q, k = self.rotated(q, rotations.ordinary), self.rotated(k, rotations.ordinary)
        k = k.squeeze(-2)
        weights, number = self.weights_proj(x) * self.scale, self.shape.num_chosen
        if not self.shape.pool_size:
            return Selection(q, k, weights, number)
        k = torch.cat((k, F.linear(x, self.pool_gate)), dim=-1)
        return Selection(q, k, weights, number, pools=Pools(self.shape.pool_size, self.pool_bias))

    def rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """[…, heads, K] with the first coordinates rotated, or the last ones."""
        if self.shape.rotates_last:
            rest, last = x.tensor_split([self.shape.head_size - self.rotary_size], dim=-1)
            return torch.cat((rest, self.rotate(last, angles)), dim=-1)
        first, rest = x.tensor_split([self.rotary_size], dim=-1)
        return torch.cat((self.rotate(first, angles), rest), dim=-1)

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        return rotate(unpaired(x) if self.shape.paired_rope else x, *angles)


class BlockIndexer(nn.Module):
    """Heads that choose blocks of tokens; a key-value head attends to those that one of them chooses (MiniMax M3)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        assert arch.indexer is not None
        shape = self.shape = arch.indexer
        self.rotary_size = arch.rotary_size or arch.head_size
        self.wq_b = nn.Linear(arch.hidden_size, shape.num_heads * shape.head_size, bias=False)
        self.wk = nn.Linear(arch.hidden_size, shape.head_size, bias=False)
        self.q_norm, self.k_norm = make_norm(arch, shape.head_size), make_norm(arch, shape.head_size)
        self.choice = BlockChoice(shape.block_size, shape.num_local_blocks, shape.num_heads)

    def forward(self, x: Tensor, rotations: Rotations) -> Selection:
        """From inputs […, E] of a layer."""
        angles = rotations.ordinary
        q = self.q_norm(torch.unflatten(self.wq_b(x), -1, (self.shape.num_heads, -1)))
        k = self.k_norm(self.wk(x)).unsqueeze(-2)
        q, k = self.rotated(q, angles), self.rotated(k, angles).squeeze(-2)
        return Selection(q, k, None, self.shape.num_chosen, self.choice)

    def rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """[…, heads, K] with the first coordinates rotated."""
        first, rest = x.tensor_split([self.rotary_size], dim=-1)
        return torch.cat((rotate(first, *angles), rest), dim=-1)


class PoolIndexer(nn.Module):
    """Heads that choose groups of tokens for all heads of attention, by scores that are added up (Qwen 4)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        assert arch.indexer is not None
        shape = self.shape = arch.indexer
        self.rotary_size = arch.rotary_size or arch.head_size
        self.index_qk_proj = nn.Linear(arch.hidden_size, (shape.num_heads + 1) * shape.head_size, bias=False)
        self.q_layernorm, self.k_layernorm = make_norm(arch, shape.head_size), make_norm(arch, shape.head_size)

    def forward(self, x: Tensor, rotations: Rotations) -> Selection:
        """From inputs […, E] of a layer."""
        assert rotations.inverse is not None
        shape = self.shape
        heads = torch.unflatten(self.index_qk_proj(x), -1, (-1, shape.head_size))
        q, k = heads.tensor_split([shape.num_heads], dim=-2)
        first, rest = self.q_layernorm(q).tensor_split([self.rotary_size], dim=-1)
        q = torch.cat((rotate(first, *rotations.ordinary), rest), dim=-1)
        weights = x.new_full((*q.shape[:-1],), shape.head_size**-0.5, dtype=torch.float32)
        pools = MeanPools(shape.pool_size, self.k_layernorm, *rotations.inverse)
        return Selection(q, k.squeeze(-2), weights, shape.num_chosen, pools=pools)
