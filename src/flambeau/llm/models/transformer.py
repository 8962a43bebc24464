"""Transformer: a Llama-shaped network, and nothing else.

`attend` stores keys and values; quantization, sharding and compilation are applied to the network from their own files.
Weights have the names of Hugging Face checkpoints, except for fused ones: `qkv_proj` has the rows of q_proj, k_proj and
v_proj, `gate_up_proj` those of gate_proj and up_proj.

Shapes: … any leading dimensions (tokens, or batch and tokens) · E hidden · H heads · G key-value heads · D head size
· F intermediate · V vocabulary
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.rope import Rotation, rotate


class Attend(Protocol):
    """Stores the keys and values of a layer's tokens and computes the attention of its queries."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """From q […, H, D] and k, v […, G, D] to […, H, D]; the inputs are views of one larger tensor."""


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    """Queries, keys and values with rotary positions; several query heads share one key-value head."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        size, heads, kv_heads = arch.head_size, arch.num_heads, arch.num_kv_heads
        self.layer, self.head_size, self.num_heads, self.num_kv_heads = layer, size, heads, kv_heads
        self.scale = size**-0.5
        self.window = arch.window(layer)
        self.is_rotated = layer not in arch.unrotated_layers
        self.qkv_proj = nn.Linear(arch.hidden_size, (heads + 2 * kv_heads) * size, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(heads * size, arch.hidden_size, bias=arch.output_bias)
        self.q_norm = RMSNorm(size, arch.norm_epsilon) if arch.qk_norm else None
        self.k_norm = RMSNorm(size, arch.norm_epsilon) if arch.qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.split_qk(qk)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        if self.is_rotated:
            qk = rotate(qk, *rotation)  # queries and keys at once: half the kernels
        q, k = self.split_qk(qk)
        y = attend(self.layer, q, k, v, scale=self.scale, window=self.window)
        return self.o_proj(y.flatten(-2))  # type: ignore[no-any-return]

    def split_qk(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """[…, H+G, D] to […, H, D] and […, G, D]."""
        q, k = torch.split(qk, [self.num_heads, self.num_kv_heads], dim=-2)
        return q, k


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(arch.hidden_size, 2 * arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.norm_epsilon)
        self.self_attn = Attention(arch, layer)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.norm_epsilon)
        self.mlp = SparseMLP(arch) if arch.has_experts(layer) else MLP(arch)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(arch, i) for i in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.norm_epsilon)


class Transformer(nn.Module):
    """Token ids and their positions to hidden states, and those to logits."""

    lm_head: nn.Module | None  # None: the embeddings are used instead (tied)

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.model = Decoder(arch)
        self.lm_head = None if arch.tied_embeddings else nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        self.rotation = Rotation(arch)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The hidden states […, E] of the tokens […]."""
        x = self.model.embed_tokens(ids)
        rotation = self.rotation(positions)
        for layer in self.model.layers:
            x = layer(x, rotation, attend)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states […, E] to logits […, V], in float32."""
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight).float()
        return self.lm_head(hidden).float()  # type: ignore[no-any-return]


def is_unmodified(module: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether a module computes what this file says, so that a kernel may replace it: known class, no hooks.

    `others` are further classes that a kernel supports.
    """
    known = type(module) in (nn.Linear, nn.Embedding, MLP, Rotation, nn.ModuleList) or isinstance(module, others)
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (known or type(module).__module__ == Transformer.__module__)
