"""Int8Linear: weights of 8 bits with one scale for each output.

Shapes: … any leading dimensions · I inputs · O outputs
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = 127


class Int8Linear(nn.Module):
    """A linear layer whose weights are `weight` times the `scale` of their row."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(out_features, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Int8Linear:
        """The same layer with smaller weights."""
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.scale = quantize_int8(linear.weight.detach())
        layer.bias = linear.bias
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I] that are meant."""
        return dequantize_rows(self.weight, self.scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]. In this form a compiler reads 8 bits and widens them on the way."""
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantize_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of 8 bits and their scales; what is rounded to is known exactly in bfloat16."""
    wide_OI = weight_OI.float()
    scale_O = (wide_OI.abs().amax(dim=1) / LARGEST).to(torch.bfloat16)
    scale_O = torch.where(scale_O == 0, torch.ones_like(scale_O), scale_O)
    rounded_OI = (wide_OI / scale_O.float().unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
    return rounded_OI.to(torch.int8), scale_O


def dequantize_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights […, O, I] that are meant, by the scales […, O] of their rows."""
    return weight.to(dtype) * scale.to(dtype).unsqueeze(-1)
