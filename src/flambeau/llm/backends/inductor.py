"""Compiles decode steps with torch.compile; all compiler options are here.

Shapes: T tokens of the step · S sequences · Q tokens of each · B blocks of the longest one · V vocabulary
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.backends.eager import AttentionFactory
from flambeau.llm.cache_folder import cache_folder
from flambeau.llm.executor.background_compiler import Decode
from flambeau.llm.executor.inputs import StepInputs, step_inputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer

CPU_OPTIONS = {"cpp_wrapper": True}  # kernels are called from C++: 0.9 ms instead of 1.2 at batch 1
# At batch 1 a step only reads the weights once: matrix-vector products become fused loops, tuned one by one.
CUDA_OPTIONS = {
    "coordinate_descent_tuning": True,
    "triton.unique_kernel_names": True,
    "triton.cudagraphs": False,  # the backend captures them itself, between steps
}


def options_for(device: torch.device) -> dict[str, Any]:
    """Compiler options for a device. Guards are skipped: the backend calls each function with its own shapes only."""
    options = CPU_OPTIONS if device.type == "cpu" else CUDA_OPTIONS
    skips = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    return {**options, **({"guard_filter_fn": skips} if skips else {})}


def use_persistent_cache() -> None:
    """Put the compilers' caches where they outlive the process, unless the user has set a folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))


def compile_step(
    model: Transformer,
    cache: KVCache,
    query_len: int,
    attention: AttentionFactory,
    example: StepInputs,
    states: HiddenStates | None = None,
) -> Decode:
    """A compiled step for inputs like the example; with several sequences on a CPU, for any number of them."""
    use_persistent_cache()
    layers = () if states is None else states.layers

    def step(*tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        inputs = step_inputs(tensors, query_len=query_len)
        given = inputs.ids_T, inputs.positions_T, attention(cache, inputs), None
        hidden, found = model.with_layer_inputs(*given, layers)
        return model.logits(hidden), found

    device = cache.keys[0].device
    is_dynamic = device.type == "cpu"
    # Compiled code belongs to a code object, and guards are skipped: every shape needs a code object of its own.
    name = f"step_{len(example.ids_T)}_{query_len}"
    own = types.FunctionType(step.__code__.replace(co_name=name), step.__globals__, name, None, step.__closure__)
    arguments = example.tensors
    if is_dynamic:
        for tensor in arguments:
            mark_dynamic(tensor)
    compiled: Any = torch.compile(own, fullgraph=True, dynamic=None, options=options_for(device))
    with torch.inference_mode():
        compiled(*arguments)

    def run(inputs: StepInputs) -> Tensor:
        logits_TV, found = compiled(*inputs.tensors)
        if states is not None:
            states.set(torch.cat(found, dim=-1))
        # Where that is faster, the rows of a product are padded, those of outputs too: V may be 97 and the stride 100.
        return logits_TV.contiguous()  # type: ignore[no-any-return]

    return run


def mark_dynamic(tensor: Tensor) -> None:
    """Let every size of this tensor vary, except sizes of one."""
    for dimension, size in enumerate(tensor.shape):
        if size > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def dummy_inputs(
    num_sequences: int, query_len: int, num_blocks: int, device: torch.device, *, has_states: bool = False
) -> StepInputs:
    """A step that reads and writes block 0, and state 0, only."""
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
        state_slots_S=zeros(num_sequences) if has_states else None,
        state_ends_T=zeros(num_tokens) if has_states and query_len > 1 else None,
    )
