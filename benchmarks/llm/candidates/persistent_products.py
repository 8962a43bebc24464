"""A candidate for the persistent kernel: its products have no barrier for each tile (persistent_products.cu).

It is measured by `benchmarks/llm/persistent_step.py --variants`, with switches of the kernel. It is not in the package,
because it has not run on a GPU as it is now (docs/decisions/0014). It would replace the kernel in use; what they share
is imported from there.

Shapes: E hidden · V vocabulary
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.cuda_compiler import compile_kernel
from flambeau.llm.backends.cuda.few_row_kernel import BFLOAT16, FP8, INT4, INT8, kernel_scales
from flambeau.llm.backends.cuda.persistent_step import (
    ROW_BYTES,
    group_size,
    launch_together,
    linear_layers,
    weight_kind,
)
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.transformer import Transformer

SOURCE = Path(__file__).parent / "persistent_products.cu"
PADDING = {BFLOAT16: 64, INT8: 64, FP8: 64, INT4: 32}  # bytes between the rows of a stage, against bank conflicts
NUM_WARPS = 8  # that compute
NUM_THREADS = 32 * (NUM_WARPS + 4)  # with the warp that copies, and three that give their registers away
KEPT_TILES = 16  # of outputs, whose sums are kept until all are there


class CandidateStep:
    """The kernel for one network and its cache, with its buffers."""

    def __init__(self, model: Transformer, cache: KVCache, defines: Mapping[str, int] | None = None) -> None:
        """`defines` are what the kernel can be tried with; NB is the number of its blocks."""
        arch, device = model.arch, cache.keys[0].device
        kind = weight_kind(model)
        assert kind is not None
        properties: Any = torch.cuda.get_device_properties(device)
        trial = {**(defines or {})}
        self._is_alone = bool(trial.get("ALONE"))
        self._num_blocks: int = trial.pop("NB", properties.multi_processor_count)
        stages, x_bytes, self._shared_bytes = shared_memory(model, kind, properties.shared_memory_per_block_optin)
        shapes = {
            "WT": kind, "HEAD_WT": BFLOAT16, "HID": arch.hidden_size, "NH": arch.num_heads, "NKV": arch.num_kv_heads,
            "HD": arch.head_size, "FF": arch.intermediate_size, "LAYERS": arch.num_layers, "VOCAB": arch.vocab_size,
            "GROUP": group_size(model), "RB": ROW_BYTES, "STAGES": stages, "NB": self._num_blocks,
            "KVBLOCK": cache.block_size, "EPS": f"{arch.norm_epsilon}f", "XBYTES": x_bytes, "NW": NUM_WARPS,
        }  # fmt: skip
        defined = "".join(f"#define {name} {value}\n" for name, value in {**shapes, **trial}.items())
        source = defined + SOURCE.read_text()
        self._kernel = compile_kernel(source, "step", capability="90a", shared_bytes=self._shared_bytes)
        self._kept: list[Tensor] = []
        self._embedding = model.model.embed_tokens.weight

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # What the blocks of a layer give each other; each layer has its own.
        splits = self._num_blocks // arch.num_kv_heads
        projected = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size
        parts = splits * arch.num_heads * (arch.head_size + 4)
        exchanged = projected + 2 * arch.hidden_size + arch.intermediate_size + parts
        self._hidden_E = zeros(arch.hidden_size, torch.bfloat16)
        self._logits_V = zeros(arch.vocab_size, torch.float32)
        self._arrivals = zeros(16 * (1 + arch.num_kv_heads), torch.int64)  # one counter in a line
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
                self._embedding if self._is_alone else self._hidden_E,
                zeros(arch.num_layers * exchanged, torch.int16) - 1,  # no number that the kernel computes
                self._logits_V,
                self._arrivals,
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
        if not self._is_alone:
            self._arrivals.zero_()
            self._hidden_E.copy_(F.embedding(inputs.ids_T, self._embedding)[0])
        given = [self._parameters, inputs.slots_T, inputs.context_lens_S, inputs.block_tables_SB, inputs.ids_T]
        launch_together(self._kernel, self._num_blocks, NUM_THREADS, self._shared_bytes, given)
        return self._logits_V.unsqueeze(0)


def shared_memory(model: Transformer, kind: int, limit_bytes: int) -> tuple[int, int, int]:
    """Stages of the ring, bytes of the inputs of a layer, and of all shared memory."""
    arch = model.arch
    queries = arch.num_heads // arch.num_kv_heads
    x_bytes = max(
        2 * max(arch.intermediate_size, arch.hidden_size, arch.num_heads * arch.head_size),
        NUM_WARPS * queries * (arch.head_size + 2) * 4,
        (queries + 2) * arch.head_size * 4,
        KEPT_TILES * NUM_WARPS * 16 * 4 + NUM_WARPS * 3 * 576,  # sums, and digits of inputs if they are integers
    )
    x_bytes = -(-x_bytes // 128) * 128
    stage = max(16 * (ROW_BYTES + PADDING[each]) + (ROW_BYTES * 2 if each == INT4 else 0) for each in (kind, BFLOAT16))
    slots = 2 * NUM_WARPS * (256 // arch.head_size) * (2 if queries > 2 else 4)
    other = 384 + 4 * slots
    stages = (limit_bytes - x_bytes - other) // (stage + 16)
    return stages, x_bytes, stages * (stage + 16) + x_bytes + other
