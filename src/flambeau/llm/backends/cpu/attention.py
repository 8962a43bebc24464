"""CpuAttention: paged attention by the C++ kernel; its plain version is eager.PagedAttention.

Shapes: T tokens of the step · S sequences · B blocks of the longest · H heads · G key-value heads · D head size
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flambeau.llm.backends.cpu.bindings import CPagedStep, index_pointers, kernels
from flambeau.llm.backends.eager import PagedAttention
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.attention import Attend, AttentionOptions

CACHE_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}  # places in bindings.KINDS
# Longer prompts are faster through SDPA: at 64 tokens 93 us here and 119 there, at 128 tokens 299 and 241.
# The limit between the two is a guess; measured on a busy machine.
MAX_PROMPT = 96


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
    softcap: float,
) -> Tensor:
    """Write the keys and values of these tokens to the cache, then attend; a window or softcap of 0 means none."""
    q, k, v = (with_contiguous_heads(x.float()) for x in (q_THD, k_TGD, v_TGD))
    out_THD = torch.empty_like(q, memory_format=torch.contiguous_format)
    pointers = [tensor.data_ptr() for tensor in (q, k, v, keys, values, out_THD)]
    strides = q.stride(0), k.stride(0), v.stride(0)
    places = index_pointers(positions_T, slots_T, starts, tables_SB)
    counts = q.shape[0], tables_SB.shape[0], q.shape[1], k.shape[1], keys.shape[1], tables_SB.shape[1]
    library = kernels.library
    assert library is not None
    step = CPagedStep(*pointers, *strides, *places, *counts, window, scale, softcap)
    library.flambeau_attend(step, CACHE_KINDS[keys.dtype], q.shape[2], torch.get_num_threads())
    return out_THD.to(q_THD.dtype)


def empty_output(q_THD: Tensor, *others: object) -> Tensor:
    """The output's shape and type, for torch.compile."""
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format)


# Not through `custom_op`: its first call imports the compiler, which takes seconds.
operators: Any = torch.library.Library("flambeau", "FRAGMENT")  # type: ignore[no-untyped-call]
operators.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, Tensor slots, "
    "Tensor starts, Tensor tables, float scale, int window, float softcap) -> Tensor"
)
operators.impl("paged_attention", paged_attention, "CPU")
operators._register_fake("paged_attention", empty_output)


def with_contiguous_heads(x: Tensor) -> Tensor:
    """The same tensor with the heads of a token next to each other in memory."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def can_attend(cache: KVCache) -> bool:
    """Whether the kernel is loaded and supports this cache."""
    keys = cache.keys[0]
    is_known = not cache.is_latent and keys.dtype in CACHE_KINDS
    return is_known and keys.device.type == "cpu" and kernels.library is not None


def choose_attention(cache: KVCache, inputs: StepInputs) -> Attend:
    """The fastest attention for a step."""
    num_tokens, num_sequences = inputs.ids_T.shape[0], inputs.context_lens_S.shape[0]
    is_short = inputs.query_len > 0 or num_tokens <= MAX_PROMPT * num_sequences
    return CpuAttention(cache, inputs) if is_short and can_attend(cache) else PagedAttention(cache, inputs)


class CpuAttention(PagedAttention):
    """Attention over the blocks of a cache; the keys and values of the step are written first."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q [T, H, D] and k, v [T, G, D] to [T, H, D]."""
        cache, inputs = self._cache, self._inputs
        if not options.has_only_softcap or v.shape[2] != q.shape[2]:  # the kernel does not know others
            return super().__call__(layer, q, k, v, options)
        places = inputs.positions_T, inputs.slots_T, inputs.query_starts, inputs.block_tables_SB
        cached, softcap = (cache.keys[layer], cache.values[layer]), options.softcap or 0.0
        y: Tensor = torch.ops.flambeau.paged_attention(
            q, k, v, *cached, *places, options.scale, options.window or 0, softcap
        )
        return y
