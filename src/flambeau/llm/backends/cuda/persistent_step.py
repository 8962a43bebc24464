"""PersistentStep: a decode step of one sequence with 8-bit or 4-bit weights in one kernel (csrc/persistent_step.cu).

One block on each multiprocessor streams weights all the time, also while blocks wait for each other between the parts
of a layer. NVRTC compiles the kernel for the network's shapes. Its results are those of `CudaNetwork`, which computes
all other steps.

Shapes: E hidden · V vocabulary · O outputs · G groups of 4-bit weights
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.cuda_compiler import compile_kernel
from flambeau.llm.backends.cuda.few_row_kernel import (
    BFLOAT16,
    CAPABILITY,
    FP8,
    INT4,
    INT4_PIECE,
    INT8,
    driver,
    kernel_scales,
    kind_of,
)
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.transformer import Transformer

SOURCE = Path(__file__).parent / "csrc" / "persistent_step.cu"
PADDING = {BFLOAT16: 16, INT8: 64, FP8: 64, INT4: 32}  # bytes between the rows of a stage, against bank conflicts
NUM_WARPS = 12
ROW_BYTES = 2048  # a bulk copy takes about 40 ns, whatever its size
WARP_INPUTS = 256  # that the threads of a warp prepare: all of them, or none
MAX_QUERIES = 8  # heads that share a key-value head: more need too many registers
MIN_FP8_SIZE = 4096  # hidden size: with fp8 weights the Triton network is faster for 2,048 and slower for 4,096


class PersistentStep:
    """The kernel for one network and its cache, with its buffers."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        arch, device = model.arch, cache.keys[0].device
        kind = weight_kind(model)
        assert kind is not None
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_blocks: int = properties.multi_processor_count
        stages, x_bytes, self._shared_bytes = shared_memory(model, kind, properties.shared_memory_per_block_optin)
        shapes = {
            "WT": kind, "HEAD_WT": BFLOAT16, "HID": arch.hidden_size, "NH": arch.num_heads, "NKV": arch.num_kv_heads,
            "HD": arch.head_size, "FF": arch.intermediate_size, "LAYERS": arch.num_layers, "VOCAB": arch.vocab_size,
            "GROUP": group_size(model), "RB": ROW_BYTES, "STAGES": stages, "NB": self._num_blocks,
            "KVBLOCK": cache.block_size, "EPS": f"{arch.norm_epsilon}f", "XBYTES": x_bytes,
        }  # fmt: skip
        source = "".join(f"#define {name} {value}\n" for name, value in shapes.items()) + SOURCE.read_text()
        self._kernel = compile_kernel(source, "step", shared_bytes=self._shared_bytes)
        self._kept: list[Tensor] = []
        self._embedding = model.model.embed_tokens.weight

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        splits = self._num_blocks // arch.num_kv_heads
        self._hidden_E = zeros(arch.hidden_size, torch.bfloat16)
        self._logits_V = zeros(arch.vocab_size, torch.float32)
        self._counters = zeros(4 * arch.num_layers + 8, torch.int32)  # of arrivals, and of tiles taken
        layers: list[Any] = [*model.model.layers]
        linears = [linear for layer in layers for linear in linear_layers(layer)]
        gains = [each.weight for layer in layers for each in (layer.input_layernorm, layer.post_attention_layernorm)]
        head = self._embedding if model.lm_head is None else model.lm_head.weight
        self._parameters = self._addresses(
            [
                self._addresses([*(linear.weight for linear, _ in linears), head]),
                self._addresses([*(kernel_scales(linear, is_gated) for linear, is_gated in linears), None]),
                self._addresses([*gains, model.model.norm.weight]),
                self._addresses([*cache.keys]),
                self._addresses([*cache.values]),
                model.rotation.cos,
                model.rotation.sin,
                self._hidden_E,
                zeros((arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size, torch.bfloat16),
                zeros(arch.intermediate_size, torch.bfloat16),
                zeros(splits * arch.num_heads * arch.head_size, torch.float32),
                zeros(splits * arch.num_heads * 2, torch.float32),
                self._logits_V,
                self._counters,
            ]
        )

    def _addresses(self, tensors: list[Any]) -> Tensor:
        """A tensor of the tensors' addresses; it keeps them alive."""
        self._kept += [tensor for tensor in tensors if tensor is not None]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._kept.append(torch.tensor(addresses, dtype=torch.int64, device=self._embedding.device))
        return self._kept[-1]

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [1, V] of a step of one token, in a buffer that the next step overwrites."""
        self._counters.zero_()
        self._hidden_E.copy_(F.embedding(inputs.ids_T, self._embedding)[0])
        given = [self._parameters, inputs.slots_T, inputs.context_lens_S, inputs.block_tables_SB]
        launch_together(self._kernel, self._num_blocks, 32 * NUM_WARPS, self._shared_bytes, given)
        return self._logits_V.unsqueeze(0)


def launch_together(function: Any, num_blocks: int, num_threads: int, shared_bytes: int, tensors: list[Tensor]) -> None:
    """Launch a kernel whose blocks wait for each other: none starts before there is room for all of them."""
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    arguments = (ctypes.c_void_p * len(tensors))(*(ctypes.addressof(address) for address in addresses))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = driver().cuLaunchCooperativeKernel(
        function, num_blocks, 1, 1, num_threads, 1, 1, shared_bytes, stream, arguments
    )
    if error:
        raise RuntimeError(f"the driver rejects a cooperative launch of {num_blocks} blocks: error {error}")


def shared_memory(model: Transformer, kind: int, limit_bytes: int) -> tuple[int, int, int]:
    """Stages of the ring, bytes of the inputs of a layer, and of all shared memory."""
    arch = model.arch
    widest = max(arch.intermediate_size, arch.hidden_size, arch.num_heads * arch.head_size)
    queries, num_consumers = arch.num_heads // arch.num_kv_heads, NUM_WARPS - 1
    x_bytes = -(-max(widest * 2, num_consumers * queries * (arch.head_size + 2) * 4) // 128) * 128
    stage = 16 * (ROW_BYTES + PADDING[kind]) + (ROW_BYTES * 2 if kind == INT4 else 0)
    other = 512 + 2 * num_consumers * 16 * 4 + (widest // 64 + 8) * 8 + 512
    stages = (limit_bytes - x_bytes - other) // (stage + 20)
    return stages, x_bytes, stages * (stage + 20) + x_bytes + other


def linear_layers(layer: Any) -> list[tuple[Any, bool]]:
    """The linear layers in the order of a step, and whether half of the outputs are gates."""
    attention, mlp = layer.self_attn, layer.mlp
    return [(attention.qkv_proj, False), (attention.o_proj, False), (mlp.gate_up_proj, True), (mlp.down_proj, False)]


def weight_kind(model: Transformer) -> int | None:
    """The kind of all layers' weights; None if they differ."""
    linears = [linear for layer in model.model.layers for linear, _ in linear_layers(layer)]
    kinds = {kind_of(linear) for linear in linears}
    return kinds.pop() if len(kinds) == 1 else None


def group_size(model: Transformer) -> int:
    """Of 4-bit weights; any number for others."""
    first: Any = model.model.layers[0]
    return getattr(first.self_attn.qkv_proj, "group_size", INT4_PIECE)


def is_faster(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernel supports a network that `CudaNetwork` supports, and is faster: with quantized weights."""
    arch, device = model.arch, cache.keys[0].device
    if torch.cuda.get_device_capability(device) != CAPABILITY or cache.keys[0].dtype != torch.bfloat16:
        return False
    has_extras = arch.qkv_bias or arch.output_bias or arch.mlp_bias or arch.qk_norm or arch.unrotated_layers
    if arch.extras or arch.num_experts or has_extras or any(arch.windows) or arch.head_size not in (64, 128):
        return False
    sizes = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_size
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    if any(size % WARP_INPUTS for size in sizes) or arch.vocab_size % 16 or arch.num_kv_heads > num_blocks:
        return False
    kind = weight_kind(model)
    if arch.num_heads // arch.num_kv_heads > MAX_QUERIES or kind in (None, BFLOAT16):
        return False
    if kind == FP8 and arch.hidden_size < MIN_FP8_SIZE:
        return False
    head = model.lm_head
    return head is None or (kind_of(head) == BFLOAT16 and head.bias is None)
