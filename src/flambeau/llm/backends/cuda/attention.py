"""Paged attention of a few tokens of each sequence in Triton; its plain version is eager.PagedAttention.

A program has the tokens of a sequence and keeps a running softmax over the places they attend to. These places are
split among several programs, because a GPU has many more processors than there are sequences and heads; a second kernel
merges the splits. The number of splits is fixed, so one CUDA graph serves any length.

Shapes: T tokens of the step · S sequences · B blocks of the longest · P blocks · K tokens of a block · H heads ·
G key-value heads · D head size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous
from flambeau.llm.backends.eager import PagedAttention
from flambeau.llm.executor.kv_cache import store
from flambeau.llm.models.attention import AttentionOptions

PROGRAMS = 256  # about two for each of the 132 multiprocessors of an H200
MAX_SPLITS = 32
MIN_ROWS = 16  # of a matrix product
SHAPE = 64, 4, 3  # places that a program reads at a time, warps and pipeline stages: the best of those measured
# For heads of more than 256 numbers (Gemma 4), not measured: what fits into registers and shared memory of 227 KB.
WIDE_SHAPE = 32, 8, 2
MAX_SIZE = 256  # of the heads of the first shape


@triton.constexpr_function
def compute_type_of(cached, dtype):  # type: ignore[no-untyped-def]
    """The type that attention multiplies: 8 bits become float16 by one instruction, bfloat16 by several."""
    return tl.float16 if cached == tl.float8e4nv and dtype == tl.bfloat16 else dtype


@triton.jit  # type: ignore[untyped-decorator]
def capped(scores, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """CAP · tanh(scores / CAP)."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp(scores * (2.0 / CAP)))


@triton.jit  # type: ignore[untyped-decorator]
def adjusted(  # type: ignore[no-untyped-def]
    scores, alibi_ptr, alibi_stride, head, place, mask, UNIT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """Scores with a soft cap, and with what is added for each head and place; UNIT is that of the scores."""
    if SOFTCAP > 0:
        scores = capped(scores, SOFTCAP * UNIT)
    if HAS_ALIBI:
        scores += tl.load(alibi_ptr + head * alibi_stride + place, mask=mask, other=0.0) * UNIT
    return scores


@triton.jit(do_not_specialize=["table_stride", "alibi_stride"])  # type: ignore[untyped-decorator]
def split_kv_attention(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, values_ptr, tables_ptr, positions_ptr, sinks_ptr, alibi_ptr, out_ptr, sums_ptr, highs_ptr,
    totals_ptr, scale, q_stride, table_stride, alibi_stride,
    WINDOW: tl.constexpr, QUERY_LEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One split of the places that a sequence's QUERY_LEN tokens attend to, for the heads of one key-value head."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    token = sequence * QUERY_LEN + row // group
    is_row = row < QUERY_LEN * group
    head = kv_head * group + row % group
    dimension = tl.arange(0, PADDED)
    is_dimension = dimension < SIZE
    position = tl.load(positions_ptr + token, mask=is_row, other=-1)
    end = tl.max(position) + 1
    first = end * 0
    if WINDOW > 0:  # the start of the earliest token's window
        earliest = tl.min(tl.where(is_row, position, end))
        first = tl.maximum(earliest + 1 - WINDOW, 0) // PLACES * PLACES
    if CHUNK > 0:
        earliest = tl.min(tl.where(is_row, position, end))
        first = earliest // CHUNK * CHUNK // PLACES * PLACES
    share = tl.cdiv(tl.cdiv(end - first, SPLITS), PLACES) * PLACES
    begin = first + split * share
    stop = tl.minimum(begin + share, end)
    wait_for_previous(OVERLAPS)

    q_at = q_ptr + token[:, None] * q_stride + head[:, None] * SIZE + dimension[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & is_dimension[None, :], other=0.0)
    q = q.to(compute_type_of(keys_ptr.dtype.element_ty, q.dtype))
    high = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # the first split has them
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        high = tl.where(split == 0, sink, high)
        total = tl.where(split == 0, 1.0, total)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(begin, stop, PLACES):
        place = start + tl.arange(0, PLACES)
        is_place = place < stop
        block = tl.load(tables_ptr + sequence * table_stride + place // BLOCK_SIZE, mask=is_place, other=0)
        slot = block * BLOCK_SIZE + place % BLOCK_SIZE
        at = slot[:, None] * (KV_HEADS * SIZE) + kv_head * SIZE + dimension[None, :]
        mask = is_place[:, None] & is_dimension[None, :]
        k = tl.load(keys_ptr + at, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(values_ptr + at, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        behind = position[:, None] - place[None, :]
        is_seen = (behind >= 0) & is_place[None, :]
        scores = adjusted(
            scores, alibi_ptr, alibi_stride, head[:, None], place[None, :], is_seen & is_row[:, None],
            1.0, SOFTCAP, HAS_ALIBI,
        )  # fmt: skip
        if WINDOW > 0:
            is_seen = is_seen & (behind < WINDOW)
        if CHUNK > 0:
            is_seen = is_seen & (place[None, :] >= (position // CHUNK * CHUNK)[:, None])
        scores = tl.where(is_seen, scores, -1.0e30)
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.where(is_seen, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        high = higher
    kept = (token.to(tl.int64) * HEADS + head) * SPLITS + split
    at = kept[:, None] * SIZE + dimension[None, :]
    mask = is_row[:, None] & is_dimension[None, :]
    if SPLITS == 1:
        y = sums / tl.maximum(total, 1.0)[:, None]  # the largest weight is 1; padding rows have a total of 0
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(highs_ptr + kept, high, mask=is_row)
        tl.store(totals_ptr + kept, total, mask=is_row)
        tl.store(sums_ptr + at, sums, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def merge_splits(  # type: ignore[no-untyped-def]
    sums_ptr, highs_ptr, totals_ptr, out_ptr, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one token and head."""
    row = tl.program_id(0).to(tl.int64)
    split, dimension = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    is_dimension = dimension < SIZE
    wait_for_previous(OVERLAPS)
    high = tl.load(highs_ptr + row * SPLITS + split)
    weight = tl.exp(high - tl.max(high, 0))
    total = tl.sum(tl.load(totals_ptr + row * SPLITS + split) * weight, 0)
    at = (row * SPLITS + split[:, None]) * SIZE + dimension[None, :]
    sums = tl.load(sums_ptr + at, mask=is_dimension[None, :], other=0.0)
    y = tl.sum(sums * weight[:, None], 0) / total
    tl.store(out_ptr + row * SIZE + dimension, y.to(out_ptr.dtype.element_ty), mask=is_dimension)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreParts:
    """What happens to scores before the softmax, beside the scale and the window."""

    softcap: float = 0.0  # 0: none
    chunk: int = 0  # tokens attend to those of their own chunk only, so many at a time; 0: there are no chunks
    sinks: Tensor | None = None  # [H]
    alibi: Tensor | None = None  # [H, places]: what is added

    @property
    def alibi_stride(self) -> int:
        return 0 if self.alibi is None else self.alibi.stride(0)

    @property
    def are_plain(self) -> bool:
        """Whether nothing happens to them."""
        return not self.softcap and not self.chunk and self.sinks is None and self.alibi is None

    @property
    def options(self) -> dict[str, float | bool]:
        """What the kernels are compiled for."""
        has = {"HAS_SINKS": self.sinks is not None, "HAS_ALIBI": self.alibi is not None}
        return {"CHUNK": self.chunk, "SOFTCAP": self.softcap, **has}


def num_splits(num_sequences: int, num_kv_heads: int) -> int:
    """How many splits a sequence gets: a power of two that fills the GPU."""
    wanted = max(1, PROGRAMS // (num_sequences * num_kv_heads))
    return min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def attend_uniform(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    tables_SB: Tensor,
    query_len: int,
    scale: float,
    window: int,
    scores: ScoreParts | None = None,
) -> Tensor:
    """Attention of `query_len` tokens of each sequence over its keys and values [P, K, G, D]; window 0: none."""
    scores = scores or ScoreParts()
    q = q_THD if q_THD.stride(2) == 1 and q_THD.stride(1) == q_THD.shape[2] else q_THD.contiguous()
    num_tokens, heads, size = q.shape
    kv_heads, padded = keys.shape[2], max(16, triton.next_power_of_2(size))
    places, warps, stages = SHAPE if padded <= MAX_SIZE else WIDE_SHAPE
    rows, splits = (
        max(MIN_ROWS, triton.next_power_of_2(query_len * heads // kv_heads)),
        num_splits(len(tables_SB), kv_heads),
    )
    out = torch.empty((num_tokens, heads, size), dtype=q.dtype, device=q.device)
    sums = highs = totals = None
    if splits > 1:
        sums = torch.empty((num_tokens, heads, splits, size), dtype=torch.float32, device=q.device)
        highs, totals = torch.empty((2, num_tokens, heads, splits), dtype=torch.float32, device=q.device)
    launch: Any = split_kv_attention
    launch[(len(tables_SB), kv_heads, splits)](
        q, keys, values, tables_SB, positions_T, scores.sinks, scores.alibi, out, sums, highs, totals,
        scale, q.stride(0), tables_SB.stride(0), scores.alibi_stride,
        WINDOW=window, QUERY_LEN=query_len, HEADS=heads, KV_HEADS=kv_heads, SIZE=size, PADDED=padded,
        BLOCK_SIZE=keys.shape[1], SPLITS=splits, ROWS=rows, PLACES=places, **scores.options,
        **overlap_options(num_tokens), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        launch = merge_splits
        launch[(num_tokens * heads,)](
            sums, highs, totals, out, SIZE=size, PADDED=padded, SPLITS=splits,
            **overlap_options(num_tokens), num_warps=2,
        )  # fmt: skip
    return out


def cache_kv(slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values to their slots of [P, K, G, D]."""
    store(keys, slots_T, k_TGD)
    store(values, slots_T, v_TGD)


def empty_output(q_THD: Tensor, *others: object) -> Tensor:
    """The output's shape and type, for torch.compile."""
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format)


operators: Any = torch.library.Library("flambeau", "FRAGMENT")  # type: ignore[no-untyped-call]
operators.define(
    "paged_decode(Tensor q, Tensor keys, Tensor values, Tensor positions, Tensor tables, int query_len, float scale, "
    "int window) -> Tensor"
)
operators.impl("paged_decode", attend_uniform, "CUDA")
operators.impl("paged_decode", attend_uniform, "CPU")  # through Triton's interpreter, in tests
operators._register_fake("paged_decode", empty_output)
# An opaque operator: a compiler that benchmarks kernels would write to the cache of running sequences.
operators.define("cache_kv(Tensor slots, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values) -> ()")
operators.impl("cache_kv", cache_kv, "CUDA")
operators.impl("cache_kv", cache_kv, "CPU")
operators._register_fake("cache_kv", lambda *tensors: None)


class TritonAttention(PagedAttention):
    """Attention of decode steps over the blocks of a cache; the keys and values of the step are written first."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q [T, H, D] and k, v [T, G, D] to [T, H, D]."""
        cache, inputs = self._cache, self._inputs
        is_plain = options.softcap is None and options.has_only_softcap and q.shape[2] == v.shape[2]
        if cache.is_latent or not is_plain:  # not known to the kernel
            return super().__call__(layer, q, k, v, options)
        torch.ops.flambeau.cache_kv(inputs.slots_T, k, v, cache.keys[layer], cache.values[layer])
        y: Tensor = torch.ops.flambeau.paged_decode(
            q,
            cache.keys[layer],
            cache.values[layer],
            inputs.positions_T,
            inputs.block_tables_SB,
            inputs.query_len,
            options.scale,
            options.window or 0,
        )
        return y
