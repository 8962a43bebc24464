"""Linear layers whose weights have a scale for each group of inputs, in Triton: 8-bit numbers, and codes of 4 bits.

As linear.py, except for how weights are read and scaled. 8-bit numbers (fp8 of DeepSeek, integers) have the scales
[N, K / GROUP] of groups; so have codes, which index a table of 16 numbers (MXFP4, NVFP4, nf4). A byte has the codes of
two inputs that are half a group apart: each half of the bytes is multiplied with its own half of the inputs. Numbers of
codes are found by instructions (code_instructions.py), else in the table. Many rows are multiplied by torch's own
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
from flambeau.llm.backends.cuda.dequantize import is_fast, widen
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

MIN_SUM_GROUP = 64  # of inputs whose products are added up before they are scaled
WIDENED_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(pairs, table_ptr, FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the second numbers of pairs of codes, in float32, by instructions or from the table."""
    if FIRST_CODES != "":
        first = tl.inline_asm_elementwise(FIRST_CODES, "=r,=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=4)
        second = tl.inline_asm_elementwise(SECOND_CODES, "=r,=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=4)
        first, second = first.to(tl.float32), second.to(tl.float32)
    else:
        first, second = tl.load(table_ptr + (pairs >> 4)), tl.load(table_ptr + (pairs & 15))
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def widen_codes(  # type: ignore[no-untyped-def]
    pairs, scales, table_ptr, dtype: tl.constexpr, FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr
):  # fmt: skip
    """The first and the second weights of pairs of codes, in the type of the inputs."""
    if FIRST_CODES != "":
        first = tl.inline_asm_elementwise(
            FIRST_CODES, "=r,=r,r,r,r", [pairs, scales], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        second = tl.inline_asm_elementwise(
            SECOND_CODES, "=r,=r,r,r,r", [pairs, scales], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        first, second = numbers_of(pairs, table_ptr, "", "")
        first, second = (first * scales.to(tl.float32)).to(dtype), (second * scales.to(tl.float32)).to(dtype)
    return first, second


# ---- one row ----


@triton.jit  # type: ignore[untyped-decorator]
def load_row_inputs(x_ptr, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some inputs of one row; with PAIRS those of the first and of the second codes, else twice the same."""
    if PAIRS:
        half: tl.constexpr = GROUP // 2
        j = start // 2 + tl.arange(0, BLOCK // 2)
        place = j // half * GROUP + j % half
        first = tl.load(x_ptr + place, mask=j < K // 2, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + place + half, mask=j < K // 2, other=0.0).to(tl.float32)
    else:
        place = start + tl.arange(0, BLOCK)
        first = tl.load(x_ptr + place, mask=place < K, other=0.0).to(tl.float32)
        second = first
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def load_row_weights(weight_ptr, n, is_output, start, K: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some weights of the outputs n [EACH, BLOCK], or pairs of them."""
    each: tl.constexpr = 2 if PAIRS else 1
    place = start // each + tl.arange(0, BLOCK // each)
    mask = is_output[:, None] & (place < K // each)[None, :]
    at = weight_ptr + n[:, None] * (K // each) + place[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def load_row_scales(scale_ptr, n, is_output, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales [EACH, BLOCK / GROUP]."""
    group = start // GROUP + tl.arange(0, BLOCK // GROUP)
    mask = is_output[:, None] & (group < K // GROUP)[None, :]
    return tl.load(scale_ptr + n[:, None] * (K // GROUP) + group[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def sums_of_groups(  # type: ignore[no-untyped-def]
    weights, scales, first, second, table_ptr, EACH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr,
):  # fmt: skip
    """The contribution of each group to each output [EACH, BLOCK / GROUP]; sums are scaled, not weights."""
    groups: tl.constexpr = BLOCK // GROUP
    if PAIRS:
        one, other = numbers_of(weights, table_ptr, FIRST_CODES, SECOND_CODES)
        products = one * first[None, :] + other * second[None, :]
        sums = tl.sum(tl.reshape(products, [EACH, groups, GROUP // 2]), 2)
    else:
        products = weights.to(tl.float32) * first[None, :]
        sums = tl.sum(tl.reshape(products, [EACH, groups, GROUP]), 2)
    return sums * scales


@triton.jit  # type: ignore[untyped-decorator]
def multiply_one_row_of_groups(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, table_ptr, bias_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr,
    GATES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row; in a gated layer each is the product of two that are N rows apart."""
    groups: tl.constexpr = BLOCK // GROUP
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    row = n.to(tl.int64)
    weights = load_row_weights(weight_ptr, row, is_output, 0, K, BLOCK, PAIRS)
    scales = load_row_scales(scale_ptr, row, is_output, 0, K, BLOCK, GROUP)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([EACH, groups], tl.float32)
    other_sums = tl.zeros([EACH, groups], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        if start > 0:
            weights = load_row_weights(weight_ptr, row, is_output, start, K, BLOCK, PAIRS)
            scales = load_row_scales(scale_ptr, row, is_output, start, K, BLOCK, GROUP)
        first, second = load_row_inputs(x_ptr, start, K, BLOCK, GROUP, PAIRS)
        sums += sums_of_groups(
            weights, scales, first, second, table_ptr, EACH, BLOCK, GROUP, PAIRS, FIRST_CODES, SECOND_CODES
        )
        if GATES:
            weights = load_row_weights(weight_ptr, row + N, is_output, start, K, BLOCK, PAIRS)
            scales = load_row_scales(scale_ptr, row + N, is_output, start, K, BLOCK, GROUP)
            other_sums += sums_of_groups(
                weights, scales, first, second, table_ptr, EACH, BLOCK, GROUP, PAIRS, FIRST_CODES, SECOND_CODES
            )
    y = tl.sum(sums, 1)
    other = tl.sum(other_sums, 1)
    store_one_row(y, other, bias_ptr, y_ptr, n, is_output, N, GATES, HAS_BIAS, ACTIVATION)


# ---- several rows ----


@triton.jit  # type: ignore[untyped-decorator]
def load_inputs(  # type: ignore[no-untyped-def]
    x_rows, is_row, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Some inputs of rows; with PAIRS those of the first and of the second codes [ROWS, BLOCK / 2], else the same."""
    if PAIRS:
        half: tl.constexpr = GROUP // 2
        j = start // 2 + tl.arange(0, BLOCK // 2)
        place = j // half * GROUP + j % half
        mask = is_row[:, None] & (j < K // 2)[None, :]
        first = tl.load(x_rows[:, None] + place[None, :], mask=mask, other=0.0)
        second = tl.load(x_rows[:, None] + (place + half)[None, :], mask=mask, other=0.0)
    else:
        place = start + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (place < K)[None, :]
        first = tl.load(x_rows[:, None] + place[None, :], mask=mask, other=0.0)
        second = first
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(sums, x, weights, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums with the products of inputs [ROWS, …] and weights [COLUMNS, …]; FIRST: sums are [COLUMNS, ROWS]."""
    if FIRST:
        sums = tl.dot(weights, tl.trans(x), sums, input_precision="ieee")
    else:
        sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def add_groups(  # type: ignore[no-untyped-def]
    sums, first_x, second_x, weight_ptr, scale_ptr, table_ptr, n, is_column, start,
    K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
    FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr, FAST: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The sums with the products of some inputs and the outputs n, which are of 64 bits."""
    groups: tl.constexpr = BLOCK // GROUP
    each: tl.constexpr = 2 if PAIRS else 1
    width: tl.constexpr = GROUP // each
    dtype: tl.constexpr = first_x.dtype
    g = start // GROUP + tl.arange(0, groups)
    if groups == 1 and not PAIRS:  # one scale for each output: sums are scaled
        place = start + tl.arange(0, BLOCK)
        mask = is_column[:, None] & (place < K)[None, :]
        at = weight_ptr + n[:, None] * K + place[None, :]
        weights = widen(tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first"), dtype, FAST)
        is_known = is_column & (start < K)
        scales = tl.load(scale_ptr + n * (K // GROUP) + start // GROUP, mask=is_known, other=0.0).to(tl.float32)
        products = multiplied(tl.zeros_like(sums), first_x, weights, FIRST)
        sums += products * (scales[:, None] if FIRST else scales[None, :])
    else:
        is_group = is_column[:, None] & (g < K // GROUP)[None, :]
        place = g[:, None] * width + tl.arange(0, width)[None, :]
        at = weight_ptr + n[:, None, None] * (K // each) + place[None, :, :]
        loaded = tl.load(at, mask=is_group[:, :, None], other=0.0, eviction_policy="evict_first")
        scales = tl.load(scale_ptr + n[:, None] * (K // GROUP) + g[None, :], mask=is_group, other=0.0)[:, :, None]
        if PAIRS:
            first, second = widen_codes(loaded, scales, table_ptr, dtype, FIRST_CODES, SECOND_CODES)
            sums = multiplied(sums, first_x, tl.reshape(first, [COLUMNS, BLOCK // 2]), FIRST)
            sums = multiplied(sums, second_x, tl.reshape(second, [COLUMNS, BLOCK // 2]), FIRST)
        else:
            weights = (loaded.to(tl.float32) * scales.to(tl.float32)).to(dtype)
            sums = multiplied(sums, first_x, tl.reshape(weights, [COLUMNS, BLOCK]), FIRST)
    return sums


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def multiply_rows_of_groups(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, table_ptr, bias_ptr, y_ptr, T,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr,
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
            sums, first_x, second_x, weight_ptr, scale_ptr, table_ptr, n.to(tl.int64), is_column, start,
            K, COLUMNS, BLOCK, GROUP, PAIRS, FIRST_CODES, SECOND_CODES, FAST, FIRST,
        )  # fmt: skip
    if FIRST:
        sums = tl.trans(sums)
    store_rows(sums, sums, bias_ptr, y_ptr, n, t, part, T, N, False, HAS_BIAS, "")


@triton.jit  # type: ignore[untyped-decorator]
def widen_rows(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, table_ptr, wide_ptr,
    K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A part of a row of weights in the type of the copy."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    dtype = wide_ptr.dtype.element_ty
    if PAIRS:
        half: tl.constexpr = GROUP // 2
        j = start // 2 + tl.arange(0, BLOCK // 2)
        is_pair = j < K // 2
        pairs = tl.load(weight_ptr + row * (K // 2) + j, mask=is_pair, other=0)
        scales = tl.load(scale_ptr + row * (K // GROUP) + j // half, mask=is_pair, other=0.0)
        first, second = widen_codes(pairs, scales, table_ptr, dtype, "", "")
        at = wide_ptr + row * K + j // half * GROUP + j % half
        tl.store(at, first, mask=is_pair)
        tl.store(at + half, second, mask=is_pair)
    else:
        place = start + tl.arange(0, BLOCK)
        is_place = place < K
        weights = tl.load(weight_ptr + row * K + place, mask=is_place, other=0.0).to(tl.float32)
        scales = tl.load(scale_ptr + row * (K // GROUP) + place // GROUP, mask=is_place, other=0.0).to(tl.float32)
        tl.store(wide_ptr + row * K + place, (weights * scales).to(dtype), mask=is_place)


# ---- layers ----


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScaledLinear(KernelLinear):
    """A linear layer with scales [N, K / GROUP] in `scale`; with codes of 4 bits if there is a table."""

    codes: Codes | None = None  # of 4 bits

    @property
    def size(self) -> int:
        """The number of inputs."""
        return self.weight.shape[1] * (1 if self.codes is None else 2)

    @property
    def table(self) -> Tensor | None:
        return None if self.codes is None else self.codes.table

    def formats(self, dtype: torch.dtype, *, is_scaled: bool) -> dict[str, Any]:
        """How the kernels read weights for inputs of a type; `is_scaled`: scales are applied with instructions."""
        assert self.scale is not None
        return {"GROUP": self.group_size, **formats(self.codes, self.scale, dtype, is_scaled=is_scaled)}

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


def one_row(x: Tensor, linear: GroupScaledLinear) -> Tensor:
    """[1, K] to [1, N]."""
    width, size = linear.width, linear.size
    y = torch.empty((1, width), dtype=x.dtype, device=x.device)
    each, block, warps = one_row_shape(size, linear.group_size, linear.codes)
    multiply_one_row_of_groups[(triton.cdiv(width, each),)](
        x, linear.weight, linear.scale, linear.table, linear.bias, y,
        N=width, K=size, EACH=each, BLOCK=block, HAS_BIAS=linear.bias is not None,
        **linear.formats(x.dtype, is_scaled=False), **linear.options, **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    return y


def few_rows(x: Tensor, linear: GroupScaledLinear) -> Tensor:
    """[T, K] to [T, N], or to parts [S, T, N] of the sum in float32. A second kernel activates."""
    outputs, size, num_rows = len(linear.weight), linear.size, len(x)
    rows = padded(num_rows)
    shape = rows_shape(x.dtype, rows, linear.group_size, pairs=linear.codes is not None)
    parts = num_parts(outputs, PART_COLUMNS)  # the same for any number of rows: some may be computed separately
    is_sum = linear.activation is None
    y = sums_for(x, outputs, parts) if is_sum else torch.empty(parts, num_rows, outputs, device=x.device)
    multiply_rows_of_groups[(triton.cdiv(outputs, shape.columns), parts)](
        x, linear.weight, linear.scale, linear.table, linear.bias, y, num_rows,
        N=outputs, K=size, ROWS=rows, PARTS=parts, HAS_BIAS=linear.bias is not None,
        FAST=is_fast(x.dtype), **linear.formats(x.dtype, is_scaled=True), **shape.options,
        **overlap_options(num_rows),
    )  # fmt: skip
    return y if is_sum else activate(y, linear, x.dtype)


def widened(linear: GroupScaledLinear, dtype: torch.dtype) -> Tensor:
    """The weights [N, K]."""
    outputs, size = len(linear.weight), linear.size
    wide = torch.empty(outputs, size, dtype=dtype, device=linear.weight.device)
    widen_rows[(outputs, triton.cdiv(size, WIDENED_BLOCK))](
        linear.weight, linear.scale, linear.table, wide,
        K=size, BLOCK=WIDENED_BLOCK, GROUP=linear.group_size, PAIRS=linear.codes is not None,
    )  # fmt: skip
    return wide


PART_COLUMNS = 64


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


def one_row_shape(size: int, group_size: int, codes: Codes | None) -> tuple[int, int, int]:
    """Outputs of a program, inputs that it reads at a time, and warps: the best of those measured on an H200."""
    block = max(group_size, min(1024 if codes is None else 2048, triton.next_power_of_2(size)))
    each = 4 if codes is None or codes.layout.is_fp4 else 2
    return each, block, max(1, min(4, block // (128 if codes is None else 256)))


def rows_shape(dtype: torch.dtype, rows: int, group_size: int, *, pairs: bool) -> RowsShape:
    """The shape of programs for so many rows: the best of those measured on an H200, with 32 rows."""
    if dtype == torch.float32:
        return RowsShape(32, max(64, group_size), 4, 2)
    if pairs:
        block = max(128, group_size)
        return RowsShape(64, block, 4, 3, weights_first=True) if rows > 32 else RowsShape(64, block, 4, 4)
    block = group_size if group_size >= MIN_SUM_GROUP else 128
    return RowsShape(64, block, 4, 3, weights_first=True) if rows > 32 else RowsShape(64, block, 4, 4)
