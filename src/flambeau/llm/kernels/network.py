"""A whole step of a plain Llama-shaped network by the CPU kernels, which has EagerForward as its plain twin.

Weights that bfloat16 holds exactly are packed as such: half the memory is read, and the results are those of float32.

Shapes: N columns, or rows · K their length · T tokens of the step · S sequences · J tokens of each that follow the
step · V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels import binding
from flambeau.llm.kernels.native import HEAD_SIZES
from flambeau.llm.kernels.plain import is_plain
from flambeau.llm.models.transformer import Transformer

LANES = 16  # of vectors.h
PACKED_LIMIT_BYTES = 512 * 2**20  # of packed weights beside the network's own; a larger one is read as it is


class NativeNetwork:
    """A network and its cache, computed in one call."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        arch, body = model.arch, model.model
        self._packs = 2 * sum(parameter.numel() for parameter in model.parameters()) <= PACKED_LIMIT_BYTES
        self._kept: list[Any] = [cache]  # what the structures point at
        layers = [self._layer(layer, arch.window(i) or 0, cache, i) for i, layer in enumerate(body.layers)]
        self._kept.append(array := (binding.Layer * len(layers))(*layers))
        self._network = binding.Network(
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
        assert binding.kernels.library is not None
        self._library = binding.kernels.library

    def _layer(self, layer: Any, window: int, cache: KVCache, number: int) -> binding.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return binding.Layer(
            *map(self._pointer, norms),
            *map(self._matrix, (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)),
            *map(self._pointer, (cache.keys[number], cache.values[number])),
            window,
        )

    def _matrix(self, linear: Any) -> binding.Matrix:
        weight_NK: Tensor = linear.weight.detach()
        is_packed = self._packs and torch.equal(weight_NK.bfloat16().float(), weight_NK)
        pointer = self._pointer(pack(weight_NK) if is_packed else weight_NK)
        width, size = weight_NK.shape
        return binding.Matrix(pointer if is_packed else None, None if is_packed else pointer, size, width)

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None) -> Tensor:
        """The logits [N, V] of these tokens, or [T, V] of all of them."""
        num_rows = len(inputs.ids_T) if rows_N is None else len(rows_N)
        rows = None if rows_N is None else binding.indices(rows_N)[0]
        logits_NV = torch.empty(num_rows, self._width)
        threads = torch.get_num_threads()
        self._library.flambeau_step(self._network, tokens_of(inputs), rows, num_rows, logits_NV.data_ptr(), threads)
        return logits_NV

    def choose(self, inputs: StepInputs) -> Tensor:
        """The likeliest token after each [T], the first of equal ones; -1 where its logits are no numbers."""
        found_T = torch.empty_like(inputs.ids_T)
        num_rows, threads = len(found_T), torch.get_num_threads()
        self._library.flambeau_choose(self._network, tokens_of(inputs), None, num_rows, found_T.data_ptr(), threads)
        return found_T

    def go_ahead(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        """The likeliest token after each sequence, the likeliest after that one, and so on: [J + 1, S].

        The tokens found go to these positions and slots. Where logits are no numbers, token 0 is found.
        """
        places, num_ahead = binding.indices(positions_JS, slots_JS), 1 + positions_JS.shape[0]
        found_KS = positions_JS.new_empty(num_ahead, positions_JS.shape[1])
        threads = torch.get_num_threads()
        self._library.flambeau_go_ahead(
            self._network, tokens_of(first), *places, num_ahead, found_KS.data_ptr(), threads
        )
        return found_KS


def tokens_of(inputs: StepInputs) -> binding.Tokens:
    """The tokens of a step as the kernels see them."""
    ids_T, tables_SB = inputs.ids_T, inputs.block_tables_SB
    places = binding.indices(ids_T, inputs.positions_T, inputs.slots_T, inputs.query_starts, tables_SB)
    return binding.Tokens(*places, len(ids_T), *tables_SB.shape)


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether a network is plain enough: float32 on a CPU, no biases, experts, quantized or divided layers."""
    arch, keys = model.arch, cache.keys[0]
    has_extras = arch.qk_norm or arch.qkv_bias or arch.output_bias or arch.mlp_bias or bool(arch.unrotated_layers)
    if has_extras or arch.num_experts or keys.device.type != "cpu" or keys.dtype != torch.float32:
        return False
    are_float = all(p.dtype == torch.float32 and p.is_contiguous() for p in model.parameters())
    return are_float and arch.head_size in HEAD_SIZES and all(is_plain(module) for module in model.modules())


def pack(weight_NK: Tensor) -> Tensor:
    """Panels [N/32, K, 16] of words with two columns each, as packed_linear.h wants them; missing columns are 0."""
    width, size = weight_NK.shape
    bits = torch.zeros(-(-width // (2 * LANES)) * 2 * LANES, size, dtype=torch.int32)
    bits[:width] = weight_NK.bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    low, high = bits.view(-1, 2, LANES, size).unbind(1)
    return (low | high << 16).transpose(1, 2).contiguous()
