"""NativeAttention: paged attention by the CPU kernel, which has attention.PagedAttention as its plain twin.

Shapes: T tokens of the step · H heads · G key-value heads · D head size
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flambeau.llm.attention import PagedAttention
from flambeau.llm.kernels import building
from flambeau.llm.kv_cache import KVCache
from flambeau.llm.models.transformer import Attend
from flambeau.llm.step_inputs import StepInputs

HEAD_SIZES = frozenset({16, 32, 64, 80, 96, 128, 256})  # those that operators.cpp lists
# Longer prompts are quicker through SDPA: 512 tokens take 4.5 ms here and 3.4 ms there, 64 tokens 0.09 and 0.12 ms.
LONGEST_PROMPT = 96


@functools.cache
def are_ready() -> bool:
    """Whether the kernels can be used; from then on torch.compile knows their shapes."""
    if not building.are_loaded():
        return False
    torch.library.register_fake("flambeau::paged_attention", lambda q, *others: torch.empty_like(q))
    torch.library.register_fake("flambeau::linear", lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
    return True


def can_attend(cache: KVCache) -> bool:
    """Whether the kernel can serve this cache."""
    keys = cache.keys[0]
    types = (torch.float32, torch.bfloat16)
    return keys.device.type == "cpu" and keys.dtype in types and keys.shape[-1] in HEAD_SIZES and are_ready()


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
        return torch.ops.flambeau.paged_attention(  # type: ignore[no-any-return]
            q,
            k,
            v,
            cache.keys[layer],
            cache.values[layer],
            inputs.slots_T,
            inputs.query_starts,
            inputs.context_lens_S,
            inputs.block_tables_SB,
            scale,
            window or 0,
        )
