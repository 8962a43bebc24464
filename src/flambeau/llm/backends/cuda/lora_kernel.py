"""Adapters of linear layers in Triton: x times A, then times B, added to the outputs of the rows that have them.

A program computes some rows for one slot, and stores nothing if none of them has its adapter: the grid depends on
nothing but the number of rows, so that a step can be captured. The inputs are split among several programs; the second
kernel adds up their sums, always in the same order.

In decode steps the kernels start while the kernel before them ends, and read their matrices before they wait for it.

Shapes: T rows · L slots · N outputs · K inputs · X ranks of all segments of a layer · R of one of them · S parts of a
sum · P parts of the inner sums
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.lora_slots import LayerSlots

MIN_ROWS = 16  # the fewest of a product on tensor cores
WIDE_ROWS = 32  # of a program where there are more
RANKS = 16
BLOCK = 256  # inputs that a program reads at a time
MAX_PARTS = 16


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def shrink_rows(  # type: ignore[no-untyped-def]
    x_ptr, a_ptr, places_ptr, inner_ptr, T,
    X: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One part of x times A, for some ranks."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1) % PARTS
    x_ranks = tl.program_id(1) // PARTS * RANKS + tl.arange(0, RANKS)
    slot = tl.program_id(2)
    is_own = tl.load(places_ptr + t, mask=t < T, other=0) == slot + 1
    is_used = tl.max(is_own.to(tl.int32), 0) > 0
    k = tl.arange(0, BLOCK)
    rows = x_ptr + t[:, None].to(tl.int64) * K
    matrix = a_ptr + (slot * X + x_ranks[:, None]).to(tl.int64) * K
    is_rank = ((x_ranks < X) & is_used)[:, None]
    place = part * SHARE + k
    a = tl.load(matrix + place[None, :], mask=is_rank & (place < K)[None, :], other=0.0)
    wait_for_previous(OVERLAPS)  # also where there is nothing to do: the next kernel waits for this one only
    if is_used:
        x = tl.load(rows + place[None, :], mask=is_own[:, None] & (place < K)[None, :], other=0.0)
        sums = tl.dot(x, tl.trans(a), input_precision="ieee")
        for start in tl.range(BLOCK, SHARE, BLOCK):
            place = part * SHARE + start + k
            x = tl.load(rows + place[None, :], mask=is_own[:, None] & (place < K)[None, :], other=0.0)
            a = tl.load(matrix + place[None, :], mask=is_rank & (place < K)[None, :], other=0.0)
            sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
        at = inner_ptr + (part * T + t[:, None]).to(tl.int64) * X + x_ranks[None, :]
        tl.store(at, sums, mask=is_own[:, None] & (x_ranks < X)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def inner_sums(inner_ptr, t, first, is_own, T, X: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x times A of one segment, whose ranks begin at `first`."""
    at = inner_ptr + t[:, None].to(tl.int64) * X + first + tl.arange(0, R)[None, :]
    inner = tl.load(at, mask=is_own[:, None], other=0.0)
    for part in tl.static_range(1, PARTS):
        inner += tl.load(at + (part * T).to(tl.int64) * X, mask=is_own[:, None], other=0.0)
    return inner


@triton.jit  # type: ignore[untyped-decorator]
def load_ranks(  # type: ignore[no-untyped-def]
    ptr, slot, first, columns, is_column, is_read, RANKS: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Some columns of EACH ranks of a slot's matrix [RANKS, SIZE], from the rank `first` on."""
    rank = first + tl.arange(0, EACH)
    at = ptr + (slot * RANKS + rank[:, None]).to(tl.int64) * SIZE + columns[None, :]
    return tl.load(at, mask=((rank < RANKS) & is_read)[:, None] & is_column[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def sum_of_parts(  # type: ignore[no-untyped-def]
    ptr, row, first, is_read, T, RANKS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Some inner sums of a row, from their parts."""
    part = tl.arange(0, PADDED)
    at = ptr + (part[:, None] * T + row) * RANKS + first + tl.arange(0, EACH)[None, :]
    return tl.sum(tl.load(at, mask=((part < PARTS) & is_read)[:, None], other=0.0), 0)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def expand_rows(  # type: ignore[no-untyped-def]
    inner_ptr, b_ptr, places_ptr, y_ptr, T,
    N: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the product with B to some outputs, all of one segment; SECOND and THIRD are where the others begin."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    slot = tl.program_id(2)
    is_own = tl.load(places_ptr + t, mask=t < T, other=0) == slot + 1
    is_used = tl.max(is_own.to(tl.int32), 0) > 0
    b = load_ranks(b_ptr, slot, 0, n, n < N, is_used, R, N, R)
    wait_for_previous(OVERLAPS)
    if is_used:
        segment = (first >= SECOND).to(tl.int32) + (first >= THIRD).to(tl.int32)
        y_at = y_ptr + t[:, None].to(tl.int64) * N + n[None, :]
        mask = is_own[:, None] & (n < N)[None, :]
        y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        inner = inner_sums(inner_ptr, t, segment * R, is_own, T, X, R, PARTS)
        y += tl.dot(inner.to(b.dtype), b, input_precision="ieee")
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def shrink(x_TK: Tensor, places_T: Tensor, layer: LayerSlots) -> Tensor:
    """Parts [P, T, X] of x times the A of each row; those of rows without an adapter are undefined."""
    num_rows, size = x_TK.shape
    num_slots, ranks = layer.a_LXI.shape[:2]
    parts = min(MAX_PARTS, triton.cdiv(size, BLOCK))
    inner_PTX = torch.empty(parts, num_rows, ranks, device=x_TK.device)
    rows, share = rows_of(num_rows), triton.cdiv(size, parts * BLOCK) * BLOCK
    launch: Any = shrink_rows
    launch[(triton.cdiv(num_rows, rows), triton.cdiv(ranks, RANKS) * parts, num_slots)](
        x_TK, layer.a_LXI, places_T, inner_PTX, num_rows,
        X=ranks, K=size, ROWS=rows, RANKS=RANKS, BLOCK=BLOCK, SHARE=share, PARTS=parts,
        **overlap_options(num_rows, MAX_ROWS), num_warps=4, num_stages=3,
    )  # fmt: skip
    return inner_PTX


def expand(y: Tensor, inner_PTX: Tensor, places_T: Tensor, layer: LayerSlots) -> None:
    """Add the adapters of the rows to outputs [T, N], or to the first of the parts [S, T, N] of their sums."""
    inner_PTX = inner_PTX if len(inner_PTX) <= MAX_PARTS else inner_PTX.sum(0, keepdim=True)
    parts, num_rows, ranks = inner_PTX.shape
    shape, rows = layer.shape, rows_of(num_rows)
    second, third = (*shape.starts[1:], shape.outputs, shape.outputs)[:2]
    launch: Any = expand_rows
    launch[(triton.cdiv(num_rows, rows), triton.cdiv(shape.outputs, shape.columns), len(layer.b_LRO))](
        inner_PTX, layer.b_LRO, places_T, y[0] if y.dim() == 3 else y, num_rows,
        N=shape.outputs, X=ranks, R=layer.rank, SECOND=second, THIRD=third,
        ROWS=rows, COLUMNS=shape.columns, PARTS=parts, **overlap_options(num_rows, MAX_ROWS), num_warps=4,
    )  # fmt: skip


def rows_of(num_rows: int) -> int:
    """The rows of a program."""
    return MIN_ROWS if num_rows <= MIN_ROWS else WIDE_ROWS
