"""Layers as the kernels read them: attention or a recurrence with its cache, products, and norms between them.

Shapes: T tokens of the step · S parts of a sum · E hidden · C counters of a token · H heads · G key-value heads
· D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flambeau.llm.backends.cuda import latent_attention
from flambeau.llm.backends.cuda.attention import ScoreParts, attend_uniform
from flambeau.llm.backends.cuda.attention_gates import gated, without_gates
from flambeau.llm.backends.cuda.decode_attention import ProjectionAdapters, attend_new_tokens
from flambeau.llm.backends.cuda.feed_forward import (
    DenseLayer,
    SparseLayer,
    joined,
)
from flambeau.llm.backends.cuda.latent_attention import LatentLayer
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.backends.cuda.norm_product import is_joinable, is_plain, multiply_normalized
from flambeau.llm.backends.cuda.prompt_attention import attend_prompts, make_tiles, shape_of
from flambeau.llm.backends.cuda.recurrent_layer import (
    RecurrentPart,
)
from flambeau.llm.backends.cuda.recurrent_sequences import Sequences
from flambeau.llm.backends.cuda.rope import HeadParts, rope
from flambeau.llm.backends.cuda.stream_products import JoinedNorm, ScaledRows
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAttention:
    """Attention of a layer over keys and values, with its cache."""

    module: Attention
    heads: HeadParts
    scores: ScoreParts
    keys: Tensor
    values: Tensor

    def __call__(
        self, qkv: Tensor, dtype: torch.dtype, inputs: StepInputs, tiles: Tensor | None, counters_GT: Tensor
    ) -> Tensor:
        """The outputs [T, H·D] of projections [T, (H+2G)·D], or of parts; see `attend_new_tokens`.

        With gates, the projections have H·D more numbers.
        """
        if self.module.has_gates:
            queries = self.module.num_heads * self.module.head_size
            qkv, gates = without_gates(qkv, queries, self.module.head_size, dtype)
            return gated(self.attend(qkv, dtype, inputs, tiles, counters_GT), gates)
        return self.attend(qkv, dtype, inputs, tiles, counters_GT)

    def attend(
        self,
        qkv: Tensor,
        dtype: torch.dtype,
        inputs: StepInputs,
        tiles: Tensor | None,
        counters_GT: Tensor,
        adapters: ProjectionAdapters | None = None,
    ) -> Tensor:
        """The same of projections without gates; in decode steps, they may have adapters that are not added yet."""
        module, keys, values = self.module, self.keys, self.values
        window = module.window or 0
        qkv = with_wide_norms(module, qkv) if module.is_wide and module.q_norm is not None else qkv
        if tiles is None and inputs.query_len == 1:
            return attend_new_tokens(
                qkv,
                keys,
                values,
                inputs.positions_T,
                inputs.slots_T,
                inputs.block_tables_SB,
                module.num_heads,
                self.heads,
                self.scores,
                module.scale,
                window,
                dtype,
                counters_GT,
                adapters,
            ).flatten(1)
        assert adapters is None
        q_THD = rope(qkv, keys, values, inputs.positions_T, inputs.slots_T, module.num_heads, self.heads, dtype)
        cached = keys, values, inputs.positions_T, inputs.block_tables_SB
        options = module.scale, window, self.scores
        if tiles is None:
            return attend_uniform(q_THD, *cached, inputs.query_len, *options).flatten(1)
        return attend_prompts(q_THD, *cached, tiles, *options).flatten(1)


class Projected(NamedTuple):
    """Rows before attention."""

    x_TE: Tensor  # the residual stream
    normal_TE: Tensor  # normalized, if something else needs that
    projections: Tensor  # [T, X], or parts [S, T, X] of them
    second: Tensor | None = None  # the outputs of `CudaLayer.second`, if they are there


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentBranch:
    """A recurrence beside attention, with its products."""

    first: KernelLinear
    part: RecurrentPart
    out: KernelLinear
    scales: tuple[float, float] = (1.0, 1.0)  # of inputs and outputs

    def __call__(self, normal_TE: Tensor, sequences: Sequences) -> Tensor:
        """What is added to the residual stream [T, E], or parts of it."""
        given_TE = scaled(normal_TE, self.scales[0])
        return scaled(self.out(self.part(given_TE, self.first(given_TE), sequences)), self.scales[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayer:
    """The tensors of one layer, and what happens between its products."""

    attention: HeadAttention | LatentLayer | RecurrentPart | None  # None: only a feed-forward layer, in its place
    norm: NormParameters  # before attention
    qkv: KernelLinear  # queries, keys and values; or latents; or what else the attention, or a recurrence, takes
    out: KernelLinear
    mlp: DenseLayer | SparseLayer | None  # None: the layer has one part
    is_parallel: bool = False  # attention and the feed-forward layer have the same input
    scales: tuple[float, float] = (1.0, 1.0)  # of the inputs of `qkv` and of what `out` gives
    beside: RecurrentBranch | None = None  # added to attention, with the same normalized inputs
    to_mlp: JoinedNorm | None = None  # `out`, the norm of the feed-forward layer and its first product
    to_next: JoinedNorm | None = None  # the last product, and the norm and first product of the next layer

    @property
    def second(self) -> KernelLinear | None:
        """A second product of the normalized rows: of queries for latents, or of betas."""
        if isinstance(self.attention, LatentLayer):
            return self.attention.queries[0]
        return self.attention.second if isinstance(self.attention, RecurrentPart) else None

    @property
    def needs_normal(self) -> bool:
        """Whether more than these two products need the normalized rows."""
        more = isinstance(self.attention, RecurrentPart) and self.attention.needs_normal
        return self.is_parallel or more or self.beside is not None or self.scales[0] != 1.0

    def project(self, x_TE: Tensor, sums: Tensor | ScaledRows | None) -> Projected:
        """What attention needs, after the sums were added to the residual stream, perhaps in place."""
        if isinstance(sums, ScaledRows):
            return Projected(x_TE, x_TE, sums.multiply())
        if len(x_TE) > 1 or self.needs_normal or not is_joinable(self.norm, self.qkv):
            normal_TE = self.norm(x_TE, sums)
            return Projected(x_TE, normal_TE, self.qkv(scaled(normal_TE, self.scales[0])))
        second = self.second
        if second is None:
            x_TE, projections = multiply_normalized(x_TE, sums, self.norm, self.qkv)
            return Projected(x_TE, x_TE, projections)
        if not (is_plain(self.qkv) and is_plain(second)):
            normal_TE = self.norm(x_TE, sums)
            return Projected(x_TE, normal_TE, self.qkv(normal_TE))
        x_TE, both = multiply_normalized(x_TE, sums, self.norm, self.qkv, second)
        return Projected(x_TE, x_TE, both[:, : self.qkv.width], both[:, self.qkv.width :])

    def add_attended(self, attended: Tensor, x_TE: Tensor) -> tuple[Tensor, Tensor | ScaledRows] | None:
        """As `out` and `mlp`, adding to the residual stream in place; None: they are computed apart."""
        rows = None if self.to_mlp is None else self.to_mlp.add(attended, x_TE)
        if rows is None:
            return None
        assert isinstance(self.mlp, DenseLayer)
        active = rows.multiply()
        sums = None if self.to_next is None else self.to_next.add(active, x_TE)
        return x_TE, self.mlp.down(active) if sums is None else sums


class CudaLayers:
    """Layers and their cache as the kernels read them."""

    def __init__(self, layers: Sequence[CudaLayer], arch: Architecture, like: Tensor) -> None:
        """Numbers have the type and device of `like`."""
        self._layers = layers
        self._num_kv_heads = arch.num_kv_heads
        self._device, self._dtype = like.device, like.dtype
        shared = arch.num_heads // arch.num_kv_heads
        rows = shape_of(self._dtype, arch.head_size)[0]
        self._tile_size = latent_attention.tile_size(arch.num_heads) if arch.latent_size else rows // shared  # tokens

    def tiles(self, inputs: StepInputs) -> Tensor:
        """The tiles [M, 3] of the sequences' tokens."""
        return make_tiles(inputs.query_starts, self._tile_size)

    def max_tiles(self, num_tokens: int, num_sequences: int) -> int:
        """How many tiles so many tokens have at most."""
        return -(-num_tokens // self._tile_size) + num_sequences

    def _counters(self, num_rows: int, *, has_prompts: bool) -> Sequence[Tensor]:
        """Zeros [C, T] for each layer: one of a row for its router, and for decode steps one of each key-value head.

        Steps may run at the same time: each has its own.
        """
        num_counters = 1 + (0 if has_prompts else self._num_kv_heads)
        width = -(-num_rows // 4) * 4  # the kernels are compiled for aligned addresses
        zeros = torch.zeros(len(self._layers), num_counters, width, dtype=torch.int32, device=self._device)
        return zeros.unbind()

    def _compute(
        self,
        layer: CudaLayer,
        projected: Projected,
        inputs: StepInputs,
        tiles: Tensor | None,
        counters_CT: Tensor,
        sequences: Sequences | None = None,
    ) -> tuple[Tensor, Tensor | ScaledRows]:
        """The residual stream [T, E] and what is to be added to it, [T, E] or parts; or what the next layer needs.

        `sequences` are those of the step, if the network has recurrent layers.
        """
        x_TE, normal_TE = projected[:2]
        attended = self._attend(layer, projected, inputs, tiles, counters_CT, sequences)
        if (found := layer.add_attended(attended, x_TE)) is not None:
            return found
        sums = scaled(layer.out(attended), layer.scales[1])
        if layer.beside is not None:
            assert sequences is not None
            sums = joined(sums, layer.beside(normal_TE, sequences), x_TE)
        if layer.mlp is None:
            return x_TE, sums
        if not layer.is_parallel:
            return layer.mlp(x_TE, sums, counters_CT[0])
        given_TE = normal_TE if layer.mlp.norm.gain is None else layer.mlp.norm(x_TE, None)
        return x_TE, joined(sums, layer.mlp.compute(given_TE), x_TE)

    def _attend(
        self,
        layer: CudaLayer,
        projected: Projected,
        inputs: StepInputs,
        tiles: Tensor | None,
        counters_CT: Tensor,
        sequences: Sequences | None,
    ) -> Tensor:
        """The outputs of attention [T, H·D], or of what is in its place."""
        if layer.attention is None:
            return projected.projections
        if isinstance(layer.attention, RecurrentPart):
            assert sequences is not None
            return layer.attention(projected.normal_TE, projected.projections, sequences, projected.second)
        if isinstance(layer.attention, LatentLayer):
            return layer.attention(projected.normal_TE, projected.projections, inputs, tiles, projected.second)
        return layer.attention(projected.projections, self._dtype, inputs, tiles, counters_CT[1:])


def scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def with_wide_norms(attention: Attention, qkv: Tensor) -> Tensor:
    """Projections [T, (H+2G)·D], or parts of their sums, with norms over all heads of queries and of keys."""
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    dtype = next(attention.q_norm.parameters()).dtype
    qkv = qkv.sum(0).to(dtype) if qkv.dim() == 3 else qkv
    sizes = [heads * attention.head_size for heads in (attention.num_heads, *[attention.num_kv_heads] * 2)]
    q, k, v = torch.split(qkv, sizes, dim=-1)
    return torch.cat((attention.q_norm(q), attention.k_norm(k), v), dim=-1)
