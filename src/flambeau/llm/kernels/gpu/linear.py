"""Linear layers of decode steps on a GPU, in Triton: a few rows times a matrix that is read once.

A layer of the network is four of them, and what stands between them is done on the way: one row is normalised, gated
and added to the residual stream by the product itself. Several rows go through tensor cores; there a matrix with few
outputs is divided along its inputs among several programs, whose sums the kernel that comes next adds up.

With `OVERLAPS`, a kernel begins while the one before it ends: one row's kernel reads its weights, which depend on
nothing, before it waits for its input.

Shapes: T rows · N outputs · K inputs · S parts that a sum is divided into
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPS = True
MOST_ROWS = 64  # more of them are a matter of arithmetic, at which torch's own products are best
LEAST_ROWS = 16  # of a product on tensor cores
PROGRAMS = 256  # about two for each of an H200's 132 multiprocessors
MOST_PARTS = 4


@triton.jit  # type: ignore[untyped-decorator]
def multiply_one_row(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    NORMALISES: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One output; of a gated layer the product of two, which lie N rows apart."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    row = weight_ptr + n * K
    weights = tl.load(row + k, mask=k < K, other=0.0, eviction_policy="evict_first")
    if GATES:
        others = tl.load(row + N * K + k, mask=k < K, other=0.0, eviction_policy="evict_first")
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([BLOCK], tl.float32)
    other_sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        place = start + k
        if start > 0:
            weights = tl.load(row + place, mask=place < K, other=0.0, eviction_policy="evict_first")
            if GATES:
                others = tl.load(row + N * K + place, mask=place < K, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + place, mask=place < K, other=0.0).to(tl.float32)
        if NORMALISES:  # the root of the mean square is the same for every product: it is divided by at the end
            squares += x * x
            x *= tl.load(gain_ptr + place, mask=place < K, other=0.0).to(tl.float32)
        sums += weights.to(tl.float32) * x
        if GATES:
            other_sums += others.to(tl.float32) * x
    y = tl.sum(sums, 0)
    other = tl.sum(other_sums, 0)
    if NORMALISES:
        root = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
        y *= root
        other *= root
    if HAS_BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)
        if GATES:
            other += tl.load(bias_ptr + N + n).to(tl.float32)
    if GATES:
        y = y / (1.0 + tl.exp(-y)) * other
    if ADDS:
        y += tl.load(residual_ptr + n).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def multiply_rows(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, y_ptr, T,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, or one part of their sums."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    t = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    is_row, is_column = t < T, n < N
    rows_at = weight_ptr + n[:, None].to(tl.int64) * K
    share: tl.constexpr = (K + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    other_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, share, BLOCK):
        place = part * share + start + k
        is_place = place < K
        x = tl.load(x_ptr + t[:, None] * K + place[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
        mask = is_column[:, None] & is_place[None, :]
        weights = tl.load(rows_at + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
        if GATES:
            others = tl.load(rows_at + N * K + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            other_sums = tl.dot(x, tl.trans(others), other_sums, input_precision="ieee")
    if HAS_BIAS:
        is_first = part == 0
        sums += tl.load(bias_ptr + n, mask=is_column & is_first, other=0.0).to(tl.float32)[None, :]
        if GATES:
            other_sums += tl.load(bias_ptr + N + n, mask=is_column & is_first, other=0.0).to(tl.float32)[None, :]
    if GATES:
        sums = sums / (1.0 + tl.exp(-sums)) * other_sums
    y_at = y_ptr + (part * T + t[:, None]) * N + n[None, :]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def add_and_normalise(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, gain_ptr, y_ptr, epsilon, T,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a sum to a row of the residual stream, in its place, and normalise it."""
    row = tl.program_id(0)
    e = tl.arange(0, PADDED)
    is_element = e < SIZE
    gain = tl.load(gain_ptr + e, mask=is_element, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * SIZE + e, mask=is_element, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            x += tl.load(sums_ptr + (part * T + row) * SIZE + e, mask=is_element, other=0.0).to(tl.float32)
        kept = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * SIZE + e, kept, mask=is_element)
        x = kept.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon) * gain
    tl.store(y_ptr + row * SIZE + e, y.to(y_ptr.dtype.element_ty), mask=is_element)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weights [N, K] as the kernels read them."""

    layer: nn.Module  # what multiplies many rows
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: nn.Module) -> Matrix:
        """A layer's own tensors."""
        weight, bias = layer.weight, getattr(layer, "bias", None)
        assert isinstance(weight, Tensor)
        return cls(layer, weight, bias)


def one_row(
    x: Tensor,
    matrix: Matrix,
    *,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    gates: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """[1, K] to [1, N], normalised before, gated or added to a residual [1, N] after it, which it then is."""
    weight, bias = matrix.weight, matrix.bias
    width, size = weight.shape[0] // (2 if gates else 1), weight.shape[1]
    y = torch.empty((1, width), dtype=x.dtype, device=x.device) if residual is None else residual
    block, warps = one_row_shape(size)
    launch: Any = multiply_one_row
    launch[(width,)](
        x, gain, weight, bias, residual, y, epsilon,
        N=width, K=size, BLOCK=block,
        NORMALISES=gain is not None, GATES=gates, HAS_BIAS=bias is not None, ADDS=residual is not None,
        OVERLAPS=OVERLAPS, num_warps=warps, launch_pdl=OVERLAPS,
    )  # fmt: skip
    return y


def one_row_shape(size: int) -> tuple[int, int]:
    """How many inputs a program reads at a time, and its warps: few where there are more, each with much on its way."""
    block = min(4096, triton.next_power_of_2(size))
    return block, 2 if size > block else max(1, min(8, block // 512))


def few_rows(x: Tensor, matrix: Matrix, *, gates: bool = False, parts: int = 1) -> Tensor:
    """[T, K] to [T, N], gated where told; in several parts, to sums [S, T, N] in float32."""
    weight, bias = matrix.weight, matrix.bias
    width, size = weight.shape[0] // (2 if gates else 1), weight.shape[1]
    num_rows = len(x)
    shape, dtype = ((num_rows, width), x.dtype) if parts == 1 else ((parts, num_rows, width), torch.float32)
    y = torch.empty(shape, dtype=dtype, device=x.device)
    columns, block, stages = few_rows_shape(x.dtype, gates=gates, parts=parts)
    launch: Any = multiply_rows
    launch[(triton.cdiv(width, columns), parts)](
        x, weight, bias, y, num_rows,
        N=width, K=size, ROWS=max(LEAST_ROWS, triton.next_power_of_2(num_rows)), COLUMNS=columns, BLOCK=block,
        PARTS=parts, GATES=gates, HAS_BIAS=bias is not None, OVERLAPS=OVERLAPS,
        num_warps=4, num_stages=stages, launch_pdl=OVERLAPS,
    )  # fmt: skip
    return y


def few_rows_shape(dtype: torch.dtype, *, gates: bool, parts: int) -> tuple[int, int, int]:
    """How many outputs a program has, how many inputs it reads at a time, and how many times ahead."""
    columns = 32 if gates else 64
    if dtype == torch.float32:
        return columns, 64, 3
    return (columns, 128, 3) if parts == 1 else (columns, 64, 5)


def num_parts(matrix: Matrix) -> int:
    """Into how many parts the inputs of a layer are divided, so that there are programs for the whole GPU."""
    programs = -(-matrix.weight.shape[0] // 64)
    parts = 1
    while parts < MOST_PARTS and parts * programs < PROGRAMS:
        parts *= 2
    return parts


def normalise(x: Tensor, gain: Tensor, epsilon: float, sums: Tensor | None = None) -> Tensor:
    """[T, E] normalised, after the sums [S, T, E] were added to it in its place."""
    num_rows, size = x.shape
    y = torch.empty_like(x)
    launch: Any = add_and_normalise
    launch[(num_rows,)](
        x, sums, gain, y, epsilon, num_rows,
        SIZE=size, PADDED=triton.next_power_of_2(size), PARTS=0 if sums is None else sums.numel() // x.numel(),
        OVERLAPS=OVERLAPS, num_warps=8, launch_pdl=OVERLAPS,
    )  # fmt: skip
    return y
