"""LatentAttention: keys and values of all heads are computed from one small vector of a token, its latent (MLA).

The cache holds the latent and one rotated key for all heads, nothing else. Attention runs on the latents themselves:
the weights that would make keys are applied to the queries instead, and those that would make values to the result.
To `attend` this is attention with one key-value head, whose values are its keys.

Shapes: … any leading dimensions · E hidden · H heads · R latent · P rotated part of a head · N the rest of it · V value
of a head
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attend, AttentionOptions, SharedKeys
from flambeau.llm.models.indexer import Indexer
from flambeau.llm.models.norms import PositionScale, RMSNorm
from flambeau.llm.models.rope import Angles, Rotations, rotate, unpaired


class LatentUp(nn.Module):
    """The weights that make keys and values from a latent; never quantized, as they are not used as a linear layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.num_heads, self.key_size, self.value_size = arch.num_heads, arch.unrotated_size, arch.value_size
        rows = arch.num_heads * (arch.unrotated_size + arch.value_size)
        self.weight = nn.Parameter(torch.empty(rows, arch.latent_size))
        nn.init.normal_(self.weight, std=arch.latent_size**-0.5)

    def parts(self) -> tuple[Tensor, Tensor]:
        """For keys [H, N, R], and for values [H, V, R]."""
        heads = self.weight.view(self.num_heads, self.key_size + self.value_size, -1)
        keys, values = torch.split(heads, [self.key_size, self.value_size], dim=1)
        return keys, values


def sizes_of_layer(arch: Architecture, layer: int) -> Architecture:
    """The architecture with the sizes of one layer; what a layer does not rotate is plain, unless it says otherwise."""
    own = arch.of_layer(layer)
    if arch.shapes and arch.shapes[layer].latents is not None:
        return own
    size = arch.unrotated_size + (arch.rotary_size or 0)
    return replace(own, unrotated_size=size - (own.rotary_size or 0))


class LatentAttention(nn.Module):
    """Attention of many heads over one latent per token; queries may have a latent of their own."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        assert arch.rotary_size is not None
        arch = sizes_of_layer(arch, layer)
        rotary_size = arch.rotary_size or 0  # a layer may rotate nothing
        size = arch.unrotated_size + rotary_size
        hidden, heads, rank = arch.hidden_size, arch.num_heads, arch.query_latent_size
        self.layer, self.key_layer = layer, arch.key_layer(layer)
        self.num_heads, self.latent_size = heads, arch.latent_size
        self.rotary_size, self.unrotated_size = rotary_size, arch.unrotated_size
        self.latent_scale = arch.latent_scale
        self.is_paired, self.is_tempered = arch.paired_rope, arch.tempers_rotated
        self.is_rotated = layer not in arch.unrotated_layers and rotary_size > 0
        self.window = arch.window(layer)
        self.is_local = self.window is not None and arch.local_rope_theta is not None
        self.scale = size**-0.5 if arch.attention_scale is None else arch.attention_scale
        if rank:
            self.q_a_proj = nn.Linear(hidden, rank, bias=arch.qkv_bias)
            self.q_a_layernorm = RMSNorm(rank, arch.latent_epsilon)
            self.joins_latents = arch.joins_query_latents
            self.value_size = arch.value_size
            own, given = (size + arch.value_size, 2 * rank) if self.joins_latents else (size, rank)
            self.q_b_proj = nn.Linear(given, heads * own, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, heads * size, bias=False)
        self.has_query_latent = rank > 0
        self.has_own_keys = self.key_layer == layer
        if self.has_own_keys:
            self.kv_a_proj_with_mqa = nn.Linear(hidden, arch.latent_size + rotary_size, bias=arch.qkv_bias)
            self.kv_a_layernorm = RMSNorm(arch.latent_size, arch.latent_epsilon)
        has_norm = arch.normalizes_rotated_keys and self.has_own_keys
        self.k_rotated_norm = RMSNorm(rotary_size, arch.latent_epsilon) if has_norm else None
        self.position_scale = PositionScale(heads) if arch.position_scales else None
        self.kv_b_proj = LatentUp(arch)
        self.o_proj = nn.Linear(heads * arch.value_size, hidden, bias=arch.output_bias)
        self.gates_values = arch.attention_gate is not None
        num_gates = heads * arch.value_size if self.gates_values else heads
        has_gates = arch.gates_heads or self.gates_values
        self.gate_proj = nn.Linear(hidden, num_gates, bias=False) if has_gates else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if arch.has_sinks else None
        self.indexer = Indexer(arch) if arch.index_size(layer) else None
        self.reuses_selection = arch.indexer is not None and layer in arch.indexer.reusing_layers

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend, shared: SharedKeys | None = None) -> Tensor:
        """[…, E] to […, E]."""
        rotation = rotations.local if self.is_local else rotations.ordinary
        k = self.keys(x, rotation, shared)
        q, gates, query_latent = self.queries(x)
        q_plain, q_rotated = torch.split(q, [self.unrotated_size, self.rotary_size], dim=-1)
        to_keys_HNR, to_values_HVR = self.kv_b_proj.parts()
        q_latent = torch.einsum("...hn,hnr->...hr", q_plain, to_keys_HNR)
        q = torch.cat((q_latent, self.rotated(q_rotated, rotation)), dim=-1)
        if self.position_scale is not None:
            assert rotations.log_positions is not None
            q = self.position_scale(q, rotations.log_positions)
        if self.is_tempered and rotations.query_scale is not None:
            q = (q * rotations.query_scale).to(q.dtype)
        options = AttentionOptions(
            self.scale, self.window, sinks=self.sinks, reuses_selection=self.reuses_selection, index_layer=self.layer
        )
        if self.indexer is not None:
            options = options._replace(selection=self.indexer(x, query_latent, rotations))
        y = attend(self.key_layer, q, k, k, options)
        y = torch.einsum("...hr,hvr->...hv", y[..., : self.latent_size], to_values_HVR)
        if gates is not None:
            y = (y * torch.sigmoid(gates.float())).to(y.dtype)
        if self.gate_proj is not None:
            gates = torch.sigmoid(self.gate_proj(x).float()).to(y.dtype)
            y = y * (gates.view_as(y) if self.gates_values else gates.unsqueeze(-1))
        return self.o_proj(y.flatten(-2))  # type: ignore[no-any-return]

    def keys(self, x: Tensor, rotation: Angles, shared: SharedKeys | None) -> Tensor:
        """The latent and the rotated key of each token […, 1, R + P], which may be those of another layer."""
        if not self.has_own_keys:
            assert shared is not None
            return shared[self.key_layer][0]
        latent, k_rotated = self.kv_a_proj_with_mqa(x).split((self.latent_size, self.rotary_size), dim=-1)
        if self.k_rotated_norm is not None:
            k_rotated = self.k_rotated_norm(k_rotated)
        k_rotated = self.rotated(k_rotated.unsqueeze(-2), rotation)
        latent = self.kv_a_layernorm(latent)
        if self.latent_scale != 1.0:
            latent = latent * self.latent_scale
        k = torch.cat((latent.unsqueeze(-2), k_rotated), dim=-1)
        if shared is not None:
            shared[self.layer] = (k,)
        return k

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[…, E] to […, H, N + P], gates […, H, V] of values if these come with them, and the latent of queries."""
        if not self.has_query_latent:
            return torch.unflatten(self.q_proj(x), -1, (self.num_heads, -1)), None, None
        latent = self.q_a_proj(x)
        normal = self.q_a_layernorm(latent)
        joined = torch.cat((normal, latent), dim=-1) if self.joins_latents else normal
        q, gates = torch.unflatten(self.q_b_proj(joined), -1, (self.num_heads, -1)), None
        if self.joins_latents:
            q, gates = q.tensor_split([q.shape[-1] - self.value_size], dim=-1)
        return q, gates, normal

    def rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """The rotary part […, heads, P] of queries or keys."""
        if not self.is_rotated:
            return x
        return rotate(unpaired(x) if self.is_paired else x, *angles)
