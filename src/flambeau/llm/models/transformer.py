"""Transformer: one decoder, assembled from the parts that an Architecture names; Llama's are the defaults.

`attend` stores keys and values; quantization, sharding and compilation are applied to the network from their own files.
Weights have the names of Hugging Face checkpoints, except for fused ones: `qkv_proj` has the rows of q_proj, k_proj and
v_proj, `gate_up_proj` those of gate_proj and up_proj.

Shapes: … any leading dimensions (tokens, or batch and tokens) · E hidden · H heads · G key-value heads · D head size
· F intermediate · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Activation, Architecture
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.rope import Rotation, Rotations, rotate


class Attend(Protocol):
    """Stores the keys and values of a layer's tokens and computes the attention of its queries."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        has_alibi: bool = False,
    ) -> Tensor:
        """From q […, H, D] and k, v […, G, D] to […, H, D]; the inputs are views of one larger tensor."""


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class OffsetRMSNorm(RMSNorm):
    """An RMSNorm whose weights are stored as their difference from a number."""

    def __init__(self, size: int, epsilon: float, offset: float) -> None:
        super().__init__(size, epsilon)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), weight.shape, weight, self.epsilon).to(x.dtype)


class CenteredNorm(nn.Module):
    """Subtracts the mean and divides by the deviation, in float32."""

    def __init__(self, size: int, epsilon: float, *, weight: bool = True, bias: bool, offset: float = 0.0) -> None:
        super().__init__()
        self.size, self.epsilon, self.offset = size, epsilon, offset
        self.has_weight = weight
        self.weight: nn.Parameter
        self.register_parameter("weight", nn.Parameter(torch.ones(size)) if weight else None)
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.has_weight else None
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), (self.size,), weight, bias, self.epsilon).to(x.dtype)


class HeadNorm(nn.Module):
    """A layer norm per head; each head has its own weights."""

    def __init__(self, num_heads: int, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[…, H, D] to […, H, D]."""
        y = F.layer_norm(x.float(), self.weight.shape[-1:], eps=self.epsilon)
        return (y * self.weight.float()).to(x.dtype)


def make_norm(arch: Architecture, size: int | None = None) -> RMSNorm | CenteredNorm:
    """A norm over the hidden state, or over so many numbers."""
    size = size or arch.hidden_size
    if arch.norm == "layer":
        return CenteredNorm(
            size, arch.norm_epsilon, weight=arch.has_norm_weight, bias=arch.norm_bias, offset=arch.norm_offset
        )
    if arch.norm_offset:
        return OffsetRMSNorm(size, arch.norm_epsilon, arch.norm_offset)
    return RMSNorm(size, arch.norm_epsilon)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


class Attention(nn.Module):
    """Queries, keys and values with rotary positions; several query heads share one key-value head."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        size, heads, kv_heads = arch.head_size, arch.num_heads, arch.num_kv_heads
        self.layer, self.head_size, self.num_heads, self.num_kv_heads = layer, size, heads, kv_heads
        self.scale = size**-0.5 if arch.attention_scale is None else arch.attention_scale
        self.softcap = arch.attention_softcap
        self.window = arch.window(layer)
        self.is_local = self.window is not None and arch.local_rope_theta is not None
        self.rotary_size = arch.rotary_size
        self.is_rotated = layer not in arch.unrotated_layers
        self.qkv_proj = nn.Linear(arch.hidden_size, (heads + 2 * kv_heads) * size, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(heads * size, arch.hidden_size, bias=arch.output_bias)
        self.clip = arch.clip_qkv
        self.has_alibi = arch.has_alibi
        self.sinks = nn.Parameter(torch.zeros(heads)) if arch.has_sinks else None
        spans = (heads * size, kv_heads * size) if arch.wide_qk_norm else (size, size)
        self.is_wide = arch.wide_qk_norm
        self.q_norm: nn.Module | None = make_norm(arch, spans[0]) if arch.qk_norm else None
        self.k_norm: nn.Module | None = make_norm(arch, spans[1]) if arch.qk_norm else None
        if arch.separate_qk_norm:
            self.q_norm = HeadNorm(heads, size, arch.norm_epsilon)
            self.k_norm = HeadNorm(kv_heads, size, arch.norm_epsilon)

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.split_qk(qk)
            if self.is_wide:
                q, k = q.flatten(-2), k.flatten(-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-1 if self.is_wide else -2)
            if self.is_wide:
                qk = qk.view(*qk.shape[:-1], -1, self.head_size)
        if self.clip is not None:
            qk, v = qk.clamp(-self.clip, self.clip), v.clamp(-self.clip, self.clip)
        if self.is_rotated:
            rotation = rotations[1 if self.is_local else 0]  # torch.compile of PyTorch 2.11 takes no bool here
            if self.rotary_size is None:
                qk = rotate(qk, *rotation)  # queries and keys at once: half the kernels
            else:
                rotated, rest = qk.tensor_split([self.rotary_size], dim=-1)
                qk = torch.cat((rotate(rotated, *rotation), rest), dim=-1)
        q, k = self.split_qk(qk)
        more: dict[str, Any] = {} if self.softcap is None else {"softcap": self.softcap}
        if self.sinks is not None:
            more["sinks"] = self.sinks
        if self.has_alibi:
            more["has_alibi"] = True
        y = attend(self.layer, q, k, v, scale=self.scale, window=self.window, **more)
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
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activate(gate) * up)  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """A feed-forward layer without a gate."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return self.down_proj(self.activate(self.up_proj(x)))  # type: ignore[no-any-return]


def make_mlp(arch: Architecture, layer: int) -> nn.Module:
    if arch.has_experts(layer):
        return SparseMLP(arch)
    return MLP(arch) if arch.has_gate else PlainMLP(arch)


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(arch)
        self.self_attn = Attention(arch, layer)
        self.post_attention_layernorm = make_norm(arch)
        self.mlp = make_mlp(arch, layer)
        self.residual_scale = arch.residual_scale

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = self.add(x, self.self_attn(self.input_layernorm(x), rotations, attend))
        return self.add(x, self.mlp(self.post_attention_layernorm(x)))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.residual_scale == 1.0 else x + y * self.residual_scale


class PostNormLayer(DecoderLayer):
    """Norms after attention and the feed-forward layer, and before them too if there are norms in `both` places."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.has_both = arch.norm_places == "both"
        self.post_feedforward_layernorm = make_norm(arch)
        if self.has_both:
            self.pre_feedforward_layernorm = make_norm(arch)
        else:
            del self.input_layernorm

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        y = self.input_layernorm(x) if self.has_both else x
        x = self.add(x, self.post_attention_layernorm(self.self_attn(y, rotations, attend)))
        y = self.pre_feedforward_layernorm(x) if self.has_both else x
        return self.add(x, self.post_feedforward_layernorm(self.mlp(y)))


class ParallelLayer(DecoderLayer):
    """Attention and the feed-forward layer read the same input, normalized once or by a norm each."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.has_norms = arch.parallel_norms
        if not self.has_norms:
            del self.post_attention_layernorm

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        y = self.input_layernorm(x)
        z = self.post_attention_layernorm(x) if self.has_norms else y
        return self.add(x, self.self_attn(y, rotations, attend) + self.mlp(z))


def make_layer(arch: Architecture, layer: int) -> DecoderLayer:
    if arch.is_parallel:
        return ParallelLayer(arch, layer)
    return DecoderLayer(arch, layer) if arch.norm_places == "before" else PostNormLayer(arch, layer)


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(make_layer(arch, i) for i in range(arch.num_layers))
        self.norm = make_norm(arch)
        self.embed_positions = (
            nn.Embedding(arch.max_length + arch.position_offset, arch.hidden_size) if arch.learned_positions else None
        )
        self.embed_norm = make_norm(arch) if arch.embedding_norm else None


class Transformer(nn.Module):
    """Token ids and their positions to hidden states, and those to logits."""

    lm_head: nn.Module | None  # None: the embeddings are used instead (tied)

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.model = Decoder(arch)
        self.lm_head = (
            None if arch.tied_embeddings else nn.Linear(arch.hidden_size, arch.vocab_size, bias=arch.head_bias)
        )
        self.rotation = Rotation(arch)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The hidden states […, E] of the tokens […]."""
        x = self.embed(ids, positions)
        rotations = self.rotation(positions)
        for layer in self.model.layers:
            x = layer(x, rotations, attend)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What the first layer gets […, E] for the tokens […]."""
        x: Tensor = self.model.embed_tokens(ids)
        if self.arch.embedding_scale != 1.0:
            x = x * torch.tensor(self.arch.embedding_scale, dtype=x.dtype)  # rounded as the network's numbers are
        if self.model.embed_positions is not None:
            x = x + self.model.embed_positions(positions + self.arch.position_offset)
        if self.model.embed_norm is not None:
            x = self.model.embed_norm(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states […, E] to logits […, V], in float32."""
        if self.lm_head is None:
            logits = F.linear(hidden, self.model.embed_tokens.weight).float()
        else:
            logits = self.lm_head(hidden).float()
        if self.arch.logit_scale != 1.0:
            logits = logits * self.arch.logit_scale
        cap = self.arch.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def is_unmodified(module: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether a module computes what this file says, so that a kernel may replace it: known class, no hooks.

    `others` are further classes that a kernel supports.
    """
    known = type(module) in (nn.Linear, nn.Embedding, MLP, Rotation, nn.ModuleList) or isinstance(module, others)
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (known or type(module).__module__ == Transformer.__module__)
