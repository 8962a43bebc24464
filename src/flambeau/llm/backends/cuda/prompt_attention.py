"""Attention of prompts in Triton: a program has a tile of a sequence's tokens; its plain version is PagedAttention.

Places that all tokens of a tile attend to need no mask: they are most of them, and take one loop; the rest another.

Shapes: T tokens of the step · S sequences · B blocks of the longest · P blocks · K tokens of a block · M tiles ·
H heads · G key-value heads · D head size
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.attention import ScoreParts, adjusted, compute_type_of

LOG2_E = tl.constexpr(math.log2(math.e))

# Rows of a tile (its tokens times the heads that share keys and values), places that a program reads at a time, warps
# and pipeline stages: the best of those measured.
SHAPE = 64, 64, 4, 3
WIDE_SHAPE = 64, 32, 4, 2  # the same in float32
# Larger heads need more registers and shared memory; nobody has measured these.
MAX_SIZE = 128
LARGE_SHAPE = 64, 32, 8, 2
WIDE_LARGE_SHAPE = 64, 16, 8, 2
MAX_SHARED = 64  # heads that may share keys and values: a tile has at least a token


@triton.jit(do_not_specialize=["table_stride", "num_tiles", "alibi_stride"])  # type: ignore[untyped-decorator]
def attend_tile(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, values_ptr, tables_ptr, positions_ptr, tiles_ptr, sinks_ptr, alibi_ptr, out_ptr,
    scale, q_stride, table_stride, num_tiles, alibi_stride,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """The heads of one key-value head of a tile, which holds the sequence, its first token and the end of its tokens.

    Scores are in powers of two: `scale` includes the logarithm.
    """
    tile, kv_head = tiles_ptr + 3 * (num_tiles - 1 - tl.program_id(1)), tl.program_id(0)  # the longest start first
    group: tl.constexpr = HEADS // KV_HEADS
    row, dimension = tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_dimension = dimension < SIZE
    table_ptr = tables_ptr + tl.load(tile) * table_stride
    token = tl.load(tile + 1).to(tl.int32) + row // group
    is_row = (token < tl.load(tile + 2)) & (row < ROWS // group * group)
    head = kv_head * group + row % group
    position = tl.load(positions_ptr + token, mask=is_row, other=-1).to(tl.int32)
    end = tl.max(position) + 1
    earliest = tl.min(tl.where(is_row, position, end))
    start = end * 0
    shared_end = tl.minimum(earliest + 1, end) // PLACES * PLACES  # all tokens attend to the places before
    if WINDOW > 0:
        start = tl.maximum(earliest + 1 - WINDOW, 0) // PLACES * PLACES
        shared_end = start
    if CHUNK > 0:
        start = tl.minimum(earliest, end) // CHUNK * CHUNK // PLACES * PLACES
        shared_end = start

    q_at = q_ptr + token.to(tl.int64)[:, None] * q_stride + head[:, None] * SIZE + dimension[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & is_dimension[None, :], other=0.0)
    q = q.to(compute_type_of(keys_ptr.dtype.element_ty, q.dtype))
    high = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        high = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    each = tl.arange(0, PLACES)
    head_at = kv_head * SIZE + dimension
    # Blocks are looked up an iteration ahead, so that the pipeline need not wait for them.
    block = tl.load(table_ptr + (start + each) // BLOCK_SIZE, mask=start < shared_end, other=0)
    for first in range(start, shared_end, PLACES):
        place = first + each
        slot = block * BLOCK_SIZE + place % BLOCK_SIZE
        block = tl.load(table_ptr + (place + PLACES) // BLOCK_SIZE, mask=place + PLACES < shared_end, other=0)
        at = slot[:, None] * (KV_HEADS * SIZE) + head_at[None, :]
        if SIZE == PADDED:
            k = tl.load(keys_ptr + at).to(q.dtype)
            v = tl.load(values_ptr + at).to(q.dtype)
        else:
            k = tl.load(keys_ptr + at, mask=is_dimension[None, :], other=0.0).to(q.dtype)
            v = tl.load(values_ptr + at, mask=is_dimension[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = adjusted(
            scores, alibi_ptr, alibi_stride, head[:, None], place[None, :], is_row[:, None], LOG2_E, SOFTCAP, HAS_ALIBI
        )  # fmt: skip
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        high = higher
    for first in range(shared_end, end, PLACES):
        place = first + each
        is_place = place < end
        block = tl.load(table_ptr + place // BLOCK_SIZE, mask=is_place, other=0)
        slot = block * BLOCK_SIZE + place % BLOCK_SIZE
        at = slot[:, None] * (KV_HEADS * SIZE) + head_at[None, :]
        mask = is_place[:, None] & is_dimension[None, :]
        k = tl.load(keys_ptr + at, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(values_ptr + at, mask=mask, other=0.0).to(q.dtype)
        behind = position[:, None] - place[None, :]
        is_seen = behind >= 0
        if WINDOW > 0:
            is_seen = is_seen & (behind < WINDOW)
        if CHUNK > 0:
            is_seen = is_seen & (place[None, :] >= (position // CHUNK * CHUNK)[:, None])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = adjusted(
            scores, alibi_ptr, alibi_stride, head[:, None], place[None, :], is_seen & is_row[:, None],
            LOG2_E, SOFTCAP, HAS_ALIBI,
        )  # fmt: skip
        scores = tl.where(is_seen, scores, -1.0e30)
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.where(is_seen, tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        high = higher
    y = sums / tl.maximum(total, 1.0)[:, None]  # the largest weight is 1; padding rows have a total of 0
    out_at = out_ptr + (token.to(tl.int64) * HEADS + head)[:, None] * SIZE + dimension[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_dimension[None, :])


def attend_prompts(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    tables_SB: Tensor,
    tiles_M3: Tensor,
    scale: float,
    window: int,
    scores: ScoreParts | None = None,
) -> Tensor:
    """Attention [T, H, D] of the tokens in tiles over their sequences' keys and values [P, K, G, D].

    A window of 0 means none. Tokens that belong to no tile have any output.
    """
    rows, places, warps, stages = shape_of(q_THD.dtype, q_THD.shape[2])
    scores = scores or ScoreParts()
    q = q_THD if q_THD.stride(2) == 1 and q_THD.stride(1) == q_THD.shape[2] else q_THD.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    size, kv_heads = q.shape[2], keys.shape[2]
    launch: Any = attend_tile
    launch[(kv_heads, len(tiles_M3))](
        q, keys, values, tables_SB, positions_T, tiles_M3, scores.sinks, scores.alibi, out,
        scale * math.log2(math.e), q.stride(0), tables_SB.stride(0), len(tiles_M3), scores.alibi_stride,
        WINDOW=window, HEADS=q.shape[1], KV_HEADS=kv_heads, SIZE=size, PADDED=max(16, triton.next_power_of_2(size)),
        BLOCK_SIZE=keys.shape[1], ROWS=rows, PLACES=places, **scores.options,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def shape_of(dtype: torch.dtype, head_size: int) -> tuple[int, int, int, int]:
    """The shape of a program for queries of this type; all have the same number of rows."""
    if head_size > MAX_SIZE:
        return LARGE_SHAPE if dtype.itemsize == 2 else WIDE_LARGE_SHAPE
    return SHAPE if dtype.itemsize == 2 else WIDE_SHAPE


def make_tiles(query_starts: Tensor, size: int) -> Tensor:
    """Tiles [M, 3] of up to `size` tokens: the sequence, its first token and the end of its tokens."""
    starts = query_starts.tolist()
    tiles = [
        (sequence, first, min(first + size, end))
        for sequence, (start, end) in enumerate(itertools.pairwise(starts))
        for first in range(start, end, size)
    ]
    return torch.tensor(tiles, dtype=torch.int64)
