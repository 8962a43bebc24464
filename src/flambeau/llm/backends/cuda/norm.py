"""Norms before and after the parts of a layer, in Triton.

Shapes: T rows · E hidden · S parts of a sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.models.norms import CenteredNorm, HeadNorm, OffsetRMSNorm

Gains = tuple[Tensor, Tensor | None]  # what is multiplied with; a layer norm also has what is added


@triton.jit  # type: ignore[untyped-decorator]
def normalized(x, gain, bias, is_element, epsilon, SIZE: tl.constexpr, CENTERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, whose numbers beyond its size are 0."""
    if CENTERED:
        x = tl.where(is_element, x - tl.sum(x, 0) / SIZE, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon) * gain
    if CENTERED:
        y += bias
    return y


@triton.jit  # type: ignore[untyped-decorator]
def with_sums(  # type: ignore[no-untyped-def]
    x, more, sums_ptr, after_gain_ptr, after_bias_ptr, row, e, is_element, epsilon, scale, T, dtype: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, CENTERED: tl.constexpr, AFTER: tl.constexpr,
    HAS_MORE: tl.constexpr,
):  # fmt: skip
    """A row of the residual stream after the parts of a sum were added, rounded to a type.

    With AFTER, the sum is normalized before it is added. With HAS_MORE, `more` belongs to it.
    """
    if AFTER:
        added = tl.zeros([PADDED], tl.float32)
        if HAS_MORE:
            added += more
        for part in tl.static_range(PARTS):
            sums = tl.load(sums_ptr + (part * T + row) * SIZE + e, mask=is_element, other=0.0)
            added += sums.to(tl.float32)
        added = added.to(dtype).to(tl.float32)
        after_gain = tl.load(after_gain_ptr + e, mask=is_element, other=0.0).to(tl.float32)
        after_bias = 0.0
        if CENTERED:
            after_bias = tl.load(after_bias_ptr + e, mask=is_element, other=0.0).to(tl.float32)
        added = normalized(added, after_gain, after_bias, is_element, epsilon, SIZE, CENTERED)
        x += added.to(dtype).to(tl.float32) * scale
    else:
        if HAS_MORE:
            x += more * scale
        for part in tl.static_range(PARTS):
            sums = tl.load(sums_ptr + (part * T + row) * SIZE + e, mask=is_element, other=0.0)
            x += sums.to(tl.float32) * scale
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def add_and_normalize(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, gain_ptr, bias_ptr, after_gain_ptr, after_bias_ptr, y_ptr, epsilon, scale, T,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, CENTERED: tl.constexpr, AFTER: tl.constexpr,
    NORMALIZES: tl.constexpr, KEEPS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a sum to a row of the residual stream, in place, and normalize it.

    Without KEEPS, the normalized row takes the stream's place.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    is_element = e < SIZE
    gain, bias = 1.0, 0.0
    if NORMALIZES:
        gain = tl.load(gain_ptr + e, mask=is_element, other=0.0).to(tl.float32)
        if CENTERED:
            bias = tl.load(bias_ptr + e, mask=is_element, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    x = tl.load(x_ptr + row * SIZE + e, mask=is_element, other=0.0).to(tl.float32)
    if PARTS > 0:
        x = with_sums(
            x, 0.0, sums_ptr, after_gain_ptr, after_bias_ptr, row, e, is_element, epsilon, scale, T,
            x_ptr.dtype.element_ty, SIZE, PADDED, PARTS, CENTERED, AFTER, False,
        )  # fmt: skip
        if KEEPS:
            tl.store(x_ptr + row * SIZE + e, x.to(x_ptr.dtype.element_ty), mask=is_element)
    if NORMALIZES:
        y = normalized(x, gain, bias, is_element, epsilon, SIZE, CENTERED)
        tl.store(y_ptr + row * SIZE + e, y.to(y_ptr.dtype.element_ty), mask=is_element)


def normalize(
    x: Tensor,
    gain: Tensor | None,
    epsilon: float,
    sums: Tensor | None = None,
    scale: float = 1.0,
    *,
    bias: Tensor | None = None,
    after: Gains | None = None,
    replaces: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, E] normalized, after the sums [T, E] or [S, T, E], times the scale, were added to x in place.

    A layer norm has a `bias`. `after` normalizes the sums before they are added. Without a gain, the result is x
    itself. With `replaces`, it is written to x, too. Otherwise it may have another `dtype` than x.
    """
    if gain is None and sums is None:
        return x
    num_rows, size = x.shape
    y = x if gain is None or replaces else torch.empty_like(x, dtype=dtype)
    launch: Any = add_and_normalize
    launch[(num_rows,)](
        x, sums, gain, bias, *(after or (None, None)), y, epsilon, scale, num_rows,
        SIZE=size, PADDED=triton.next_power_of_2(size), PARTS=0 if sums is None else sums.numel() // x.numel(),
        CENTERED=bias is not None or (after is not None and after[1] is not None), AFTER=after is not None,
        NORMALIZES=gain is not None, KEEPS=not replaces,
        **overlap_options(num_rows, MAX_ROWS), num_warps=8,
    )  # fmt: skip
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class NormParameters:
    """What happens to the residual stream before a part of a layer, with the sums that the part before has given."""

    gain: Tensor | None  # None: the stream is used as it is
    epsilon: float
    residual_scale: float = 1.0  # of the sums
    bias: Tensor | None = None  # of a layer norm
    after: Gains | None = None  # of a norm of the sums
    replaces: bool = False  # the stream itself is normalized
    dtype: torch.dtype | None = None  # of the normalized rows, if it is not that of the stream

    @property
    def is_plain(self) -> bool:
        """Whether it is an RMS norm of the stream, and nothing else."""
        return (
            self.gain is not None and self.bias is None and self.after is None and not self.replaces and not self.dtype
        )

    def __call__(self, x_TE: Tensor, sums: Tensor | None) -> Tensor:
        """[T, E] normalized, after the sums were added to x in place."""
        return normalize(
            x_TE,
            self.gain,
            self.epsilon,
            sums,
            self.residual_scale,
            bias=self.bias,
            after=None if sums is None else self.after,
            replaces=self.replaces,
            dtype=self.dtype,
        )


def gains_of(norm: nn.Module, device: torch.device) -> Gains:
    """The weights of a norm as the kernels read them: with their offset; a layer norm always has a bias."""
    weight: Any = getattr(norm, "weight", None)
    if isinstance(norm, OffsetRMSNorm):
        return weight.detach().float() + norm.offset, None
    if isinstance(norm, CenteredNorm):
        gain = torch.ones(norm.size, device=device) if weight is None else weight.detach()
        gain = gain.float() + norm.offset if norm.offset and weight is not None else gain
        return gain, torch.zeros(norm.size, device=device) if norm.bias is None else norm.bias.detach()
    if isinstance(norm, HeadNorm):
        return weight.detach(), torch.zeros_like(weight.detach())
    return weight, None
