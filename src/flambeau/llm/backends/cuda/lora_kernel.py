"""Adapters of linear layers in Triton: x times A, then times B, added to the outputs of the rows that have them.

A program computes some rows for one slot, and ends at once if none of them has its adapter: the grid depends on nothing
but the number of rows, so that a step can be captured. The inputs are split among several programs; the second kernel
adds up their sums, always in the same order.

Shapes: T rows · L slots · N outputs · K inputs · X ranks of all segments of a layer · R of one of them · S parts
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.lora_slots import LayerSlots

ROWS = 16  # the fewest of a product on tensor cores
RANKS = 16
BLOCK = 128
MAX_PARTS = 8


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def shrink_rows(  # type: ignore[no-untyped-def]
    x_ptr, a_ptr, places_ptr, inner_ptr, T,
    X: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One part of x times A, for some ranks."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1) % PARTS
    x_ranks = tl.program_id(1) // PARTS * RANKS + tl.arange(0, RANKS)
    slot = tl.program_id(2)
    is_own = tl.load(places_ptr + t, mask=t < T, other=0) == slot + 1
    if tl.max(is_own.to(tl.int32), 0) > 0:
        k = tl.arange(0, BLOCK)
        rows = x_ptr + t[:, None].to(tl.int64) * K
        matrix = a_ptr + (slot * X + x_ranks[:, None]).to(tl.int64) * K
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        for start in tl.range(0, SHARE, BLOCK):
            place = part * SHARE + start + k
            x = tl.load(rows + place[None, :], mask=is_own[:, None] & (place < K)[None, :], other=0.0)
            a = tl.load(matrix + place[None, :], mask=(x_ranks < X)[:, None] & (place < K)[None, :], other=0.0)
            sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
        at = inner_ptr + (part * T + t[:, None]).to(tl.int64) * X + x_ranks[None, :]
        tl.store(at, sums, mask=is_own[:, None] & (x_ranks < X)[None, :])


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def expand_rows(  # type: ignore[no-untyped-def]
    inner_ptr, b_ptr, places_ptr, y_ptr, T,
    N: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the product with B to some outputs, all of one segment; SECOND and THIRD are where the others begin."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    slot = tl.program_id(2)
    is_own = tl.load(places_ptr + t, mask=t < T, other=0) == slot + 1
    if tl.max(is_own.to(tl.int32), 0) > 0:
        segment = (first >= SECOND).to(tl.int32) + (first >= THIRD).to(tl.int32)
        r = tl.arange(0, R)
        inner = tl.zeros([ROWS, R], tl.float32)
        for part in tl.static_range(PARTS):
            at = inner_ptr + (part * T + t[:, None]).to(tl.int64) * X + segment * R + r[None, :]
            inner += tl.load(at, mask=is_own[:, None], other=0.0)
        matrix = b_ptr + (slot * N + n[:, None]).to(tl.int64) * R + r[None, :]
        b = tl.load(matrix, mask=(n < N)[:, None], other=0.0)
        added = tl.dot(inner.to(b.dtype), tl.trans(b), input_precision="ieee")
        y_at = y_ptr + t[:, None].to(tl.int64) * N + n[None, :]
        mask = is_own[:, None] & (n < N)[None, :]
        y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + added
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def add_lora(y: Tensor, x_TK: Tensor, places_T: Tensor, layer: LayerSlots) -> None:
    """Add the adapters of the rows to outputs [T, N], or to the first of the parts [S, T, N] of their sums."""
    num_rows, size = x_TK.shape
    y_TN = y[0] if y.dim() == 3 else y
    shape, num_slots, ranks = layer.shape, len(layer.a_LXI), layer.a_LXI.shape[1]
    parts = min(MAX_PARTS, triton.cdiv(size, BLOCK))
    inner_STX = torch.empty(parts, num_rows, ranks, device=x_TK.device)
    tiles, share = triton.cdiv(num_rows, ROWS), triton.cdiv(size, parts * BLOCK) * BLOCK
    shrink: Any = shrink_rows
    shrink[(tiles, triton.cdiv(ranks, RANKS) * parts, num_slots)](
        x_TK, layer.a_LXI, places_T, inner_STX, num_rows,
        X=ranks, K=size, ROWS=ROWS, RANKS=RANKS, BLOCK=BLOCK, SHARE=share, PARTS=parts, num_warps=4, num_stages=3,
    )  # fmt: skip
    second, third = (*shape.starts[1:], shape.outputs, shape.outputs)[:2]
    expand: Any = expand_rows
    expand[(tiles, triton.cdiv(shape.outputs, shape.columns), num_slots)](
        inner_STX, layer.b_LOR, places_T, y_TN, num_rows,
        N=shape.outputs, X=ranks, R=layer.rank, SECOND=second, THIRD=third,
        ROWS=ROWS, COLUMNS=shape.columns, PARTS=parts, num_warps=4,
    )  # fmt: skip
