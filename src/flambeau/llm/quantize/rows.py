"""RowScaledLinear: what layers with one scale for each output share.

Shapes: … any leading dimensions · I inputs · O outputs
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RowScaledLinear(nn.Module):
    """A linear layer whose weights are `weight` times the `scale` of their row."""

    weight_dtype: ClassVar[torch.dtype]
    scale_dtype: ClassVar[torch.dtype]
    rounded: ClassVar[staticmethod[[Tensor], tuple[Tensor, Tensor]]]  # smaller weights [O, I] and their scales [O]

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=self.weight_dtype))
        self.register_buffer("scale", torch.empty(out_features, dtype=self.scale_dtype))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """The same layer with smaller weights."""
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.scale = cls.rounded(linear.weight.detach())
        layer.bias = linear.bias
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I] that are meant."""
        return dequantize_rows(self.weight, self.scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]. In this form a compiler reads 8 bits and widens them on the way."""
        if x.dtype == torch.float16:  # sums that are not scaled yet would be too large for it
            return F.linear(x, self.dequantize(x.dtype), self.bias)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


def dequantize_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights […, O, I] that are meant, by the scales […, O] of their rows."""
    return weight.to(dtype) * scale.to(dtype).unsqueeze(-1)
