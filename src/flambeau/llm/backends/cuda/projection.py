"""Outputs of a linear layer that come as parts of their sums, which the kernel after it adds up.

Shapes: T tokens of the step · N outputs · P parts of their sums
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def load_sum(ptr, at, mask, stride, PARTS: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs of a projection, whose parts are `stride` apart, in float32 but rounded as the network's numbers are."""
    x = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(ptr + part * stride + at, mask=mask, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@dataclass(frozen=True, slots=True)
class Projection:
    """Outputs [T, N] of a linear layer, or parts [P, T, N] of their sums."""

    rows: Tensor

    @property
    def width(self) -> int:
        return self.rows.shape[-1]

    @property
    def num_parts(self) -> int:
        return self.rows.shape[0] if self.rows.dim() == 3 else 1

    def whole(self, dtype: torch.dtype) -> Projection:
        """The same in one part."""
        return Projection(self.rows.sum(0).to(dtype)) if self.rows.dim() == 3 else self
