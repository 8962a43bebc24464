"""Fp8Linear: weights as 8-bit floating point numbers (e4m3) with one scale for each output.

Shapes: … any leading dimensions · I inputs · O outputs
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.quantize.int8 import dequantize_rows

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max


class Fp8Linear(nn.Module):
    """A linear layer whose weights are `weight` times the `scale` of their row."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=DTYPE))
        self.register_buffer("scale", torch.empty(out_features, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Fp8Linear:
        """The same layer with smaller weights."""
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.scale = quantize_fp8(linear.weight.detach())
        layer.bias = linear.bias
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I] that are meant."""
        return dequantize_rows(self.weight, self.scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantize_fp8(values_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit floating point numbers, and their scales: a row's largest number is the largest there is."""
    wide_OI = values_OI.float()
    scale_O = wide_OI.abs().amax(dim=1) / LARGEST
    scale_O = torch.where(scale_O == 0, torch.ones_like(scale_O), scale_O)
    return (wide_OI / scale_O.unsqueeze(1)).clamp_(-LARGEST, LARGEST).to(DTYPE), scale_O
