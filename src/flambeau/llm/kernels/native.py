"""NativeAttention: paged attention by the CPU kernel, which has attention.PagedAttention as its plain twin.

Shapes: T tokens of the step · S sequences · B blocks of the longest · H heads · G key-value heads · D head size
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flambeau.llm.compute.attention import PagedAttention
from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels.binding import PagedStep, indices, kernels
from flambeau.llm.models.transformer import Attend

HEAD_SIZES = frozenset({16, 32, 64, 80, 96, 128, 256})  # those that cpu/paged_attention.h lists
# Longer prompts are quicker through SDPA: at 64 tokens 93 us here and 119 there, at 128 tokens 299 and 241.
# Between the two it is a guess; measured on a busy machine.
LONGEST_PROMPT = 96


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    starts: Tensor,
    tables_SB: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Keep the keys and values of these tokens, and let each look at those before it; a window of 0 is none."""
    q, k, v = with_whole_heads(q_THD), with_whole_heads(k_TGD), with_whole_heads(v_TGD)
    if not q.dtype == k.dtype == v.dtype == keys.dtype:
        raise ValueError(f"queries, keys and values of {q.dtype} do not go with a cache of {keys.dtype}")
    out_THD = torch.empty_like(q, memory_format=torch.contiguous_format)
    pointers = [tensor.data_ptr() for tensor in (q, k, v, keys, values, out_THD)]
    strides = q.stride(0), k.stride(0), v.stride(0)
    places = indices(positions_T, slots_T, starts, tables_SB)
    counts = q.shape[0], tables_SB.shape[0], q.shape[1], k.shape[1], keys.shape[1], tables_SB.shape[1]
    library = kernels.library
    assert library is not None
    attend = library.flambeau_attend if keys.dtype == torch.float32 else library.flambeau_attend_bfloat16
    step = PagedStep(*pointers, *strides, *places, *counts, window, scale)
    if not attend(step, q.shape[2], torch.get_num_threads()):
        raise ValueError(f"there is no kernel for heads of {q.shape[2]}")
    return out_THD


def empty_output(q_THD: Tensor, *others: object) -> Tensor:
    """What torch.compile must know of the operator."""
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format)


# Not by `custom_op`, whose first call imports the compiler: seconds that plain steps need not wait.
operators: Any = torch.library.Library("flambeau", "FRAGMENT")  # type: ignore[no-untyped-call]
operators.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, Tensor slots, "
    "Tensor starts, Tensor tables, float scale, int window) -> Tensor"
)
operators.impl("paged_attention", paged_attention, "CPU")
operators._register_fake("paged_attention", empty_output)


def with_whole_heads(x: Tensor) -> Tensor:
    """The same numbers, where the heads of a token lie one after another."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def can_attend(cache: KVCache) -> bool:
    """Whether the kernel can serve this cache now."""
    keys = cache.keys[0]
    is_known = keys.dtype in (torch.float32, torch.bfloat16) and keys.shape[-1] in HEAD_SIZES
    return is_known and keys.device.type == "cpu" and kernels.library is not None


def choose_attention(cache: KVCache, inputs: StepInputs) -> Attend:
    """The quickest attention for a step."""
    num_tokens, num_sequences = inputs.ids_T.shape[0], inputs.context_lens_S.shape[0]
    is_short = inputs.query_len > 0 or num_tokens <= LONGEST_PROMPT * num_sequences
    return NativeAttention(cache, inputs) if is_short and can_attend(cache) else PagedAttention(cache, inputs)


class NativeAttention:
    """Over the blocks of a cache, to which the tokens of this step are added first."""

    def __init__(self, cache: KVCache, inputs: StepInputs) -> None:
        self._cache = cache
        self._inputs = inputs

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """From q [T, H, D] and k, v [T, G, D] to [T, H, D]."""
        cache, inputs = self._cache, self._inputs
        where = inputs.positions_T, inputs.slots_T, inputs.query_starts, inputs.block_tables_SB
        kept = cache.keys[layer], cache.values[layer]
        y: Tensor = torch.ops.flambeau.paged_attention(q, k, v, *kept, *where, scale, window or 0)
        return y
