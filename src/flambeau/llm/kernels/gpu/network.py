"""Steps of a dense Llama-shaped network by the GPU's kernels, which have EagerForward as their plain twin.

A step is a list of launches, to be captured as a graph: nothing is compiled but the kernels themselves, in seconds.

Shapes: T tokens of the step · N rows of them · S parts that a sum is divided into · E hidden · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels.gpu.attention import TILE_ROWS, attend, tiles_of
from flambeau.llm.kernels.gpu.linear import Matrix
from flambeau.llm.kernels.gpu.norms import normalize
from flambeau.llm.kernels.gpu.rotary import turn
from flambeau.llm.kernels.plain import is_plain
from flambeau.llm.models.transformer import Attention, Transformer
from flambeau.llm.quantize.cuda_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.rows import RowScaledLinear

QUANTIZED = (RowScaledLinear, CudaFp8Linear, CudaInt4Linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayer:
    """One layer's tensors."""

    attention: Attention
    gains: tuple[Tensor, Tensor]  # of the normalizations before attention and before the feed-forward part
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
        self._head = matrix_of(tied_head(body.embed_tokens) if model.lm_head is None else model.lm_head)
        self._last_gain = body.norm.weight
        self._device = self._last_gain.device
        self._tables = model.rotation.cos, model.rotation.sin
        self._layers = [gpu_layer(layer, cache, i) for i, layer in enumerate(body.layers)]

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of these tokens of a step whose sequences have any number of them."""
        tiles = tiles_of(inputs.query_starts, self._num_heads // self._layers[0].keys.shape[2])
        return self.run(inputs.to(self._device), rows_N.to(self._device), tiles.to(self._device))

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None, tiles: Tensor | None = None) -> Tensor:
        """The logits [N, V] of these tokens, or [T, V] of all of them, in float32."""
        x_TE = F.embedding(inputs.ids_T, self._embedding)
        sums: Tensor | None = None
        for layer in self._layers:
            qkv = layer.qkv(normalize(x_TE, layer.gains[0], self._epsilon, sums))
            sums = layer.out(self._attend(layer, qkv, inputs, tiles))
            gated = layer.gate_up(normalize(x_TE, layer.gains[1], self._epsilon, sums))
            sums = layer.down(gated)
        hidden_TE = normalize(x_TE, self._last_gain, self._epsilon, sums)
        logits = self._head(hidden_TE if rows_N is None else hidden_TE[rows_N])
        return logits.sum(0) if logits.dim() == 3 else logits.float()

    def _attend(self, layer: GpuLayer, qkv: Tensor, inputs: StepInputs, tiles: Tensor | None) -> Tensor:
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
        window = attention.window or 0
        return attend(q_THD, layer.keys, layer.values, inputs, attention.scale, window, tiles).flatten(1)


def gpu_layer(layer: Any, cache: KVCache, number: int) -> GpuLayer:
    """The tensors of a layer, with its part of the cache."""
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return GpuLayer(
        attention=attention,
        gains=(layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
        qk_gains=None if q_norm is None else (q_norm.weight, k_norm.weight),
        qkv=matrix_of(attention.qkv_proj),
        out=matrix_of(attention.o_proj),
        gate_up=matrix_of(mlp.gate_up_proj, gates=True),
        down=matrix_of(mlp.down_proj),
        keys=cache.keys[number],
        values=cache.values[number],
    )


def matrix_of(layer: nn.Module, *, gates: bool = False) -> Matrix:
    """A layer as the kernels read it."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    matrix = Matrix(layer=layer, weight=weight, bias=bias, gates=gates)
    if isinstance(layer, (RowScaledLinear, CudaFp8Linear)):
        return replace(matrix, scale=layer.scale.flatten())
    if isinstance(layer, CudaInt4Linear):
        return replace(matrix, scale=layer.scales, minimums=layer.minimums, group_size=layer.group_size)
    return matrix


def tied_head(embedding: nn.Embedding) -> nn.Linear:
    """A linear layer with the weights of the embedding."""
    head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
    head.weight = embedding.weight
    return head


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether a network is plain enough: on an NVIDIA GPU, no experts, not divided among several."""
    arch = model.arch
    if cache.keys[0].device.type != "cuda" or torch.version.hip is not None or arch.num_experts:
        return False
    if arch.num_heads // arch.num_kv_heads > TILE_ROWS:
        return False
    are_alike = all(p.dtype == cache.keys[0].dtype and p.is_contiguous() for p in model.parameters())
    return are_alike and all(is_plain(module, QUANTIZED) for module in model.modules())
