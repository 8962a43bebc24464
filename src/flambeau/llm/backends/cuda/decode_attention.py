"""Attention of one new token of each sequence, from its projections, in one Triton kernel.

The kernel rotates the query and the key, writes key and value to the cache, and attends to the places before. The new
token's own key and value are taken from registers, so nothing waits for the cache. The last program of a sequence's
splits, by a counter, merges them: another launch takes longer. The plain version is rope.py and attention.py, which
compute prompts and verified tokens.

Shapes: T tokens of the step, one of each sequence · B blocks of the longest · P blocks · K tokens of a block ·
H heads · G key-value heads · D head size · S parts of a sum · L slots of adapters · R rank of them · N outputs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda import decode_attention_kernel
from flambeau.llm.backends.cuda.attention import MIN_ROWS, ScoreParts, adjusted, compute_type_of, num_splits
from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.rope import (
    HeadParts,
    clipped,
    first_places,
    normalize_head,
    normalize_heads,
    second_places,
    tempered,
)

MANY_PROGRAMS = 512  # from which on programs of one warp fill the GPU
NARROW_SIZE = 128  # of the largest heads that were measured
WIDE_WARPS = 4  # for larger heads: with fewer, numbers do not fit into registers, up to 2 KB of each thread
MAX_ADAPTER_RANK = 16  # more need too many registers
MERGED_ROWS = 64  # heads times splits that are merged at a time: more need too many registers


class ProjectionAdapters(NamedTuple):
    """Adapters of the projections: the kernel adds the product with the B of a row's slot."""

    inner_TX: Tensor  # inputs times A: R ranks for queries, for keys and for values
    b_LRN: Tensor
    places_T: Tensor  # the slot of each row, plus one; 0: it has none


@triton.jit
def rotate(first, second, cos, sin):  # type: ignore[no-untyped-def]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit  # type: ignore[untyped-decorator]
def expanded(y, inner_ptr, b_ptr, adapter, place, is_known, N: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some of N projections of a row, with the product of its inner sums and its adapter's B."""
    mask = is_known & (adapter >= 0)
    for rank in tl.static_range(RANK):
        inner = tl.load(inner_ptr + rank, mask=adapter >= 0, other=0.0)
        y += inner * tl.load(b_ptr + (adapter * RANK + rank) * N + place, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit  # type: ignore[untyped-decorator]
def repeated(x, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of x over and over: a tile of queries has more rows than a group has heads, and they are not used.

    A sum over a third axis that picks the row was wrong as Triton 3.6 compiled it, though not in its interpreter.
    """
    tiles = tl.broadcast_to(x[None, :, :], (ROWS // x.shape[0], x.shape[0], x.shape[1]))
    return tl.reshape(tiles, (ROWS, x.shape[1]))


@triton.jit  # type: ignore[untyped-decorator]
def merge(  # type: ignore[no-untyped-def]
    sums_ptr, highs_ptr, totals_ptr, out_ptr, first_row, num_used,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Merge the splits of the heads of one key-value head, a few at a time."""
    row = tl.arange(0, GROUP_PADDED)
    is_row = row < GROUP
    dimension = tl.arange(0, PADDED)
    is_dimension = dimension < SIZE
    high = tl.full([GROUP_PADDED], -1.0e30, tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    sums = tl.zeros([GROUP_PADDED, PADDED], tl.float32)
    for start in range(0, num_used, EACH):
        split = start + tl.arange(0, EACH)
        mask = (split < num_used)[:, None] & is_row[None, :]
        at = (first_row + row)[None, :] * SPLITS + split[:, None]
        highs = tl.load(highs_ptr + at, mask=mask, other=-1.0e30, cache_modifier=".cg")
        totals = tl.load(totals_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        parts_at = sums_ptr + at[:, :, None] * SIZE + dimension[None, None, :]
        parts_mask = mask[:, :, None] & is_dimension[None, None, :]
        parts = tl.load(parts_at, mask=parts_mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(high, tl.max(highs, 0))
        weights = tl.exp(highs - higher[None, :])
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(totals * weights, 0)
        sums = sums * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        high = higher
    y_at = out_ptr + (first_row + row)[:, None] * SIZE + dimension[None, :]
    y = (sums / tl.where(is_row, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(y_at, y, mask=is_row[:, None] & is_dimension[None, :])


@triton.jit(do_not_specialize=["T", "table_stride", "counter_stride", "alibi_stride"])  # type: ignore[untyped-decorator]
def rotate_and_attend(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, values_ptr, positions_ptr, slots_ptr, tables_ptr,
    cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, q_bias_ptr, k_bias_ptr, sinks_ptr, alibi_ptr,
    inner_ptr, b_ptr, places_ptr, out_ptr, sums_ptr, highs_ptr, totals_ptr, counters_ptr,
    scale, epsilon, T, table_stride, counter_stride, alibi_stride,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF_PADDED: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
    PARTS: tl.constexpr, ROTARY: tl.constexpr, ROTATES: tl.constexpr, NORMALIZES: tl.constexpr,
    OWN_GAINS: tl.constexpr, CENTERED: tl.constexpr, LATE: tl.constexpr, CLIP: tl.constexpr,
    TEMPERED: tl.constexpr, TEMPERATURE: tl.constexpr, TEMPERED_FROM: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP_PADDED: tl.constexpr,
    MERGED: tl.constexpr, RANK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One split of the places of a sequence, for the heads of one key-value head. The first split has the new token."""
    token, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    half: tl.constexpr = SIZE // 2
    half_rotary: tl.constexpr = ROTARY // 2
    dtype = out_ptr.dtype.element_ty
    cached_type = keys_ptr.dtype.element_ty
    compute_type = compute_type_of(cached_type, dtype)
    row = tl.arange(0, ROWS)
    is_row = row < group
    head = kv_head * group + row
    d = tl.arange(0, HALF_PADDED)
    is_half = d < half
    first_d, second_d = first_places(d, SIZE, ROTARY), second_places(d, SIZE, ROTARY)
    dimension = tl.arange(0, PADDED)
    is_dimension = dimension < SIZE
    position = tl.load(positions_ptr + token).to(tl.int32)
    slot = tl.load(slots_ptr + token)
    if ROTATES:
        no_turn: tl.constexpr = 0.0 if ROTARY == SIZE else 1.0  # the cosine of what is not rotated
        cos = tl.load(cos_ptr + position * half_rotary + d, mask=d < half_rotary, other=no_turn)
        sin = tl.load(sin_ptr + position * half_rotary + d, mask=d < half_rotary, other=0.0)
    first_place = position * 0
    if WINDOW > 0:
        first_place = tl.maximum(position + 1 - WINDOW, 0) // PLACES * PLACES
    if CHUNK > 0:
        first_place = position // CHUNK * CHUNK // PLACES * PLACES
    share = tl.cdiv(tl.cdiv(position - first_place, SPLITS), PLACES) * PLACES
    begin = first_place + split * share
    stop = tl.minimum(begin + share, position)
    if RANK > 0:
        adapter = tl.load(places_ptr + token) - 1
    wait_for_previous(OVERLAPS)

    q1 = tl.zeros([ROWS, HALF_PADDED], tl.float32)
    q2 = tl.zeros([ROWS, HALF_PADDED], tl.float32)
    k1 = tl.zeros([HALF_PADDED], tl.float32)
    k2 = tl.zeros([HALF_PADDED], tl.float32)
    v = tl.zeros([PADDED], tl.float32)
    is_query = is_row[:, None] & is_half[None, :]
    for part in tl.static_range(PARTS):
        at = qkv_ptr + (part * T + token) * (all_heads * SIZE)
        q_at = at + head[:, None] * SIZE
        q1 += tl.load(q_at + first_d[None, :], mask=is_query, other=0.0).to(tl.float32)
        q2 += tl.load(q_at + second_d[None, :], mask=is_query, other=0.0).to(tl.float32)
        k_at = at + (HEADS + kv_head) * SIZE
        k1 += tl.load(k_at + first_d, mask=is_half, other=0.0).to(tl.float32)
        k2 += tl.load(k_at + second_d, mask=is_half, other=0.0).to(tl.float32)
        v_at = at + (HEADS + KV_HEADS + kv_head) * SIZE + dimension
        v += tl.load(v_at, mask=is_dimension, other=0.0).to(tl.float32)
    if RANK > 0:
        width: tl.constexpr = all_heads * SIZE
        inner_at = inner_ptr + token * (3 * RANK)
        of_group = tl.arange(0, GROUP_PADDED)
        q_place, k_place = (kv_head * group + of_group)[:, None] * SIZE, (HEADS + kv_head) * SIZE
        v_place = (HEADS + KV_HEADS + kv_head) * SIZE + dimension
        is_changed = (of_group < group)[:, None] & is_half[None, :]
        q_more = tl.zeros([GROUP_PADDED, HALF_PADDED], tl.float32)
        first_more = expanded(q_more, inner_at, b_ptr, adapter, q_place + first_d[None, :], is_changed, width, RANK)
        second_more = expanded(q_more, inner_at, b_ptr, adapter, q_place + second_d[None, :], is_changed, width, RANK)
        k1 = expanded(k1, inner_at + RANK, b_ptr, adapter, k_place + first_d, is_half, width, RANK)
        k2 = expanded(k2, inner_at + RANK, b_ptr, adapter, k_place + second_d, is_half, width, RANK)
        v = expanded(v, inner_at + 2 * RANK, b_ptr, adapter, v_place, is_dimension, width, RANK)
        q1 += repeated(first_more, ROWS)
        q2 += repeated(second_more, ROWS)
    q1, q2 = q1.to(dtype).to(tl.float32), q2.to(dtype).to(tl.float32)
    k1, k2 = k1.to(dtype).to(tl.float32), k2.to(dtype).to(tl.float32)
    if NORMALIZES and not LATE:
        q1, q2 = normalize_heads(
            q1, q2, q_gain_ptr, q_bias_ptr, head[:, None], first_d, second_d, is_half, is_query, epsilon, dtype,
            SIZE, OWN_GAINS, CENTERED,
        )  # fmt: skip
        k1, k2 = normalize_head(
            k1, k2, k_gain_ptr, k_bias_ptr, kv_head, first_d, second_d, is_half, epsilon, dtype,
            SIZE, OWN_GAINS, CENTERED,
        )  # fmt: skip
    if CLIP > 0:
        q1, q2, k1, k2, v = (
            clipped(q1, CLIP), clipped(q2, CLIP), clipped(k1, CLIP), clipped(k2, CLIP), clipped(v, CLIP)
        )  # fmt: skip
    if ROTATES:
        q1, q2 = rotate(q1, q2, cos[None, :], sin[None, :])
        k1, k2 = rotate(k1, k2, cos, sin)
    if NORMALIZES and LATE:
        q1, q2 = q1.to(dtype).to(tl.float32), q2.to(dtype).to(tl.float32)
        k1, k2 = k1.to(dtype).to(tl.float32), k2.to(dtype).to(tl.float32)
        q1, q2 = normalize_heads(
            q1, q2, q_gain_ptr, q_bias_ptr, head[:, None], first_d, second_d, is_half, is_query, epsilon, dtype,
            SIZE, OWN_GAINS, CENTERED,
        )  # fmt: skip
        k1, k2 = normalize_head(
            k1, k2, k_gain_ptr, k_bias_ptr, kv_head, first_d, second_d, is_half, epsilon, dtype,
            SIZE, OWN_GAINS, CENTERED,
        )  # fmt: skip
    if TEMPERED > 0:
        q1, q2 = tempered(q1, q2, position, dtype, TEMPERED, TEMPERATURE, TEMPERED_FROM)
    q1, q2 = q1.to(dtype).to(compute_type), q2.to(dtype).to(compute_type)
    k1, k2, v = k1.to(dtype).to(cached_type), k2.to(dtype).to(cached_type), v.to(dtype).to(cached_type)
    high = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    if split == 0:
        to = (slot * KV_HEADS + kv_head) * SIZE
        tl.store(keys_ptr + to + first_d, k1, mask=is_half)
        tl.store(keys_ptr + to + second_d, k2, mask=is_half)
        tl.store(values_ptr + to + dimension, v, mask=is_dimension)
        own = tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1)
        own += tl.sum(q2.to(tl.float32) * k2.to(tl.float32)[None, :], 1)
        high = adjusted(own * scale, alibi_ptr, alibi_stride, head, position, is_row, 1.0, SOFTCAP, HAS_ALIBI)
        total += 1.0
        sums += v.to(tl.float32)[None, :]
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
            higher = tl.maximum(high, sink)
            own_weight = tl.exp(high - higher)
            total = own_weight + tl.exp(sink - higher)
            sums = sums * own_weight[:, None]
            high = higher
    for start in range(begin, stop, PLACES):
        place = start + tl.arange(0, PLACES)
        is_place = place < stop
        block = tl.load(tables_ptr + token * table_stride + place // BLOCK_SIZE, mask=is_place, other=0)
        base = (block * BLOCK_SIZE + place % BLOCK_SIZE) * (KV_HEADS * SIZE) + kv_head * SIZE
        k_mask = is_place[:, None] & is_half[None, :]
        old_k1 = tl.load(keys_ptr + base[:, None] + first_d[None, :], mask=k_mask, other=0.0).to(compute_type)
        old_k2 = tl.load(keys_ptr + base[:, None] + second_d[None, :], mask=k_mask, other=0.0).to(compute_type)
        v_mask = is_place[:, None] & is_dimension[None, :]
        old_v = tl.load(values_ptr + base[:, None] + dimension[None, :], mask=v_mask, other=0.0).to(compute_type)
        is_seen = is_place
        if WINDOW > 0:
            is_seen = is_seen & (position - place < WINDOW)
        if CHUNK > 0:
            is_seen = is_seen & (place >= position // CHUNK * CHUNK)
        scores = tl.dot(q1, tl.trans(old_k1), input_precision="ieee")
        scores = tl.dot(q2, tl.trans(old_k2), scores, input_precision="ieee") * scale
        scores = adjusted(
            scores, alibi_ptr, alibi_stride, head[:, None], place[None, :], is_row[:, None] & is_place[None, :],
            1.0, SOFTCAP, HAS_ALIBI,
        )  # fmt: skip
        scores = tl.where(is_seen[None, :], scores, -1.0e30)
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.where(is_seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(compute_type), old_v, input_precision="ieee")
        high = higher
    kept = (token.to(tl.int64) * HEADS + head) * SPLITS + split
    at = kept[:, None] * SIZE + dimension[None, :]
    mask = is_row[:, None] & is_dimension[None, :]
    out_at = out_ptr + (token.to(tl.int64) * HEADS + head)[:, None] * SIZE + dimension[None, :]
    if SPLITS == 1:
        tl.store(out_at, (sums / total[:, None]).to(dtype), mask=mask)
    else:
        num_used = tl.maximum(tl.cdiv(position - first_place, tl.maximum(share, 1)), 1)  # splits that have places
        if num_used == 1:
            if split == 0:
                tl.store(out_at, (sums / total[:, None]).to(dtype), mask=mask)
        elif split < num_used:
            tl.store(highs_ptr + kept, high, mask=is_row)
            tl.store(totals_ptr + kept, total, mask=is_row)
            tl.store(sums_ptr + at, sums, mask=mask)
            tl.debug_barrier()
            counter = counters_ptr + kv_head * counter_stride + token
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_used - 1:
                merge(
                    sums_ptr, highs_ptr, totals_ptr, out_ptr, token.to(tl.int64) * HEADS + kv_head * group, num_used,
                    group, GROUP_PADDED, SIZE, PADDED, SPLITS, MERGED,
                )  # fmt: skip


def attend_new_tokens(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    tables_TB: Tensor,
    num_heads: int,
    heads: HeadParts,
    scores: ScoreParts,
    scale: float,
    window: int,
    dtype: torch.dtype,
    counters_GT: Tensor,
    adapters: ProjectionAdapters | None = None,
) -> Tensor:
    """The outputs [T, H, D] of projections [T, (H+2G)·D], or of their parts [S, T, (H+2G)·D]; a window of 0 means none.

    Outputs have the type `dtype`. Keys and values are written to their slots of [P, K, G, D], in the type of the
    cache. `counters_GT` are zeros, which are used up; there may be more than T.
    """
    num_tokens, (kv_heads, size) = len(positions_T), keys.shape[2:]
    if adapters is None and decode_attention_kernel.is_supported(keys, num_heads, num_tokens, heads, scores, dtype):
        assert heads.tables is not None
        inputs = qkv, keys, values, positions_T, slots_T, tables_TB
        found = decode_attention_kernel.attend(*inputs, num_heads, heads.tables, scale, window)
        if found is not None:
            return found
    splits = num_splits(num_tokens, kv_heads)
    group = num_heads // kv_heads
    places, warps, stages = attention_shape(num_tokens * kv_heads * splits, size)
    out = torch.empty((num_tokens, num_heads, size), dtype=dtype, device=keys.device)
    sums = highs = totals = None
    if splits > 1:
        sums = torch.empty((num_tokens, num_heads, splits, size), dtype=torch.float32, device=keys.device)
        highs, totals = torch.empty((2, num_tokens, num_heads, splits), dtype=torch.float32, device=keys.device)
    padded = max(16, triton.next_power_of_2(size))
    group_padded = triton.next_power_of_2(group)
    launch: Any = rotate_and_attend
    launch[(num_tokens, kv_heads, splits)](
        qkv, keys, values, positions_T, slots_T, tables_TB, *heads.tensors, scores.sinks, scores.alibi,
        *(adapters or (None, None, None)), out, sums, highs, totals, counters_GT,
        scale, heads.epsilon, num_tokens, tables_TB.stride(0), counters_GT.stride(0), scores.alibi_stride,
        WINDOW=window, HEADS=num_heads, KV_HEADS=kv_heads, SIZE=size, HALF_PADDED=max(16, padded // 2), PADDED=padded,
        BLOCK_SIZE=keys.shape[1], SPLITS=splits, ROWS=max(MIN_ROWS, triton.next_power_of_2(group)), PLACES=places,
        PARTS=qkv.shape[0] if qkv.dim() == 3 else 1, **heads.options(size), **scores.options,
        GROUP_PADDED=group_padded, MERGED=max(1, min(splits, MERGED_ROWS // group_padded)),
        RANK=0 if adapters is None else adapters.b_LRN.shape[1],
        **overlap_options(num_tokens, MAX_ROWS), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def attention_shape(num_programs: int, size: int) -> tuple[int, int, int]:
    """Places that a program reads at a time, warps and pipeline stages: the best of those measured."""
    places, warps = (32, 1) if num_programs >= MANY_PROGRAMS else (64, 2)
    return places, WIDE_WARPS if size > NARROW_SIZE else warps, 2
