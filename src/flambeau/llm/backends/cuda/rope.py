"""Rotary positions of queries and keys, and the write of keys and values to the cache, in one Triton kernel.

Shapes: T tokens of the step · H heads · G key-value heads · D head size · P blocks · K tokens of a block · S parts of
a sum
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def rope_and_cache(  # type: ignore[no-untyped-def]
    qkv_ptr, q_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_gain_ptr, k_gain_ptr,
    epsilon, T,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF_PADDED: tl.constexpr,
    PARTS: tl.constexpr, ROTATES: tl.constexpr, NORMALIZES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One head of one token: a query, a key or a value."""
    token, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    dtype = q_ptr.dtype.element_ty
    d = tl.arange(0, HALF_PADDED)
    is_dimension = d < half
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    wait_for_previous(OVERLAPS)
    first = tl.zeros([HALF_PADDED], tl.float32)
    second = tl.zeros([HALF_PADDED], tl.float32)
    for part in tl.static_range(PARTS):
        at = qkv_ptr + ((part * T + token) * all_heads + head) * SIZE + d
        first += tl.load(at, mask=is_dimension, other=0.0).to(tl.float32)
        second += tl.load(at + half, mask=is_dimension, other=0.0).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMALIZES:
            root = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / SIZE + epsilon)
            if head < HEADS:
                first_gain = tl.load(q_gain_ptr + d, mask=is_dimension, other=0.0).to(tl.float32)
                second_gain = tl.load(q_gain_ptr + half + d, mask=is_dimension, other=0.0).to(tl.float32)
            else:
                first_gain = tl.load(k_gain_ptr + d, mask=is_dimension, other=0.0).to(tl.float32)
                second_gain = tl.load(k_gain_ptr + half + d, mask=is_dimension, other=0.0).to(tl.float32)
            first, second = first * root * first_gain, second * root * second_gain
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        if ROTATES:
            cos = tl.load(cos_ptr + position * half + d, mask=is_dimension, other=0.0)
            sin = tl.load(sin_ptr + position * half + d, mask=is_dimension, other=0.0)
            rotated = first * cos - second * sin
            second = second * cos + first * sin
            first = rotated
    first_half, second_half = first.to(dtype), second.to(dtype)
    cached_type = keys_ptr.dtype.element_ty
    if head < HEADS:
        query = q_ptr + (token * HEADS + head) * SIZE + d
        tl.store(query, first_half, mask=is_dimension)
        tl.store(query + half, second_half, mask=is_dimension)
    elif head < HEADS + KV_HEADS:
        key = keys_ptr + (slot * KV_HEADS + head - HEADS) * SIZE + d
        tl.store(key, first_half.to(cached_type), mask=is_dimension)
        tl.store(key + half, second_half.to(cached_type), mask=is_dimension)
    else:
        value = values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * SIZE + d
        tl.store(value, first_half.to(cached_type), mask=is_dimension)
        tl.store(value + half, second_half.to(cached_type), mask=is_dimension)


def rope(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    gains: tuple[Tensor, Tensor] | None,
    epsilon: float,
    num_heads: int,
    dtype: torch.dtype,
) -> Tensor:
    """The queries [T, H, D] of the projections [T, (H+2G)·D], or of their parts [S, T, (H+2G)·D], in this type.

    Keys and values are written to their slots of [P, K, G, D]. `tables` are the cosine and sine of positions; None: no
    rotary positions. `gains` normalize queries and keys; None: no normalization.
    """
    num_tokens, (kv_heads, size) = len(positions_T), keys.shape[2:]
    q = torch.empty((num_tokens, num_heads, size), dtype=dtype, device=keys.device)
    launch: Any = rope_and_cache
    launch[(num_tokens, num_heads + 2 * kv_heads)](
        qkv, q, keys, values, *(tables or (None, None)), positions_T, slots_T, *(gains or (None, None)),
        epsilon, num_tokens,
        HEADS=num_heads, KV_HEADS=kv_heads, SIZE=size, HALF_PADDED=triton.next_power_of_2(size // 2),
        PARTS=qkv.shape[0] if qkv.dim() == 3 else 1, ROTATES=tables is not None, NORMALIZES=gains is not None,
        **overlap_options(num_tokens), num_warps=1,
    )  # fmt: skip
    return q
