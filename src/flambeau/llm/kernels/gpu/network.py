"""A decode step of a dense Llama-shaped network by the GPU's kernels, which has EagerForward as its plain twin.

It is a list of launches, to be captured as a graph: nothing is compiled but the kernels themselves, in seconds.

Shapes: T tokens of the step · S parts that a sum is divided into · E hidden · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels.gpu.attention import attend_paged
from flambeau.llm.kernels.gpu.linear import MOST_ROWS, Matrix, few_rows, normalise, num_parts, one_row
from flambeau.llm.kernels.gpu.rotary import turn
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.transformer import MLP, Attention, Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayer:
    """One layer's tensors."""

    attention: Attention
    gains: tuple[Tensor, Tensor]  # of the normalisations before attention and before the feed-forward part
    qk_gains: tuple[Tensor, Tensor] | None
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    keys: Tensor
    values: Tensor


class GpuNetwork:
    """A network and its cache."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        arch, body = model.arch, model.model
        self._epsilon, self._num_heads = arch.norm_epsilon, arch.num_heads
        self._embedding = body.embed_tokens.weight
        self._head = Matrix.of(body.embed_tokens if model.lm_head is None else model.lm_head)
        self._last_gain = body.norm.weight
        self._tables = model.rotation.cos, model.rotation.sin
        self._layers = [gpu_layer(layer, cache, i) for i, layer in enumerate(body.layers)]

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of all tokens, in float32."""
        x_TE = F.embedding(inputs.ids_T, self._embedding)
        if len(x_TE) == 1:
            return self._one_row(x_TE, inputs).float()
        run = self._few_rows if len(x_TE) <= MOST_ROWS else self._many_rows
        return run(x_TE, inputs).float()

    def _one_row(self, x: Tensor, inputs: StepInputs) -> Tensor:
        for layer in self._layers:
            qkv = one_row(x, layer.qkv, gain=layer.gains[0], epsilon=self._epsilon)
            one_row(self._attend(layer, qkv, inputs), layer.out, residual=x)
            gated = one_row(x, layer.gate_up, gain=layer.gains[1], epsilon=self._epsilon, gates=True)
            one_row(gated, layer.down, residual=x)
        return one_row(x, self._head, gain=self._last_gain, epsilon=self._epsilon)

    def _few_rows(self, x: Tensor, inputs: StepInputs) -> Tensor:
        sums: Tensor | None = None
        for layer in self._layers:
            qkv = few_rows(normalise(x, layer.gains[0], self._epsilon, sums), layer.qkv, parts=num_parts(layer.qkv))
            sums = few_rows(self._attend(layer, qkv, inputs), layer.out, parts=num_parts(layer.out))
            gated = few_rows(normalise(x, layer.gains[1], self._epsilon, sums), layer.gate_up, gates=True)
            sums = few_rows(gated, layer.down, parts=num_parts(layer.down))
        return few_rows(normalise(x, self._last_gain, self._epsilon, sums), self._head)

    def _many_rows(self, x: Tensor, inputs: StepInputs) -> Tensor:
        sums: Tensor | None = None
        for layer in self._layers:
            qkv = layer.qkv.layer(normalise(x, layer.gains[0], self._epsilon, sums))
            sums = layer.out.layer(self._attend(layer, qkv, inputs))
            gate, up = layer.gate_up.layer(normalise(x, layer.gains[1], self._epsilon, sums)).chunk(2, dim=-1)
            sums = layer.down.layer(F.silu(gate) * up)
        return F.linear(normalise(x, self._last_gain, self._epsilon, sums), self._head.weight)

    def _attend(self, layer: GpuLayer, qkv: Tensor, inputs: StepInputs) -> Tensor:
        """What the tokens of a step see [T, H·D]."""
        attention = layer.attention
        q_THD = turn(
            qkv,
            layer.keys,
            layer.values,
            inputs.positions_T,
            inputs.slots_T,
            self._tables if attention.is_rotated else None,
            layer.qk_gains,
            self._epsilon,
            self._num_heads,
        )
        return attend_paged(
            q_THD,
            layer.keys,
            layer.values,
            inputs.positions_T,
            inputs.block_tables_SB,
            inputs.query_len,
            attention.scale,
            attention.window or 0,
        ).flatten(1)


def gpu_layer(layer: Any, cache: KVCache, number: int) -> GpuLayer:
    """The tensors of a layer, with its part of the cache."""
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return GpuLayer(
        attention=attention,
        gains=(layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
        qk_gains=None if q_norm is None else (q_norm.weight, k_norm.weight),
        qkv=Matrix.of(attention.qkv_proj),
        out=Matrix.of(attention.o_proj),
        gate_up=Matrix.of(mlp.gate_up_proj),
        down=Matrix.of(mlp.down_proj),
        keys=cache.keys[number],
        values=cache.values[number],
    )


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether a network is plain enough: on an NVIDIA GPU, no experts, no quantised or divided layers."""
    if cache.keys[0].device.type != "cuda" or torch.version.hip is not None or model.arch.num_experts:
        return False
    are_alike = all(p.dtype == cache.keys[0].dtype and p.is_contiguous() for p in model.parameters())
    return are_alike and all(is_plain(module) for module in model.modules())


def is_plain(module: nn.Module) -> bool:
    """Whether a part of the network is what the kernels compute; anything applied to it may have changed it."""
    known = type(module) in (nn.Linear, nn.Embedding, MLP, Rotation, nn.ModuleList)
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (known or type(module).__module__ == Transformer.__module__)
