"""CompressedAttention: one key for all heads, which is the value too, of a window of tokens and of entries before it.

An entry stands for several tokens (compressor.py). In some layers tokens attend to all entries that are complete, in
others to those that an indexer chooses, in the rest to the window alone (DeepSeek V4).

The last coordinates of keys and queries are rotated. Keys are values, so what attention gives is rotated back.

Shapes: … any leading dimensions · E hidden · L latent of queries · H heads · D head size · I heads of the indexer
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attend, AttentionOptions, Entries
from flambeau.llm.models.compressor import Compressor, Series
from flambeau.llm.models.indexer import HeadWeights, Selection
from flambeau.llm.models.norms import PlainRMSNorm, RMSNorm
from flambeau.llm.models.rope import Angles, Rotations, rotate, unpaired


class GroupedProjection(nn.Module):
    """Groups of heads are projected apart; never quantized, as it is no linear layer of all heads."""

    def __init__(self, num_groups: int, in_features: int, rank: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.weight = nn.Parameter(torch.empty(num_groups * rank, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[…, H·D] to […, groups × rank]."""
        groups = torch.unflatten(x, -1, (self.num_groups, -1))
        weights = self.weight.view(self.num_groups, -1, self.weight.shape[1])
        return torch.einsum("...gi,gri->...gr", groups, weights).flatten(-2)


class EntryIndexer(nn.Module):
    """Queries of a few small heads, which are compared with what the cache keeps of entries."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        assert arch.compression is not None
        shape = self.shape = arch.compression
        width = shape.num_index_heads * shape.index_size
        self.wq_b = nn.Linear(arch.query_latent_size, width, bias=False)
        self.weights_proj = HeadWeights(arch.hidden_size, shape.num_index_heads)
        self.scale = width**-0.5


class CompressedAttention(nn.Module):
    """Attention of many heads over one key of a token, and one of an entry."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        assert arch.compression is not None
        assert arch.rotary_size is not None
        shape, size = arch.compression, arch.head_size
        self.layer, self.num_heads, self.size = layer, arch.num_heads, size
        self.rotary_size, self.window, self.rate = arch.rotary_size, arch.window(layer), shape.rates[layer]
        self.scale = size**-0.5
        self.q_a_proj = nn.Linear(arch.hidden_size, arch.query_latent_size, bias=False)
        self.q_a_norm = RMSNorm(arch.query_latent_size, arch.norm_epsilon)
        self.q_b_proj = nn.Linear(arch.query_latent_size, arch.num_heads * size, bias=False)
        self.q_b_norm = PlainRMSNorm(size, arch.norm_epsilon)
        self.kv_proj = nn.Linear(arch.hidden_size, size, bias=False)
        self.kv_norm = RMSNorm(size, arch.norm_epsilon)
        self.sinks = nn.Parameter(torch.zeros(arch.num_heads))
        width = arch.num_heads * size // shape.num_output_groups
        self.o_a_proj = GroupedProjection(shape.num_output_groups, width, shape.output_rank)
        self.o_b_proj = nn.Linear(shape.num_output_groups * shape.output_rank, arch.hidden_size, bias=False)
        if self.rate:
            overlaps = layer in shape.overlapping_layers
            self.recurrence = Compressor(arch, layer)
            self.compressor = Series(arch, size, self.rate, overlaps=overlaps)
            self.indexer = EntryIndexer(arch) if overlaps else None
            self.index_compressor = Series(arch, shape.index_size, self.rate, overlaps=True) if overlaps else None

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        angles = rotations.ordinary if self.rate else rotations.local
        query_latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_norm(torch.unflatten(self.q_b_proj(query_latent), -1, (self.num_heads, -1)))
        q = self.rotated(q, angles)
        k = self.rotated(self.kv_norm(self.kv_proj(x)).unsqueeze(-2), angles)
        entries = self.entries(x, query_latent, rotations, attend) if self.rate else None
        options = AttentionOptions(self.scale, self.window, sinks=self.sinks, is_over_entries=True, entries=entries)
        y = self.rotated_back(attend(self.layer, q, k, k, options), angles)
        return self.o_b_proj(self.o_a_proj(y.flatten(-2)))  # type: ignore[no-any-return]

    def entries(self, x: Tensor, query_latent: Tensor, rotations: Rotations, attend: Attend) -> Entries:
        """The entries that these tokens complete, and what chooses among all."""
        positions = rotations.positions
        assert positions is not None
        parts = self.compressor(x, positions % self.rate)
        if self.index_compressor is not None:  # the state holds both
            pairs = zip(parts, self.index_compressor(x, positions % self.rate), strict=True)
            parts = [(torch.cat((v, w), dim=-1), torch.cat((s, t), dim=-1)) for (v, s), (w, t) in pairs]
        tensors = [tensor for part in parts for tensor in part]
        found = attend.recur(self.layer, self.recurrence, positions.unsqueeze(-1), *tensors)
        angles = rotations.of_starts[self.rate]
        key, rest = found.to(x.dtype).tensor_split([self.size], dim=-1)
        key = self.rotated(self.compressor.kv_norm(key).unsqueeze(-2), angles).squeeze(-2)
        if self.indexer is None or self.index_compressor is None:
            return Entries(key, self.rate)
        index_key = self.rotated(self.index_compressor.kv_norm(rest).unsqueeze(-2), angles).squeeze(-2)
        q = torch.unflatten(self.indexer.wq_b(query_latent), -1, (self.indexer.shape.num_index_heads, -1))
        weights = self.indexer.weights_proj(x) * self.indexer.scale
        q = self.rotated(q, rotations.ordinary)
        return Entries(key, self.rate, Selection(q, index_key, weights, self.indexer.shape.num_chosen))

    def rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """[…, heads, D] with the last coordinates rotated, those of all pairs behind each other."""
        rest, last = x.tensor_split([x.shape[-1] - self.rotary_size], dim=-1)
        return torch.cat((rest, rotate(unpaired(last), *angles)), dim=-1)

    def rotated_back(self, x: Tensor, angles: Angles) -> Tensor:
        """[…, heads, D] as before the rotation, with the coordinates of each pair side by side."""
        rest, last = x.tensor_split([x.shape[-1] - self.rotary_size], dim=-1)
        last = rotate(last, angles[0], -angles[1])
        return torch.cat((rest, torch.unflatten(last, -1, (2, -1)).transpose(-1, -2).flatten(-2)), dim=-1)
