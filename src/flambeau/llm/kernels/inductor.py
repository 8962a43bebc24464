"""The decode step through torch.compile: what the compiler is told, in one place.

Shapes: T tokens of the step · S sequences · Q tokens of each · B blocks of the longest one · V vocabulary
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels.building import cache_folder
from flambeau.llm.models.transformer import Attend, Transformer

Step = Callable[[StepInputs], Tensor]  # → logits [T, V]
ChooseAttention = Callable[[KVCache, StepInputs], Attend]

CPU_OPTIONS = {"cpp_wrapper": True}  # kernels are called from C++: 0.9 ms in place of 1.2 at batch 1
# Reading weights once is all a step does at batch 1: matrix-vector products become fused loops, tuned one by one.
CUDA_OPTIONS = {
    "coordinate_descent_tuning": True,
    "triton.unique_kernel_names": True,
    "triton.cudagraphs": False,  # we capture ourselves, between steps
}


def options_for(device: torch.device) -> dict[str, Any]:
    """What the compiler is told for a device; nothing is checked at a call, as the shapes are ours to keep."""
    options = CPU_OPTIONS if device.type == "cpu" else CUDA_OPTIONS
    skips = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    return {**options, **({"guard_filter_fn": skips} if skips else {})}


def keep_compiled_code() -> None:
    """Have the compilers' caches where they outlive the process, unless the user has named a place."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))


def compile_step(
    model: Transformer, cache: KVCache, query_len: int, choose: ChooseAttention, example: StepInputs
) -> Step:
    """The compiled step for inputs like the example; with several sequences on a CPU, for any number of them."""
    keep_compiled_code()

    def step(
        ids_T: Tensor, positions_T: Tensor, slots_T: Tensor, starts: Tensor, lens_S: Tensor, tables: Tensor
    ) -> Tensor:
        inputs = StepInputs(ids_T, positions_T, slots_T, starts, lens_S, tables, query_len=query_len)
        return model.logits(model(ids_T, positions_T, choose(cache, inputs)))

    device = cache.keys[0].device
    is_dynamic = device.type == "cpu"
    # Compiled code belongs to a code object, and nothing is checked at a call: every shape needs an object of its own.
    name = f"step_{len(example.ids_T)}_{query_len}"
    own = types.FunctionType(step.__code__.replace(co_name=name), step.__globals__, name, None, step.__closure__)
    arguments = example.tensors
    if is_dynamic:
        for tensor in arguments:
            mark_dynamic(tensor)
    compiled: Any = torch.compile(own, fullgraph=True, dynamic=None, options=options_for(device))
    with torch.inference_mode():
        compiled(*arguments)
    return lambda inputs: compiled(*inputs.tensors)


def mark_dynamic(tensor: Tensor) -> None:
    """Every size of this tensor may be another next time, unless it is one."""
    for dimension, size in enumerate(tensor.shape):
        if size > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def trash_inputs(num_sequences: int, query_len: int, num_blocks: int, device: torch.device) -> StepInputs:
    """A step that reads and writes nothing but block 0."""
    num_tokens = num_sequences * query_len

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return StepInputs(
        ids_T=zeros(num_tokens),
        positions_T=zeros(num_tokens),
        slots_T=zeros(num_tokens),
        query_starts=torch.arange(num_sequences + 1, device=device) * query_len,
        context_lens_S=zeros(num_sequences) + 1,
        block_tables_SB=zeros(num_sequences, num_blocks),
        query_len=query_len,
    )
