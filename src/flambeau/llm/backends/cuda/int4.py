"""Linear layers with 4-bit weights for a few rows, in Triton: as linear.py, except for how weights are read.

A byte has the weights of two inputs that are half a group apart. Each half of the bytes is multiplied with its own half
of the inputs, so nothing has to be reordered.

Shapes: T rows · N outputs · K inputs · S parts of a sum
"""

from __future__ import annotations

import triton
import triton.language as tl

from flambeau.llm.backends.cuda.dequantize import widen_pairs
from flambeau.llm.backends.cuda.launch import activated, store_one_row, store_rows, wait_for_previous


@triton.jit  # type: ignore[untyped-decorator]
def group_sums(  # type: ignore[no-untyped-def]
    pairs, scales, minimums, first, second, EACH: tl.constexpr, GROUPS: tl.constexpr, HALF_GROUP: tl.constexpr
):  # fmt: skip
    """The contribution of each group to each output [EACH, GROUPS]; levels are multiplied before they are scaled."""
    levels = (pairs >> 4).to(tl.float32) * first[None, :] + (pairs & 15).to(tl.float32) * second[None, :]
    sums = tl.sum(tl.reshape(levels, [EACH, GROUPS, HALF_GROUP]), 2)
    inputs = tl.sum(tl.reshape(first + second, [GROUPS, HALF_GROUP]), 1)
    return sums * scales.to(tl.float32) + minimums.to(tl.float32) * inputs[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def multiply_one_row_int4(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, bias_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    GATES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row; in a gated layer each is the product of two that are N rows apart."""
    groups: tl.constexpr = BLOCK // GROUP
    half_group: tl.constexpr = GROUP // 2
    half: tl.constexpr = BLOCK // 2
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    j = tl.arange(0, half)
    g = tl.arange(0, groups)
    rows = weight_ptr + n[:, None].to(tl.int64) * (K // 2)
    scale_rows = n[:, None] * (K // GROUP)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([EACH, groups], tl.float32)
    other_sums = tl.zeros([EACH, groups], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        pair = start // 2 + j
        group = start // GROUP + g
        is_pair = is_output[:, None] & (pair < K // 2)[None, :]
        is_group = is_output[:, None] & (group < K // GROUP)[None, :]
        pairs = tl.load(rows + pair[None, :], mask=is_pair, other=0, eviction_policy="evict_first")
        scales = tl.load(scales_ptr + scale_rows + group[None, :], mask=is_group, other=0.0)
        minimums = tl.load(minimums_ptr + scale_rows + group[None, :], mask=is_group, other=0.0)
        place = pair // half_group * GROUP + pair % half_group
        first = tl.load(x_ptr + place, mask=pair < K // 2, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + place + half_group, mask=pair < K // 2, other=0.0).to(tl.float32)
        sums += group_sums(pairs, scales, minimums, first, second, EACH, groups, half_group)
        if GATES:
            pairs = tl.load(rows + N * (K // 2) + pair[None, :], mask=is_pair, other=0, eviction_policy="evict_first")
            others = scale_rows + N * (K // GROUP) + group[None, :]
            scales = tl.load(scales_ptr + others, mask=is_group, other=0.0)
            minimums = tl.load(minimums_ptr + others, mask=is_group, other=0.0)
            other_sums += group_sums(pairs, scales, minimums, first, second, EACH, groups, half_group)
    y = tl.sum(sums, 1)
    other = tl.sum(other_sums, 1)
    store_one_row(y, other, bias_ptr, y_ptr, n, is_output, N, GATES, HAS_BIAS, ACTIVATION)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def multiply_rows_int4(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scales_ptr, minimums_ptr, bias_ptr, y_ptr, T,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr, FAST: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, or one part of their sums, a few groups at a time."""
    half_group: tl.constexpr = GROUP // 2
    num_groups: tl.constexpr = K // GROUP
    half: tl.constexpr = GROUPS * half_group
    share: tl.constexpr = (num_groups + PARTS * GROUPS - 1) // (PARTS * GROUPS) * GROUPS
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    t = tl.arange(0, ROWS)
    g = tl.arange(0, GROUPS)
    j = tl.arange(0, half_group)
    k = tl.arange(0, half)
    is_row, is_column = t < T, n < N
    pairs_at = n[:, None, None].to(tl.int64) * (K // 2) + g[None, :, None] * half_group + j[None, None, :]
    scales_at = n[:, None] * num_groups + g[None, :]
    inputs = x_ptr + t[:, None] * K + (k // half_group * GROUP + k % half_group)[None, :]
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([COLUMNS, ROWS] if WEIGHTS_FIRST else [ROWS, COLUMNS], tl.float32)
    for start in tl.range(part * share, part * share + share, GROUPS):
        is_input = is_row[:, None] & (start + k // half_group < num_groups)[None, :]
        x = tl.load(inputs + start * GROUP, mask=is_input, other=0.0)
        other_x = tl.load(inputs + start * GROUP + half_group, mask=is_input, other=0.0)
        is_group = is_column[:, None] & (start + g < num_groups)[None, :]
        pairs = tl.load(
            weight_ptr + pairs_at + start * half_group,
            mask=is_group[:, :, None],
            other=0,
            eviction_policy="evict_first",
        )
        scales = tl.load(scales_ptr + scales_at + start, mask=is_group, other=0.0)[:, :, None]
        minimums = tl.load(minimums_ptr + scales_at + start, mask=is_group, other=0.0)[:, :, None]
        first, second = widen_pairs(pairs, scales, minimums, x.dtype, FAST)
        first, second = tl.reshape(first, [COLUMNS, half]), tl.reshape(second, [COLUMNS, half])
        if WEIGHTS_FIRST:
            sums = tl.dot(first, tl.trans(x), sums, input_precision="ieee")
            sums = tl.dot(second, tl.trans(other_x), sums, input_precision="ieee")
        else:
            sums = tl.dot(x, tl.trans(first), sums, input_precision="ieee")
            sums = tl.dot(other_x, tl.trans(second), sums, input_precision="ieee")
    if WEIGHTS_FIRST:
        sums = tl.trans(sums)
    store_rows(sums, sums, bias_ptr, y_ptr, n, t, part, T, N, False, HAS_BIAS, "")


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def gate_rows(  # type: ignore[no-untyped-def]
    y_ptr, gated_ptr, T,
    N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Activate parts of the sums of a row: [S, T, 2N] to products of two that are N apart, or [S, T, N]."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    other = tl.zeros([BLOCK], tl.float32)
    outputs: tl.constexpr = 2 * N if GATES else N
    for part in tl.static_range(PARTS):
        at = (part * T + row) * outputs + n
        y += tl.load(y_ptr + at, mask=n < N, other=0.0)
        if GATES:
            other += tl.load(y_ptr + at + N, mask=n < N, other=0.0)
    gated = activated(y, ACTIVATION)
    if GATES:
        gated = gated * other
    tl.store(gated_ptr + row * N + n, gated.to(gated_ptr.dtype.element_ty), mask=n < N)
