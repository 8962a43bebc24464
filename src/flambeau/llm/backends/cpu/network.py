"""CpuNetwork: a whole step of a plain Llama-shaped network in one call of the C++ kernels; tested against EagerBackend.

Weights that bfloat16 represents exactly are packed as bfloat16: half the memory is read, with the results of float32.

Shapes: N columns, or rows · K their length · T tokens of the step · S sequences · J further tokens of each ·
V vocabulary
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.lora_weights import LoraPart
from flambeau.llm.backends.cpu.attention import HEAD_SIZES
from flambeau.llm.backends.cpu.bindings import (
    CLayer,
    CLoraLayer,
    CLoraPart,
    CMatrix,
    CNetwork,
    CTokens,
    index_pointers,
    kernels,
)
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.transformer import Transformer, is_unmodified

LANES = 16  # of csrc/vectors.h
# Size of the packed copies beside the network's own weights; larger networks are not packed.
PACKED_LIMIT_BYTES = 512 * 2**20
MATRICES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")  # of csrc/network.h


class CpuNetwork:
    """Pointers to a network's weights and its cache, and the calls that compute steps."""

    def __init__(self, model: Transformer, cache: KVCache, adapters: AdapterStore | None = None) -> None:
        arch, body = model.arch, model.model
        self._can_pack = 2 * sum(parameter.numel() for parameter in model.parameters()) <= PACKED_LIMIT_BYTES
        self._references: list[Any] = [cache]  # keeps alive what the structures point to
        layers = [self._layer(layer, arch.window(i) or 0, cache, i) for i, layer in enumerate(body.layers)]
        self._references.append(array := (CLayer * len(layers))(*layers))
        self._network = CNetwork(
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_size,
            arch.intermediate_size,
            cache.block_size,
            len(layers),
            array,
            *(self._pointer(t) for t in (body.embed_tokens.weight, model.rotation.cos, model.rotation.sin)),
            self._pointer(body.norm.weight),
            self._matrix(body.embed_tokens if model.lm_head is None else model.lm_head),
            arch.norm_epsilon,
            arch.head_size**-0.5,
        )
        self._width = arch.vocab_size
        assert kernels.library is not None
        self._library = kernels.library
        self._lora = None if adapters is None else LoraTable(adapters, arch.num_layers)

    def _layer(self, layer: Any, window: int, cache: KVCache, number: int) -> CLayer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return CLayer(
            *map(self._pointer, norms),
            *map(self._matrix, (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)),
            *map(self._pointer, (cache.keys[number], cache.values[number])),
            window,
        )

    def _matrix(self, linear: Any) -> CMatrix:
        weight_NK: Tensor = linear.weight.detach()
        is_packed = self._can_pack and torch.equal(weight_NK.bfloat16().float(), weight_NK)
        pointer = self._pointer(pack(weight_NK) if is_packed else weight_NK)
        width, size = weight_NK.shape
        return CMatrix(pointer if is_packed else None, None if is_packed else pointer, size, width)

    def _pointer(self, tensor: Tensor) -> int:
        self._references.append(tensor)
        return tensor.data_ptr()

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None) -> Tensor:
        """The logits [N, V] of these tokens, or [T, V] of all of them."""
        num_rows = len(inputs.ids_T) if rows_N is None else len(rows_N)
        rows = None if rows_N is None else index_pointers(rows_N)[0]
        logits_NV = torch.empty(num_rows, self._width)
        threads = torch.get_num_threads()
        self._library.flambeau_step(
            self._network, to_ctokens(inputs, self._lora), rows, num_rows, logits_NV.data_ptr(), threads
        )
        return logits_NV

    def argmax(self, inputs: StepInputs) -> Tensor:
        found_T = torch.empty_like(inputs.ids_T)
        num_rows, threads = len(found_T), torch.get_num_threads()
        tokens = to_ctokens(inputs, self._lora)
        self._library.flambeau_argmax(self._network, tokens, None, num_rows, found_T.data_ptr(), threads)
        return found_T

    def argmax_steps(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        places, num_ahead = index_pointers(positions_JS, slots_JS), 1 + positions_JS.shape[0]
        found_KS = positions_JS.new_empty(num_ahead, positions_JS.shape[1])
        threads = torch.get_num_threads()
        self._library.flambeau_argmax_steps(
            self._network, to_ctokens(first), *places, num_ahead, found_KS.data_ptr(), threads
        )
        return found_KS


class LoraTable:
    """Pointers to the weights of all adapters; built again when one was loaded or unloaded."""

    def __init__(self, store: AdapterStore, num_layers: int) -> None:
        self._store, self._num_layers = store, num_layers
        self._numbers: tuple[int, ...] = ()
        self._table: Any = None
        self._references: list[Any] = []

    def places(self, adapters_T: Tensor) -> Tensor:
        """Where the adapter of each token is in the table; 0: it has none."""
        if self._numbers != tuple(self._store.adapters):
            self._build()
        order = {number: i for i, number in enumerate((0, *self._numbers))}
        return torch.tensor([order[number] for number in adapters_T.tolist()])

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self._table)

    def _build(self) -> None:
        self._numbers, self._references = tuple(self._store.adapters), []
        layers = [CLoraLayer()] * (self._num_layers * len(MATRICES))  # without an adapter
        for adapter in self._store.adapters.values():
            for i in range(self._num_layers):
                layers += [self._layer(adapter.parts.get(f"model.layers.{i}.{name}", [])) for name in MATRICES]
        self._table = (CLoraLayer * len(layers))(*layers)

    def _layer(self, parts: list[LoraPart]) -> CLoraLayer:
        found = []
        for part in parts:
            b_RO = part.b_OR.t().contiguous()
            self._references += [part.a_RI, b_RO]
            found.append(CLoraPart(part.a_RI.data_ptr(), b_RO.data_ptr(), len(part.a_RI), part.start, len(part.b_OR)))
        self._references.append(array := (CLoraPart * len(found))(*found))
        return CLoraLayer(array, len(found))


def to_ctokens(inputs: StepInputs, lora: LoraTable | None = None) -> CTokens:
    """The inputs of a step as a C structure."""
    ids_T, tables_SB = inputs.ids_T, inputs.block_tables_SB
    places = index_pointers(ids_T, inputs.positions_T, inputs.slots_T, inputs.query_starts, tables_SB)
    if lora is None or inputs.adapters_T is None:
        return CTokens(*places, len(ids_T), *tables_SB.shape)
    adapters_T = lora.places(inputs.adapters_T)
    tokens = CTokens(*places, len(ids_T), *tables_SB.shape, adapters_T.data_ptr(), lora.pointer)
    tokens.kept = adapters_T  # alive as long as the pointer to it
    return tokens


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network: float32 on a CPU; no biases, experts, quantized or sharded layers."""
    arch, keys = model.arch, cache.keys[0]
    has_extras = arch.qk_norm or arch.qkv_bias or arch.output_bias or arch.mlp_bias or bool(arch.unrotated_layers)
    if arch.extras or has_extras or arch.num_experts or keys.device.type != "cpu" or keys.dtype != torch.float32:
        return False
    are_float = all(p.dtype == torch.float32 and p.is_contiguous() for p in model.parameters())
    return are_float and arch.head_size in HEAD_SIZES and all(is_unmodified(module) for module in model.modules())


def pack(weight_NK: Tensor) -> Tensor:
    """Panels [N/32, K, 16] of words with two columns each, as csrc/packed_linear.h reads them; padded with zeros."""
    width, size = weight_NK.shape
    bits = torch.zeros(-(-width // (2 * LANES)) * 2 * LANES, size, dtype=torch.int32)
    bits[:width] = weight_NK.bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    low, high = bits.view(-1, 2, LANES, size).unbind(1)
    return (low | high << 16).transpose(1, 2).contiguous()
