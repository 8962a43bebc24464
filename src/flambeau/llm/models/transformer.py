"""Transformer: a Llama-shaped network, and nothing else.

How keys and values are kept is the business of `attend`; quantisation, sharding and compilation are applied to the
network from their own files. Weights have the names of Hugging Face checkpoints, so that nothing is converted.

Shapes: … any leading dimensions (tokens, or batch and tokens) · E hidden · H heads · G key-value heads · D head size
· F intermediate · V vocabulary
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.rope import rotate, rotation_tables


class Attend(Protocol):
    """Keeps the keys and values of a layer's tokens and lets its queries look at them."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """From q […, H, D] and k, v […, G, D] to […, H, D]."""


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input, in its own type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Queries, keys and values with rotary positions; several query heads share one key-value head."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        size, heads, kv_heads = arch.head_size, arch.num_heads, arch.num_kv_heads
        self.layer, self.head_size = layer, size
        self.scale = size**-0.5
        self.window = arch.window(layer)
        self.q_proj = nn.Linear(arch.hidden_size, heads * size, bias=arch.qkv_bias)
        self.k_proj = nn.Linear(arch.hidden_size, kv_heads * size, bias=arch.qkv_bias)
        self.v_proj = nn.Linear(arch.hidden_size, kv_heads * size, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(heads * size, arch.hidden_size, bias=arch.output_bias)
        self.q_norm = RMSNorm(size, arch.norm_epsilon) if arch.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, arch.norm_epsilon) if arch.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_size)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_size)))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_size))
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        y = attend(self.layer, q, k, v, scale=self.scale, window=self.window)
        return self.o_proj(y.flatten(-2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias)
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and a feed-forward part, each beside a residual stream."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.norm_epsilon)
        self.self_attn = Attention(arch, layer)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.norm_epsilon)
        self.mlp = MLP(arch)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Body(nn.Module):
    """Embedding, layers and the last normalisation."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Layer(arch, i) for i in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.norm_epsilon)


class Transformer(nn.Module):
    """Token ids and their positions to hidden states, and those to logits."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.model = Body(arch)
        self.lm_head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        if arch.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        cos, sin = rotation_tables(arch, arch.max_length)
        self.rotation_cos: Tensor
        self.rotation_sin: Tensor
        self.register_buffer("rotation_cos", cos, persistent=False)
        self.register_buffer("rotation_sin", sin, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The hidden state […, E] of every token of […]."""
        x = self.model.embed_tokens(ids)
        rotation = self.rotation_cos[positions].unsqueeze(-2), self.rotation_sin[positions].unsqueeze(-2)
        for layer in self.model.layers:
            x = layer(x, rotation, attend)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states […, E] to logits […, V], in float32."""
        return self.lm_head(hidden).float()  # type: ignore[no-any-return]
