"""The activation of a layer with adapters: its sums with the product with B, and the product with the next layer's A.

For a few rows, each has programs of its own, which read its adapter's matrices. For more rows, which may share
adapters, a program computes some rows of one slot by tensor cores, as in lora_kernel.py.

Shapes: T rows · L slots · N outputs · X ranks of all segments of a layer · R of one of them · S parts of a sum ·
P parts of the inner sums
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, activated, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.lora_kernel import MIN_ROWS, inner_sums, load_ranks, rows_of, sum_of_parts
from flambeau.llm.backends.cuda.lora_slots import LayerSlots

GATED_SEGMENTS = 2  # of a fused layer: gates, and what they gate
ROW_COLUMNS = 256  # of a program for one row
ROW_RANKS = 16  # that it multiplies at a time
# Of adapters that programs for single rows read together; neither this nor the two above were measured.
ROW_BYTES = 16 << 20


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def activate_row(  # type: ignore[no-untyped-def]
    inner_ptr, b_ptr, places_ptr, y_ptr, active_ptr, down_a_ptr, down_inner_ptr, T,
    N: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr, SUMS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr,
    DOWN_RANK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """As `activate_rows`, some outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = n < N
    width: tl.constexpr = 2 * N if GATES else N
    ranks: tl.constexpr = 2 * R if GATES else R
    slot = tl.load(places_ptr + row) - 1
    has_adapter = slot >= 0
    b = load_ranks(b_ptr, slot, 0, n, is_column, has_adapter, R, width, EACH)
    if GATES:
        other_b = load_ranks(b_ptr + N, slot, 0, n, is_column, has_adapter, R, width, EACH)
    if DOWN_RANK > 0:
        down_a = load_ranks(down_a_ptr, slot, 0, n, is_column, has_adapter, DOWN_RANK, N, EACH)
    wait_for_previous(OVERLAPS)
    y = tl.zeros([COLUMNS], tl.float32)
    other = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(SUMS):
        y_at = y_ptr + (part * T + row) * width + n
        y += tl.load(y_at, mask=is_column, other=0.0).to(tl.float32)
        if GATES:
            other += tl.load(y_at + N, mask=is_column, other=0.0).to(tl.float32)
    for first in tl.static_range(0, R, EACH):
        if first > 0:
            b = load_ranks(b_ptr, slot, first, n, is_column, has_adapter, R, width, EACH)
        inner = sum_of_parts(inner_ptr, row, first, has_adapter, T, ranks, PARTS, PARTS_PADDED, EACH)
        y += tl.sum(b.to(tl.float32) * inner[:, None], 0)
        if GATES:
            if first > 0:
                other_b = load_ranks(b_ptr + N, slot, first, n, is_column, has_adapter, R, width, EACH)
            inner = sum_of_parts(inner_ptr, row, R + first, has_adapter, T, ranks, PARTS, PARTS_PADDED, EACH)
            other += tl.sum(other_b.to(tl.float32) * inner[:, None], 0)
    active = activated(y, ACTIVATION)
    if GATES:
        active = active * other
    outputs = active.to(active_ptr.dtype.element_ty)
    tl.store(active_ptr + row * N + n, outputs, mask=is_column)
    if DOWN_RANK > 0:
        outputs = tl.where(is_column & has_adapter, outputs.to(tl.float32), 0.0)
        for first in tl.static_range(0, DOWN_RANK, EACH):
            if first > 0:
                down_a = load_ranks(down_a_ptr, slot, first, n, is_column, has_adapter, DOWN_RANK, N, EACH)
            at = down_inner_ptr + (tl.program_id(1) * T + row) * DOWN_RANK + first + tl.arange(0, EACH)
            tl.store(at, tl.sum(down_a.to(tl.float32) * outputs[None, :], 1), mask=has_adapter)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def activate_rows(  # type: ignore[no-untyped-def]
    inner_ptr, b_ptr, places_ptr, y_ptr, active_ptr, down_a_ptr, down_inner_ptr, T,
    N: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    SUMS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, DOWN_RANK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of a layer with an activation, from parts of its sums, [S, T, 2N] with gates, and products with B.

    With DOWN_RANK, also their part of the product with the A of the layer after it.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.program_id(2) - 1  # -1: the rows without an adapter
    width: tl.constexpr = 2 * N if GATES else N
    ranks: tl.constexpr = 2 * R if GATES else R
    is_own = (tl.load(places_ptr + t, mask=t < T, other=-1) == slot + 1) & (t < T)
    is_used = tl.max(is_own.to(tl.int32), 0) > 0
    has_adapter = slot >= 0
    b = load_ranks(b_ptr, slot, 0, n, n < N, is_used & has_adapter, R, width, R)
    if GATES:
        other_b = load_ranks(b_ptr + N, slot, 0, n, n < N, is_used & has_adapter, R, width, R)
    if DOWN_RANK > 0:
        down_a = load_ranks(down_a_ptr, slot, 0, n, n < N, is_used & has_adapter, DOWN_RANK, N, DOWN_RANK)
    wait_for_previous(OVERLAPS)
    if is_used:
        mask = is_own[:, None] & (n < N)[None, :]
        is_read_row = is_own & has_adapter
        y_at = y_ptr + t[:, None].to(tl.int64) * width + n[None, :]
        y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, SUMS):
            y += tl.load(y_at + (part * T).to(tl.int64) * width, mask=mask, other=0.0).to(tl.float32)
        inner = inner_sums(inner_ptr, t, 0, is_read_row, T, ranks, R, PARTS)
        y += tl.dot(inner.to(b.dtype), b, input_precision="ieee")
        active = activated(y, ACTIVATION)
        if GATES:
            other = tl.load(y_at + N, mask=mask, other=0.0).to(tl.float32)
            for part in tl.static_range(1, SUMS):
                other += tl.load(y_at + N + (part * T).to(tl.int64) * width, mask=mask, other=0.0).to(tl.float32)
            inner = inner_sums(inner_ptr, t, R, is_read_row, T, ranks, R, PARTS)
            active *= other + tl.dot(inner.to(b.dtype), other_b, input_precision="ieee")
        outputs = active.to(active_ptr.dtype.element_ty)
        tl.store(active_ptr + t[:, None].to(tl.int64) * N + n[None, :], outputs, mask=mask)
        if DOWN_RANK > 0:
            part_at = down_inner_ptr + (tl.program_id(1) * T + t[:, None]).to(tl.int64) * DOWN_RANK
            part_at += tl.arange(0, DOWN_RANK)[None, :]
            tl.store(part_at, tl.dot(outputs, tl.trans(down_a), input_precision="ieee"), mask=is_read_row[:, None])


def expand_active(
    y: Tensor,
    inner_PTX: Tensor,
    places_T: Tensor,
    layer: LayerSlots,
    activation: str,
    dtype: torch.dtype,
    down: LayerSlots | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The outputs [T, N] of a layer with an activation, from its sums without adapters, or parts [S, T, N] of them.

    A layer of two segments is gated: it has half as many outputs as sums. With `down`, the second result are parts of
    the outputs times its A.
    """
    parts, num_rows, _ = inner_PTX.shape
    gates = len(layer.shape.starts) == GATED_SEGMENTS
    width, by_row = layer.shape.outputs // (2 if gates else 1), has_programs_of_rows(layer, num_rows)
    columns, rows = ROW_COLUMNS if by_row else layer.shape.columns, rows_of(num_rows)
    num_columns, each = triton.cdiv(width, columns), min(ROW_RANKS, layer.rank)
    active_TN = torch.empty(num_rows, width, dtype=dtype, device=y.device)
    inner = None if down is None else torch.empty(num_columns, num_rows, down.rank, device=y.device)
    tensors = inner_PTX, layer.b_LRO, places_T, y, active_TN, None if down is None else down.a_LXI, inner
    options: dict[str, Any] = {
        "N": width, "R": layer.rank, "COLUMNS": columns, "PARTS": parts, "SUMS": y.shape[0] if y.dim() == 3 else 1,
        "GATES": gates, "ACTIVATION": activation, "DOWN_RANK": 0 if down is None else down.rank,
        **overlap_options(num_rows, MAX_ROWS), "num_warps": 4,
    }  # fmt: skip
    if by_row:
        padded = triton.next_power_of_2(parts)
        activate_row[(num_rows, num_columns)](*tensors, num_rows, EACH=each, PARTS_PADDED=padded, **options)
    else:
        grid = triton.cdiv(num_rows, rows), num_columns, 1 + len(layer.b_LRO)
        activate_rows[grid](*tensors, num_rows, ROWS=rows, **options)
    return active_TN, inner


def has_programs_of_rows(layer: LayerSlots, num_rows: int) -> bool:
    """Whether each row has programs of its own: there are few, and they read not much."""
    row_bytes = layer.b_LRO[0].numel() * layer.b_LRO.itemsize
    return num_rows <= MIN_ROWS and num_rows * row_bytes <= ROW_BYTES
