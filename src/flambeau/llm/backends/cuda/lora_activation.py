"""The activation of a layer with adapters: its sums with the product with B, and the product with the next layer's A.

A program computes some rows of one slot by tensor cores, as in lora_kernel.py.

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
from flambeau.llm.backends.cuda.lora_kernel import inner_sums, load_ranks, rows_of
from flambeau.llm.backends.cuda.lora_slots import LayerSlots

GATED_SEGMENTS = 2  # of a fused layer: gates, and what they gate


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
    width, columns, rows = layer.shape.outputs // (2 if gates else 1), layer.shape.columns, rows_of(num_rows)
    num_columns = triton.cdiv(width, columns)
    active_TN = torch.empty(num_rows, width, dtype=dtype, device=y.device)
    inner = None if down is None else torch.empty(num_columns, num_rows, down.rank, device=y.device)
    launch: Any = activate_rows
    launch[(triton.cdiv(num_rows, rows), num_columns, 1 + len(layer.b_LRO))](
        inner_PTX, layer.b_LRO, places_T, y, active_TN, None if down is None else down.a_LXI, inner, num_rows,
        N=width, R=layer.rank, ROWS=rows, COLUMNS=columns, PARTS=parts, SUMS=y.shape[0] if y.dim() == 3 else 1,
        GATES=gates, ACTIVATION=activation, DOWN_RANK=0 if down is None else down.rank,
        **overlap_options(num_rows, MAX_ROWS), num_warps=4,
    )  # fmt: skip
    return active_TN, inner
