"""What the kernels share: how one begins after another, and how a linear layer ends."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def take_turn(OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for what the kernel before this one has written, and let the next one begin."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def finish_one_row(  # type: ignore[no-untyped-def]
    y, other, bias_ptr, y_ptr, n, is_output, N: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Store the outputs n of a row; `other` are what they gate."""
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
        if GATES:
            other += tl.load(bias_ptr + N + n, mask=is_output, other=0.0).to(tl.float32)
    if GATES:
        y = y / (1.0 + tl.exp(-y)) * other
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def finish_rows(  # type: ignore[no-untyped-def]
    sums, other_sums, bias_ptr, y_ptr, n, t, part, T,
    N: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Store the outputs n of the rows t, or one part of their sums."""
    is_row, is_column = t < T, n < N
    if HAS_BIAS:
        has_it = is_column & (part == 0)
        sums += tl.load(bias_ptr + n, mask=has_it, other=0.0).to(tl.float32)[None, :]
        if GATES:
            other_sums += tl.load(bias_ptr + N + n, mask=has_it, other=0.0).to(tl.float32)[None, :]
    if GATES:
        sums = sums / (1.0 + tl.exp(-sums)) * other_sums
    y_at = y_ptr + (part * T + t[:, None]) * N + n[None, :]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
