"""CudaNetwork: steps of a Llama-shaped network, dense or with experts, by the kernels; tested against EagerBackend.

A step is a list of launches that can be captured as a graph. Only the kernels are compiled, which takes seconds.

Shapes: T tokens of the step · N rows of them · S parts of a sum · E hidden · V vocabulary · C counters of a token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.backends.cuda import few_row_kernel
from flambeau.llm.backends.cuda.attention import attend_uniform
from flambeau.llm.backends.cuda.decode_attention import attend_new_tokens
from flambeau.llm.backends.cuda.feed_forward import (
    DenseLayer,
    NormParameters,
    SparseLayer,
    can_compute_experts,
    kernel_experts,
)
from flambeau.llm.backends.cuda.few_row_kernel import tied_head
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.prompt_attention import MAX_SHARED, attend_prompts, make_tiles, shape_of
from flambeau.llm.backends.cuda.rope import rope
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.moe import Experts, SharedExpert, SparseMLP
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.transformer import Transformer, is_unmodified
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import RowScaledLinear

QUANTIZED = (RowScaledLinear, CudaFp8Linear, CudaInt4Linear)
SPARSE = (SparseMLP, Experts, SharedExpert, ExpertStack)
# The parts that Llama does not have and the kernels compute.
EXTRAS = frozenset(
    {
        "attention_scale",
        "embedding_scale",
        "gates_shared_expert",
        "logit_scale",
        "num_chosen_groups",
        "num_expert_groups",
        "residual_scale",
        "routed_scale",
        "router",
        "router_jitter",
        "shared_expert_size",
        "wide_qk_norm",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayer:
    """The tensors of one layer."""

    attention: Attention
    norm: NormParameters | None  # before attention; None: some heads have none
    qk_gains: tuple[Tensor, Tensor] | None
    qkv: KernelLinear
    out: KernelLinear
    mlp: DenseLayer | SparseLayer
    keys: Tensor
    values: Tensor


class CudaLayers:
    """Layers and their cache as the kernels read them."""

    def __init__(self, layers: Sequence[CudaLayer], arch: Architecture, rotation: Rotation, gain: Tensor) -> None:
        """`gain` is any of a norm: its type and device are those of all."""
        self._layers = layers
        self._epsilon, self._num_heads, self._num_kv_heads = arch.norm_epsilon, arch.num_heads, arch.num_kv_heads
        self._tables = rotation.cos, rotation.sin
        self._device, self._dtype = gain.device, gain.dtype
        self._tile_size = shape_of(self._dtype)[0] // (arch.num_heads // arch.num_kv_heads)  # tokens

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

    def _attend(
        self, layer: CudaLayer, qkv: Tensor, inputs: StepInputs, tiles: Tensor | None, counters_CT: Tensor
    ) -> Tensor:
        """The outputs of attention [T, H·D]."""
        attention = layer.attention
        window = attention.window or 0
        rotation = self._tables if attention.is_rotated else None
        qkv = with_wide_norms(attention, qkv) if attention.is_wide and attention.q_norm is not None else qkv
        if tiles is None and inputs.query_len == 1:
            return attend_new_tokens(
                qkv,
                layer.keys,
                layer.values,
                inputs.positions_T,
                inputs.slots_T,
                inputs.block_tables_SB,
                rotation,
                layer.qk_gains,
                self._epsilon,
                self._num_heads,
                attention.scale,
                window,
                self._dtype,
                counters_CT[1:],
            ).flatten(1)
        q_THD = rope(
            qkv,
            layer.keys,
            layer.values,
            inputs.positions_T,
            inputs.slots_T,
            rotation,
            layer.qk_gains,
            self._epsilon,
            self._num_heads,
            self._dtype,
        )
        cached = layer.keys, layer.values, inputs.positions_T, inputs.block_tables_SB
        if tiles is None:
            return attend_uniform(q_THD, *cached, inputs.query_len, attention.scale, window).flatten(1)
        return attend_prompts(q_THD, *cached, tiles, attention.scale, window).flatten(1)


class CudaNetwork(CudaLayers):
    """A network and its cache as the kernels read them."""

    def __init__(self, model: Transformer, cache: KVCache, states: HiddenStates | None = None) -> None:
        arch, body = model.arch, model.model
        layers = [cuda_layer(layer, cache, i, arch) for i, layer in enumerate(body.layers)]
        super().__init__(layers, arch, model.rotation, body.norm.weight)
        self._states = states
        self._embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=body.embed_tokens.weight.dtype))
        self._logit_scale = arch.logit_scale
        self._embedding = body.embed_tokens.weight
        self._head = kernel_linear(tied_head(body.embed_tokens) if model.lm_head is None else model.lm_head)
        self._last_norm = norm_parameters(body.norm, arch)

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of the tokens at `rows_N`; sequences have any number of tokens."""
        tiles = self.tiles(inputs)
        return self.run(inputs.to(self._device), rows_N.to(self._device), tiles.to(self._device))

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None, tiles: Tensor | None = None) -> Tensor:
        """The logits [N, V] of these tokens, or [T, V] of all of them, in float32."""
        x_TE = F.embedding(inputs.ids_T, self._embedding)
        x_TE = x_TE if self._embedding_scale == 1.0 else x_TE * self._embedding_scale
        sums: Tensor | None = None
        layers = () if self._states is None else self._states.layers
        inputs_of: dict[int, Tensor] = {}
        counters = self._counters(len(x_TE), has_prompts=tiles is not None)
        for number, (layer, counters_CT) in enumerate(zip(self._layers, counters, strict=True)):
            assert layer.norm is not None
            normal_TE = layer.norm(x_TE, sums)
            if number in layers:
                inputs_of[number] = x_TE.clone()  # the next norm adds to it in place
            sums = layer.out(self._attend(layer, layer.qkv(normal_TE), inputs, tiles, counters_CT))
            x_TE, sums = layer.mlp(x_TE, sums, counters_CT[0])
        hidden_TE = self._last_norm(x_TE, sums)
        if self._states is not None:
            inputs_of[len(self._layers)] = x_TE
            self._states.set(torch.cat([inputs_of[number] for number in layers], dim=-1))
        logits = self._head(hidden_TE if rows_N is None else hidden_TE[rows_N])
        logits = logits.sum(0) if logits.dim() == 3 else logits.float()
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale


def cuda_layer(layer: Any, cache: KVCache, number: int, arch: Architecture) -> CudaLayer:
    """The tensors of a layer and its part of the cache."""
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = attention.q_norm, attention.k_norm
    has_qk_gains = q_norm is not None and not attention.is_wide
    mlp_norm = norm_parameters(layer.post_attention_layernorm, arch)
    has_norm = not isinstance(layer.input_layernorm, nn.Identity)
    return CudaLayer(
        attention=attention,
        norm=norm_parameters(layer.input_layernorm, arch) if has_norm else None,
        qk_gains=(q_norm.weight, k_norm.weight) if has_qk_gains else None,
        qkv=kernel_linear(attention.qkv_proj),
        out=kernel_linear(attention.o_proj),
        mlp=sparse_layer(mlp_norm, mlp) if isinstance(mlp, SparseMLP) else dense_layer(mlp_norm, mlp),
        keys=cache.keys[number],
        values=cache.values[number],
    )


def norm_parameters(norm: Any, arch: Architecture) -> NormParameters:
    return NormParameters(gain=norm.weight, epsilon=arch.norm_epsilon, residual_scale=arch.residual_scale)


def dense_layer(norm: NormParameters, mlp: Any) -> DenseLayer:
    return DenseLayer(norm=norm, gate_up=kernel_linear(mlp.gate_up_proj, gates=True), down=kernel_linear(mlp.down_proj))


def sparse_layer(norm: NormParameters, mlp: SparseMLP) -> SparseLayer:
    shared = mlp.shared_expert
    return SparseLayer(
        norm=norm,
        mlp=mlp,
        experts=kernel_experts(mlp.experts),
        shared=None
        if shared is None
        else (kernel_linear(shared.gate_up_proj, gates=True), kernel_linear(shared.down_proj)),
    )


def with_wide_norms(attention: Attention, qkv: Tensor) -> Tensor:
    """Projections [T, (H+2G)·D], or parts of their sums, with norms over all heads of queries and of keys."""
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    dtype = next(attention.q_norm.parameters()).dtype
    qkv = qkv.sum(0).to(dtype) if qkv.dim() == 3 else qkv
    sizes = [heads * attention.head_size for heads in (attention.num_heads, *[attention.num_kv_heads] * 2)]
    q, k, v = torch.split(qkv, sizes, dim=-1)
    return torch.cat((attention.q_norm(q), attention.k_norm(k), v), dim=-1)


def kernel_linear(layer: nn.Module, *, gates: bool = False) -> KernelLinear:
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    has_kernel = few_row_kernel.runs_on(weight.device) and few_row_kernel.kind_of(layer) is not None
    scales = few_row_kernel.kernel_scales(layer, gates) if has_kernel else None
    linear = KernelLinear(layer=layer, weight=weight, bias=bias, gates=gates, kernel_scales=scales)
    if isinstance(layer, (RowScaledLinear, CudaFp8Linear)):
        return replace(linear, scale=layer.scale.flatten())
    if isinstance(layer, CudaInt4Linear):
        return replace(linear, scale=layer.scales, minimums=layer.minimums, group_size=layer.group_size)
    return linear


def unknown_parts(arch: Architecture) -> list[str]:
    """The parts of a network that the kernels do not compute."""
    return sorted(set(arch.extras) - EXTRAS)


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network: on an NVIDIA GPU; not sharded."""
    arch = model.arch
    if cache.keys[0].device.type != "cuda" or torch.version.hip is not None or unknown_parts(arch):
        return False
    if arch.num_heads // arch.num_kv_heads > MAX_SHARED or not model.rotation.has_tables:
        return False
    dtype, cached = model.model.norm.weight.dtype, cache.keys[0].dtype
    if cached not in (dtype, torch.float8_e4m3fn):
        return False
    if not all(can_compute_experts(module) for module in model.modules() if isinstance(module, Experts)):
        return False
    return have_type(model, dtype) and all(is_unmodified(module, (*QUANTIZED, *SPARSE)) for module in model.modules())


def have_type(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all parameters have a type and are contiguous, but for what routers add to scores."""
    biases = {id(module.score_bias) for module in model.modules() if isinstance(module, SparseMLP)}
    return all(p.dtype == dtype and p.is_contiguous() for p in model.parameters() if id(p) not in biases)
