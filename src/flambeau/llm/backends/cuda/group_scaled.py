"""Linear layers whose weights have a scale for each group of inputs, in Triton: 8-bit numbers, codes and levels.

As linear.py, except for how weights are read and scaled (group_weights.py). Many rows are multiplied by torch's own
products, with a copy of one layer's weights in 16 bits.

Shapes: T rows · N outputs · K inputs · S parts of a sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.code_instructions import Codes, formats
from flambeau.llm.backends.cuda.dequantize import is_fast
from flambeau.llm.backends.cuda.group_weights import (
    add_groups,
    joined_bits,
    load_inputs,
    load_row_inputs,
    load_row_scales,
    load_row_weights,
    load_scales,
    numbers_of,
    sums_of_groups,
    widen_codes,
)
from flambeau.llm.backends.cuda.launch import overlap_options, store_one_row, store_rows, wait_for_previous
from flambeau.llm.backends.cuda.linear import (
    MAX_ROWS,
    MAX_WIDENED_ROWS,
    KernelLinear,
    activate,
    num_parts,
    padded,
    sums_for,
)
from flambeau.llm.quantize.groups import FACTOR_SIZE

MIN_SUM_GROUP = 64  # of inputs whose products are added up before they are scaled
WIDENED_BLOCK = 1024
PART_COLUMNS = 64


@triton.jit  # type: ignore[untyped-decorator]
def multiply_one_row_of_groups(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr, bias_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr,
    GATES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row; in a gated layer each is the product of two that are N rows apart."""
    groups: tl.constexpr = BLOCK // GROUP
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    row = n.to(tl.int64)
    weights = load_row_weights(weight_ptr, more_ptr, row, is_output, 0, K, BLOCK, GROUP, PAIRS, BITS)
    scales, minimums = load_row_scales(
        scale_ptr, minimum_ptr, factor_ptr, row, is_output, 0, K, BLOCK, GROUP, SPAN, HAS_MINIMUMS
    )
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([EACH, groups], tl.float32)
    other_sums = tl.zeros([EACH, groups], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        if start > 0:
            weights = load_row_weights(weight_ptr, more_ptr, row, is_output, start, K, BLOCK, GROUP, PAIRS, BITS)
            scales, minimums = load_row_scales(
                scale_ptr, minimum_ptr, factor_ptr, row, is_output, start, K, BLOCK, GROUP, SPAN, HAS_MINIMUMS
            )
        first, second = load_row_inputs(x_ptr, start, K, BLOCK, GROUP, PAIRS)
        sums += sums_of_groups(
            weights, scales, minimums, first, second, table_ptr,
            EACH, BLOCK, GROUP, PAIRS, BITS, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES,
        )  # fmt: skip
        if GATES:
            weights = load_row_weights(weight_ptr, more_ptr, row + N, is_output, start, K, BLOCK, GROUP, PAIRS, BITS)
            scales, minimums = load_row_scales(
                scale_ptr, minimum_ptr, factor_ptr, row + N, is_output, start, K, BLOCK, GROUP, SPAN, HAS_MINIMUMS
            )
            other_sums += sums_of_groups(
                weights, scales, minimums, first, second, table_ptr,
                EACH, BLOCK, GROUP, PAIRS, BITS, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES,
            )  # fmt: skip
    y = tl.sum(sums, 1)
    other = tl.sum(other_sums, 1)
    store_one_row(y, other, bias_ptr, y_ptr, n, is_output, N, GATES, HAS_BIAS, ACTIVATION)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def multiply_rows_of_groups(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr, bias_ptr, y_ptr, T,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr,
    FAST: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, or one part of their sums."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    t = tl.arange(0, ROWS)
    is_row, is_column = t < T, n < N
    share: tl.constexpr = (K + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
    x_rows = x_ptr + t * K
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([COLUMNS, ROWS] if FIRST else [ROWS, COLUMNS], tl.float32)
    for start in tl.range(part * share, part * share + share, BLOCK):
        first_x, second_x = load_inputs(x_rows, is_row, start, K, BLOCK, GROUP, PAIRS)
        sums = add_groups(
            sums, first_x, second_x, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr,
            n.to(tl.int64), is_column, start,
            K, COLUMNS, BLOCK, GROUP, PAIRS, BITS, SPAN, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES, FAST, FIRST,
        )  # fmt: skip
    if FIRST:
        sums = tl.trans(sums)
    store_rows(sums, sums, bias_ptr, y_ptr, n, t, part, T, N, False, HAS_BIAS, "")


@triton.jit  # type: ignore[untyped-decorator]
def widen_rows(  # type: ignore[no-untyped-def]
    ids_ptr, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr, wide_ptr,
    K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr,
    SPAN: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """A part of a row of weights in the type of the copy: of every row, or of one of those asked for."""
    to_row = tl.program_id(0).to(tl.int64)
    row = to_row
    if HAS_IDS:
        row = tl.load(ids_ptr + to_row).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    dtype = wide_ptr.dtype.element_ty
    turns: tl.constexpr = 2 if HAS_MINIMUMS else 1
    each: tl.constexpr = 2 if PAIRS else 1
    j = start // each + tl.arange(0, BLOCK // each)
    mask = j < K // each
    group = j // (GROUP // each)
    weights = tl.load(weight_ptr + row * (K // each) + j, mask=mask, other=0.0)
    if PAIRS and BITS == 0:
        scales = tl.load(scale_ptr + row * (K // GROUP) + group, mask=mask, other=0.0)
        first, second = widen_codes(weights, scales, table_ptr, dtype, "", "")
    else:
        scales = load_scales(scale_ptr, factor_ptr, row, group, mask, K, GROUP, SPAN, turns, 0)
        minimums = scales * 0.0
        if HAS_MINIMUMS:
            minimums = load_scales(minimum_ptr, factor_ptr, row, group, mask, K, GROUP, SPAN, turns, 1)
        if PAIRS:
            if BITS > 4:
                weights = joined_bits(weights, more_ptr + row * (K * (BITS - 4) // 8), j, mask, GROUP, BITS)
            first, second = numbers_of(weights, table_ptr, BITS, HAS_MINIMUMS, "", "")
        else:
            first = weights.to(tl.float32)
            second = first
        first, second = (first * scales + minimums).to(dtype), (second * scales + minimums).to(dtype)
    at = wide_ptr + to_row * K + (j // (GROUP // each) * GROUP + j % (GROUP // each))
    tl.store(at, first, mask=mask)
    if PAIRS:
        tl.store(at + GROUP // 2, second, mask=mask)


# ---- layers ----


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScaledLinear(KernelLinear):
    """A linear layer with scales [N, K / GROUP] in `scale`, and perhaps minimums; codes and levels are pairs."""

    codes: Codes | None = None  # of 4 bits
    bits: int = 0  # of levels in pairs; 0: there are none
    more: Tensor | None = None  # the bits of levels above the lower 4
    factors: Tensor | None = None  # of scales and minimums

    @property
    def pairs(self) -> bool:
        return self.codes is not None or self.bits > 0

    @property
    def size(self) -> int:
        """The number of inputs."""
        return self.weight.shape[1] * (2 if self.pairs else 1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the kernels' arguments."""
        table = None if self.codes is None else self.codes.table
        return self.weight, self.more, self.scale, self.minimums, self.factors, table

    @property
    def stored(self) -> dict[str, Any]:
        """How weights are stored, for all kernels."""
        return {
            "GROUP": self.group_size, "PAIRS": self.pairs, "BITS": self.bits,
            "SPAN": 0 if self.factors is None else FACTOR_SIZE, "HAS_MINIMUMS": self.minimums is not None,
        }  # fmt: skip

    def formats(self, dtype: torch.dtype, *, is_scaled: bool) -> dict[str, Any]:
        """How the kernels read weights for inputs of a type; `is_scaled`: scales are applied with instructions."""
        assert self.scale is not None
        return {**self.stored, **formats(self.codes, self.scale, dtype, is_scaled=is_scaled)}

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N], or to parts [S, T, N] of that sum; a gated layer has half as many outputs."""
        if not len(x):
            return x.new_empty(0, self.width)
        if len(x) == 1:
            return one_row(x, self)
        if len(x) <= MAX_ROWS:
            return few_rows(x, self)
        if len(x) <= MAX_WIDENED_ROWS:
            return torch.cat([few_rows(some, self) for some in torch.split(x, MAX_ROWS)], dim=-2)
        y = F.linear(x, widened(self, x.dtype), self.bias)
        return y if self.activation is None else activate(y, self)


def one_row(x: Tensor, linear: GroupScaledLinear, out: Tensor | None = None) -> Tensor:
    """[1, K] to [1, N]."""
    width, size = linear.width, linear.size
    y = torch.empty((1, width), dtype=x.dtype, device=x.device) if out is None else out
    each, block, warps = one_row_shape(linear)
    multiply_one_row_of_groups[(triton.cdiv(width, each),)](
        x, *linear.tensors, linear.bias, y,
        N=width, K=size, EACH=each, BLOCK=block, HAS_BIAS=linear.bias is not None,
        **linear.formats(x.dtype, is_scaled=False), **linear.options, **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    return y


def few_rows(x: Tensor, linear: GroupScaledLinear) -> Tensor:
    """[T, K] to [T, N], or to parts [S, T, N] of the sum in float32. A second kernel activates."""
    outputs, size, num_rows = len(linear.weight), linear.size, len(x)
    rows = padded(num_rows)
    shape = rows_shape(x.dtype, rows, linear.group_size, pairs=linear.pairs)
    parts = num_parts(outputs, PART_COLUMNS)  # the same for any number of rows: some may be computed separately
    is_sum = linear.activation is None
    y = sums_for(x, outputs, parts) if is_sum else torch.empty(parts, num_rows, outputs, device=x.device)
    multiply_rows_of_groups[(triton.cdiv(outputs, shape.columns), parts)](
        x, *linear.tensors, linear.bias, y, num_rows,
        N=outputs, K=size, ROWS=rows, PARTS=parts, HAS_BIAS=linear.bias is not None,
        FAST=is_fast(x.dtype), **linear.formats(x.dtype, is_scaled=True), **shape.options,
        **overlap_options(num_rows),
    )  # fmt: skip
    return y if is_sum else activate(y, linear, x.dtype)


def widened(linear: GroupScaledLinear, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """The weights [N, K], or those of some outputs [T, K]."""
    outputs, size = len(linear.weight if ids is None else ids), linear.size
    wide = torch.empty(outputs, size, dtype=dtype, device=linear.weight.device)
    if outputs:
        widen_rows[(outputs, triton.cdiv(size, WIDENED_BLOCK))](
            ids, *linear.tensors, wide, K=size, BLOCK=WIDENED_BLOCK, HAS_IDS=ids is not None, **linear.stored,
        )  # fmt: skip
    return wide


@dataclass(frozen=True, slots=True)
class RowsShape:
    """How the programs for several rows divide their work."""

    columns: int  # outputs of a program
    block: int  # inputs that it reads at a time
    warps: int
    stages: int
    weights_first: bool = False  # weights are the first operand, which tensor cores take from registers

    @property
    def options(self) -> dict[str, Any]:
        return {
            "COLUMNS": self.columns, "BLOCK": self.block, "FIRST": self.weights_first,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


def one_row_shape(linear: GroupScaledLinear) -> tuple[int, int, int]:
    """Outputs of a program, inputs that it reads at a time, and warps: the best of those measured on an H200.

    Levels have the shape of codes: they were not measured.
    """
    pairs, size = linear.pairs, triton.next_power_of_2(linear.size)
    block = max(linear.group_size, min(2048 if pairs else 1024, size))
    each = 4 if linear.codes is None or linear.codes.layout.is_fp4 else 2
    return each, block, max(1, min(4, block // (256 if pairs else 128)))


def rows_shape(dtype: torch.dtype, rows: int, group_size: int, *, pairs: bool) -> RowsShape:
    """The shape of programs for so many rows: the best of those measured on an H200, with 32 rows."""
    if dtype == torch.float32:
        return RowsShape(32, max(64, group_size), 4, 2)
    if pairs:
        block = max(128, group_size)
        return RowsShape(64, block, 4, 3, weights_first=True) if rows > 32 else RowsShape(64, block, 4, 4)
    block = group_size if group_size >= MIN_SUM_GROUP else 128
    return RowsShape(64, block, 4, 3, weights_first=True) if rows > 32 else RowsShape(64, block, 4, 4)
