"""What the Triton kernels share: overlapping launches, activations, and storing the outputs of a linear layer."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPS = True
MAX_ROWS = 64  # of a decode step


def overlap_options(num_rows: int, max_rows: int = 1) -> dict[str, bool]:
    """Launch options that start a kernel before the one before it ends, for up to `max_rows`.

    Kernels with little work are faster so for several rows, too. The Triton products are not: early programs occupy the
    place of working ones.
    """
    overlaps = OVERLAPS and num_rows <= max_rows and can_overlap()
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@functools.cache
def can_overlap() -> bool:
    """Whether the GPU supports programmatic dependent launch: NVIDIA's from Hopper on."""
    return torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_previous(OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the results of the kernel before this one, and let the next one start."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def activated(y, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers after an activation of `Architecture`; "": as they are."""
    if ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    elif ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # not a number stays
    elif ACTIVATION == "relu_squared":
        y = tl.where(y < 0.0, 0.0, y * y)
    else:
        tl.static_assert(ACTIVATION == "")
    return y


@triton.jit  # type: ignore[untyped-decorator]
def store_one_row(  # type: ignore[no-untyped-def]
    y, other, bias_ptr, y_ptr, n, is_output, N: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store the outputs n of one row after their activation; with GATES, `other` are the values that they gate."""
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
        if GATES:
            other += tl.load(bias_ptr + N + n, mask=is_output, other=0.0).to(tl.float32)
    y = activated(y, ACTIVATION)
    if GATES:
        y = y * other
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(  # type: ignore[no-untyped-def]
    sums, other_sums, bias_ptr, y_ptr, n, t, part, T,
    N: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store the outputs n of the rows t after their activation, or one part of their sums."""
    is_row, is_column = t < T, n < N
    if HAS_BIAS:
        has_bias = is_column & (part == 0)
        sums += tl.load(bias_ptr + n, mask=has_bias, other=0.0).to(tl.float32)[None, :]
        if GATES:
            other_sums += tl.load(bias_ptr + N + n, mask=has_bias, other=0.0).to(tl.float32)[None, :]
    sums = activated(sums, ACTIVATION)
    if GATES:
        sums = sums * other_sums
    y_at = y_ptr + (part * T + t[:, None]) * N + n[None, :]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
