"""RMS normalization before a linear layer, in Triton.

Shapes: T rows · E hidden · S parts of a sum
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def add_and_normalize(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, gain_ptr, y_ptr, epsilon, scale, T,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a sum to a row of the residual stream, in place, and normalize it."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    is_element = e < SIZE
    gain = tl.load(gain_ptr + e, mask=is_element, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    x = tl.load(x_ptr + row * SIZE + e, mask=is_element, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            sums = tl.load(sums_ptr + (part * T + row) * SIZE + e, mask=is_element, other=0.0)
            x += sums.to(tl.float32) * scale
        kept = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * SIZE + e, kept, mask=is_element)
        x = kept.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon) * gain
    tl.store(y_ptr + row * SIZE + e, y.to(y_ptr.dtype.element_ty), mask=is_element)


def normalize(x: Tensor, gain: Tensor, epsilon: float, sums: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """[T, E] normalized, after the sums [T, E] or [S, T, E], times the scale, were added to x in place."""
    num_rows, size = x.shape
    y = torch.empty_like(x)
    launch: Any = add_and_normalize
    launch[(num_rows,)](
        x, sums, gain, y, epsilon, scale, num_rows,
        SIZE=size, PADDED=triton.next_power_of_2(size), PARTS=0 if sums is None else sums.numel() // x.numel(),
        **overlap_options(num_rows, MAX_ROWS), num_warps=8,
    )  # fmt: skip
    return y
