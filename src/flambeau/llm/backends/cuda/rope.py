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

HEADS_EACH = 16  # of a program: fewer leave the memory waiting


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def rope_and_cache(  # type: ignore[no-untyped-def]
    qkv_ptr, q_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_gain_ptr, k_gain_ptr,
    epsilon, T,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF_PADDED: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, ROTATES: tl.constexpr, NORMALIZES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A few heads of one token: queries, keys or values."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = SIZE // 2
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    dtype = q_ptr.dtype.element_ty
    head = (tl.program_id(1) * EACH + tl.arange(0, EACH))[:, None]
    d = tl.arange(0, HALF_PADDED)[None, :]
    is_dimension = d < half
    is_known = (head < all_heads) & is_dimension
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    wait_for_previous(OVERLAPS)
    first = tl.zeros([EACH, HALF_PADDED], tl.float32)
    second = tl.zeros([EACH, HALF_PADDED], tl.float32)
    for part in tl.static_range(PARTS):
        at = qkv_ptr + ((part * T + token) * all_heads + head) * SIZE + d
        first += tl.load(at, mask=is_known, other=0.0).to(tl.float32)
        second += tl.load(at + half, mask=is_known, other=0.0).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    x, y = first, second
    if NORMALIZES:
        root = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / SIZE + epsilon)[:, None]
        q_gain = tl.load(q_gain_ptr + d, mask=is_dimension, other=0.0).to(tl.float32)
        k_gain = tl.load(k_gain_ptr + d, mask=is_dimension, other=0.0).to(tl.float32)
        x = x * root * tl.where(is_query, q_gain, k_gain)
        q_gain = tl.load(q_gain_ptr + half + d, mask=is_dimension, other=0.0).to(tl.float32)
        k_gain = tl.load(k_gain_ptr + half + d, mask=is_dimension, other=0.0).to(tl.float32)
        y = y * root * tl.where(is_query, q_gain, k_gain)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    if ROTATES:
        cos = tl.load(cos_ptr + position * half + d, mask=is_dimension, other=0.0)
        sin = tl.load(sin_ptr + position * half + d, mask=is_dimension, other=0.0)
        x, y = x * cos - y * sin, y * cos + x * sin
    first = tl.where(is_value, first, x).to(dtype)
    second = tl.where(is_value, second, y).to(dtype)
    cached_type = keys_ptr.dtype.element_ty
    query = q_ptr + (token * HEADS + head) * SIZE + d
    tl.store(query, first, mask=is_query & is_dimension)
    tl.store(query + half, second, mask=is_query & is_dimension)
    is_key = ~is_query & ~is_value & is_dimension
    key = keys_ptr + (slot * KV_HEADS + head - HEADS) * SIZE + d
    tl.store(key, first.to(cached_type), mask=is_key)
    tl.store(key + half, second.to(cached_type), mask=is_key)
    is_value = is_value & is_known
    value = values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * SIZE + d
    tl.store(value, first.to(cached_type), mask=is_value)
    tl.store(value + half, second.to(cached_type), mask=is_value)


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
    launch[(num_tokens, triton.cdiv(num_heads + 2 * kv_heads, HEADS_EACH))](
        qkv, q, keys, values, *(tables or (None, None)), positions_T, slots_T, *(gains or (None, None)),
        epsilon, num_tokens,
        HEADS=num_heads, KV_HEADS=kv_heads, SIZE=size, HALF_PADDED=triton.next_power_of_2(size // 2), EACH=HEADS_EACH,
        PARTS=qkv.shape[0] if qkv.dim() == 3 else 1, ROTATES=tables is not None, NORMALIZES=gains is not None,
        **overlap_options(num_tokens), num_warps=4,
    )  # fmt: skip
    return q
