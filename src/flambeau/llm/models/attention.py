"""Attention: queries, keys and values of a layer; `attend` stores them and computes what the queries find.

Shapes: … any leading dimensions · E hidden · H heads · G key-value heads · D head size
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import AlibiKind, Architecture
from flambeau.llm.models.indexer import BlockIndexer, PoolIndexer, Selection
from flambeau.llm.models.norms import HeadNorm, PlainRMSNorm, make_norm
from flambeau.llm.models.recurrent import Recur
from flambeau.llm.models.rope import Rotations, rotate


class Alibi(NamedTuple):
    """Scores that fall with the distance, by a slope of each head; a rank has some of the heads."""

    kind: AlibiKind
    num_heads: int  # of all ranks: the slopes depend on it
    first_head: int = 0


SharedKeys = dict[int, tuple[Tensor, ...]]  # what layers of a step give others: keys and values, or a shortcut


class Entries(NamedTuple):
    """Keys that stand for several tokens each, which tokens attend to beside their windows."""

    keys: Tensor  # […, D], of each token: the entry that it completes, if it is the last one of a group
    rate: int  # tokens of a group
    selection: Selection | None = None  # which entries are attended to, of which it has keys in the same way; None: all


class AttentionOptions(NamedTuple):
    """What happens to the scores of attention before the softmax."""

    scale: float
    window: int | None = None  # tokens attend to so many before them, their own included
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]
    alibi: Alibi | None = None
    chunk: int | None = None  # tokens attend to those of their own chunk only, so many at a time
    selection: Selection | None = None  # which tokens they attend to
    reuses_selection: bool = False  # those that the last layer with a selection has chosen
    is_over_entries: bool = False  # keys are values, and the window has an end in every layer
    entries: Entries | None = None  # beside the window, in some of these layers
    index_layer: int | None = None  # where the keys of the selection are cached; None: where all keys are
    looks_back: bool = False  # tokens of images attend to those before them only, as of texts

    @property
    def is_sparse(self) -> bool:
        """Whether an indexer chooses keys."""
        return self.selection is not None or self.reuses_selection

    @property
    def has_only_softcap(self) -> bool:
        """Beside the scale and the window."""
        has_others = self.sinks is not None or self.alibi is not None or self.entries is not None
        return not has_others and self.chunk is None and not self.is_sparse


class Attend(Protocol):
    """Stores the keys and values of a layer's tokens and computes the attention of its queries."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q […, H, D] and k, v […, G, D] to […, H, D]; the inputs are views of one larger tensor."""

    @property
    def recur(self) -> Recur:
        """The counterpart for recurrent layers."""


def make_indexer(arch: Architecture) -> BlockIndexer | PoolIndexer:
    assert arch.indexer is not None
    return BlockIndexer(arch) if arch.indexer.block_size else PoolIndexer(arch)


class Attention(nn.Module):
    """Queries, keys and values with rotary positions; several query heads share one key-value head."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        arch = arch.of_layer(layer)
        size, heads, kv_heads = arch.head_size, arch.num_heads, arch.num_kv_heads
        self.layer, self.head_size, self.num_heads, self.num_kv_heads = layer, size, heads, kv_heads
        self.scale = size**-0.5 if arch.attention_scale is None else arch.attention_scale
        self.softcap = arch.attention_softcap
        self.window = arch.window(layer)
        vision = arch.vision
        self.looks_back = vision is not None and vision.both_ways_in_windows and self.window is None
        self.is_local = self.window is not None and arch.local_rope_theta is not None
        self.rotary_size = arch.rotary_size
        self.is_rotated = layer not in arch.unrotated_layers
        self.has_gates = arch.gates_attention
        num_queries = 2 * heads if self.has_gates else heads  # each head's query, then its gate
        self.value_size, self.value_scale = arch.output_size, arch.value_scale
        rows = (num_queries + kv_heads) * size + kv_heads * self.value_size
        self.qkv_proj = nn.Linear(arch.hidden_size, rows, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(heads * self.value_size, arch.hidden_size, bias=arch.output_bias)
        self.gate = arch.attention_gate
        if self.gate is not None:
            num_gates = heads if self.gate.endswith("_per_head") else heads * self.value_size
            self.gate_proj = nn.Linear(arch.hidden_size, num_gates, bias=False)
        self.inner_norm = make_norm(arch, heads * self.value_size) if arch.inner_norms else None
        self.clip = arch.clip_qkv
        self.normalizes_rotated, self.epsilon = arch.rotated_qk_norm and self.is_rotated, arch.norm_epsilon
        self.normalizes_values = arch.normalizes_values
        self.is_tempered = self.is_rotated == arch.tempers_rotated
        self.alibi = None if arch.alibi is None else Alibi(arch.alibi, heads)
        self.chunk = arch.chunk(layer)
        self.indexer = make_indexer(arch) if arch.index_size(layer) else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if arch.has_sinks_in(layer) else None
        spans = (heads * size, kv_heads * size) if arch.wide_qk_norm else (size, size)
        self.is_wide, self.normalizes_late = arch.wide_qk_norm, arch.late_qk_norm
        self.q_norm: nn.Module | None = make_norm(arch, spans[0]) if arch.qk_norm else None
        self.k_norm: nn.Module | None = make_norm(arch, spans[1]) if arch.qk_norm else None
        if arch.separate_qk_norm:
            self.q_norm = HeadNorm(heads, size, arch.norm_epsilon)
            self.k_norm = HeadNorm(kv_heads, size, arch.norm_epsilon)

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend, shared: SharedKeys | None = None) -> Tensor:
        """[…, E] to […, E]."""
        qk, v = self.heads_and_values(self.qkv_proj(x))
        gates: Tensor | None = None
        if self.has_gates:
            pairs, keys = qk.tensor_split([2 * self.num_heads], dim=-2)
            gates = pairs[..., 1::2, :]
            qk = torch.cat((pairs[..., ::2, :], keys), dim=-2)
        if not self.normalizes_late:
            qk = self.normalize(qk)
        if self.clip is not None:
            qk, v = qk.clamp(-self.clip, self.clip), v.clamp(-self.clip, self.clip)
        qk = self.rotate(qk, rotations)  # queries and keys at once: half the kernels
        if self.normalizes_late:
            qk = self.normalize(qk)
        if self.normalizes_rotated:
            qk = F.rms_norm(qk.float(), (self.head_size,), eps=self.epsilon).to(qk.dtype)
        if self.normalizes_values:
            v = F.rms_norm(v.float(), (self.value_size,), eps=self.epsilon).to(v.dtype)
        q, k = self.split_qk(qk)
        if self.value_scale != 1.0:
            v = v * self.value_scale
        if shared is not None:
            shared[self.layer] = k, v
        if self.is_tempered and rotations.query_scale is not None:
            q = (q * rotations.query_scale).to(q.dtype)
        options = AttentionOptions(
            self.scale, self.window, self.softcap, self.sinks, self.alibi, self.chunk, looks_back=self.looks_back
        )
        if self.indexer is not None:
            options = options._replace(selection=self.indexer(x, rotations))
        y = attend(self.layer, q, k, v, options)
        if gates is not None:
            y = y * torch.sigmoid(gates)
        if self.gate is not None:
            y = y * self.own_gates(x)
        y = y.flatten(-2)
        return self.o_proj(y if self.inner_norm is None else self.inner_norm(y))  # type: ignore[no-any-return]

    def heads_and_values(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, with their gates, and keys […, heads, D], and values […, G, D], which may have another size."""
        if self.value_size == self.head_size:
            heads = torch.unflatten(qkv, -1, (-1, self.head_size))
            qk, v = torch.split(heads, [heads.shape[-2] - self.num_kv_heads, self.num_kv_heads], dim=-2)
            return qk, v
        qk, v = qkv.tensor_split([qkv.shape[-1] - self.num_kv_heads * self.value_size], dim=-1)
        return torch.unflatten(qk, -1, (-1, self.head_size)), torch.unflatten(v, -1, (-1, self.value_size))

    def own_gates(self, x: Tensor) -> Tensor:
        """Factors […, H, D] of what attention gives, or one for each head […, H, 1]."""
        assert self.gate is not None
        gates = self.gate_proj(x).unflatten(-1, (self.num_heads, -1))
        is_soft = self.gate.startswith("softplus")
        return F.softplus(gates.float()).to(x.dtype) if is_soft else torch.sigmoid(gates)

    def rotate(self, qk: Tensor, rotations: Rotations) -> Tensor:
        """Queries and keys […, heads, D] at their positions."""
        if not self.is_rotated:
            return qk
        rotation = rotations.local if self.is_local else rotations.ordinary
        if self.rotary_size is None:
            return rotate(qk, *rotation)
        rotated, rest = qk.tensor_split([self.rotary_size], dim=-1)
        return torch.cat((rotate(rotated, *rotation), rest), dim=-1)

    def normalize(self, qk: Tensor) -> Tensor:
        """Queries and keys […, H+G, D] after their norms, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = self.split_qk(qk)
        if not self.is_wide:
            return torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        qk = torch.cat((self.q_norm(q.flatten(-2)), self.k_norm(k.flatten(-2))), dim=-1)
        return qk.view(*qk.shape[:-1], -1, self.head_size)

    def split_qk(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """[…, H+G, D] to […, H, D] and […, G, D]."""
        q, k = torch.split(qk, [self.num_heads, self.num_kv_heads], dim=-2)
        return q, k


class SharedKeyAttention(Attention):
    """Queries for the keys and values of another layer (Gemma 3n)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.key_layer, biased = arch.key_layer(layer), self.qkv_proj.bias is not None
        self.qkv_proj = nn.Linear(arch.hidden_size, self.num_heads * self.head_size, bias=biased)
        self.k_norm = None

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend, shared: SharedKeys | None = None) -> Tensor:
        """[…, E] to […, E]."""
        assert shared is not None
        q = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))
        q = self.rotate(q if self.q_norm is None else self.q_norm(q), rotations)
        # They are stored once more, in the same places.
        options = AttentionOptions(self.scale, self.window, self.softcap, looks_back=self.looks_back)
        k, v = shared[self.key_layer]
        y = attend(self.key_layer, q, k, v, options)
        return self.o_proj(y.flatten(-2))  # type: ignore[no-any-return]


class DifferentialAttention(Attention):
    """What the second half of the heads finds is subtracted from what the first half does (DiffLlama).

    A key-value head has the values of two: of its own half, which both halves of the heads read, and of the other.
    """

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(replace(arch, value_size=0), layer)  # values are made one by one
        size, self.start = arch.head_size, 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(size)) for _ in range(4)
        )
        self.norm = PlainRMSNorm(2 * size, arch.norm_epsilon)

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend, shared: SharedKeys | None = None) -> Tensor:
        """[…, E] to […, E]."""
        heads = torch.unflatten(self.qkv_proj(x), -1, (-1, self.head_size))
        qk, v = torch.split(heads, [heads.shape[-2] - self.num_kv_heads, self.num_kv_heads], dim=-2)
        q, k = self.split_qk(self.rotate(qk, rotations))
        pairs = torch.cat(v.chunk(2, dim=-2), dim=-1)
        found = attend(self.layer, q, k, torch.cat((pairs, pairs), dim=-2), AttentionOptions(self.scale))
        first, second = found.chunk(2, dim=-2)
        y = self.norm(first - self.share(x.dtype) * second) * (1 - self.start)
        return self.o_proj(y.flatten(-2))  # type: ignore[no-any-return]

    def share(self, dtype: torch.dtype) -> Tensor:
        """The factor of what is subtracted."""
        added, subtracted = (
            (one.float() * other.float()).sum().exp().to(dtype)
            for one, other in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return added - subtracted + self.start
