"""Linear layers with 8-bit weights and one scale per output: int8, and floating point (fp8, e4m3).

There may be a scale for each group of a row instead, which only the kernels compute fast.

Shapes: … any leading dimensions · I inputs · O outputs · N groups of a row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RowScaledLinear(nn.Module):
    """A linear layer whose weights are `weight` times the `scale` of their row."""

    weight_dtype: ClassVar[torch.dtype]
    scale_dtype: ClassVar[torch.dtype]
    quantize_rows: ClassVar[staticmethod[[Tensor], tuple[Tensor, Tensor]]]  # → weights [O, I], scales [O]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        scale_dtype: torch.dtype | None = None,
        num_groups: int | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=self.weight_dtype))
        scales = (out_features,) if num_groups is None else (out_features, num_groups)
        self.register_buffer("scale", torch.empty(scales, dtype=scale_dtype or self.scale_dtype))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.scale = cls.quantize_rows(linear.weight.detach())
        layer.bias = linear.bias
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        return dequantize_rows(self.weight, self.scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]. In this form a compiler reads 8 bits and widens them on the fly."""
        if x.dtype == torch.float16 or self.scale.dim() > 1:  # unscaled sums would overflow, or have several scales
            return F.linear(x, self.dequantize(x.dtype), self.bias)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


def dequantize_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights […, O, I] from the scales […, O] of their rows, or […, O, N] of their groups."""
    if scale.dim() < weight.dim():
        return weight.to(dtype) * scale.to(dtype).unsqueeze(-1)

    def of_rows(some: Tensor, scales: Tensor) -> Tensor:
        return some.float().view(*scales.shape, -1).mul_(scales.float().unsqueeze(-1)).flatten(1)

    return in_portions(of_rows, weight, scale, dtype)


WEIGHTS_AT_ONCE = 1 << 24  # which are widened to float32


def in_portions(
    of_rows: Callable[[Tensor, Tensor], Tensor], weight: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weights […, O, I], from what a function makes of some rows [R, …] and their scales [R, N]."""
    rows, groups = weight.flatten(0, -2), scales.flatten(0, -2)
    portion = max(1, WEIGHTS_AT_ONCE // max(1, rows.shape[1]))
    if len(rows) <= portion:
        return of_rows(rows, groups).to(dtype).view(*weight.shape[:-1], -1)
    first = of_rows(rows[:portion], groups[:portion])
    wide = torch.empty(len(rows), first.shape[1], dtype=dtype, device=weight.device)
    wide[:portion] = first
    for start in range(portion, len(rows), portion):
        some = slice(start, start + portion)
        wide[some] = of_rows(rows[some], groups[some])
    return wide.view(*weight.shape[:-1], -1)


QUANTIZED_AT_ONCE = 1 << 22  # weights, which are widened to float32 …
QUANTIZED_ON_GPU = 1 << 27  # … of which a GPU has room for more
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def some_rows_at_a_time(quantize: Quantize) -> Quantize:
    """The same function of rows, for large matrices in little memory."""

    def quantize_all(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        portion = (QUANTIZED_ON_GPU if weight_OI.is_cuda else QUANTIZED_AT_ONCE) // max(1, weight_OI.shape[1])
        if len(weight_OI) <= portion or weight_OI.is_meta:
            return quantize(weight_OI)
        found: list[Tensor] = []  # weights and scales
        for start, some in enumerate(torch.split(weight_OI, max(1, portion))):
            parts = quantize(some)
            found = found or [part.new_empty(len(weight_OI), *part.shape[1:]) for part in parts]
            for whole, part in zip(found, parts, strict=True):
                whole[start * max(1, portion) :][: len(part)] = part
        weight, scale = found
        return weight, scale

    return quantize_all


INT8_MAX = 127


@some_rows_at_a_time
def quantize_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers and their scales; the quantized values are exact in bfloat16."""
    wide_OI = weight_OI.float()
    scale_O = (wide_OI.abs().amax(dim=1) / INT8_MAX).to(torch.bfloat16)
    scale_O = torch.where(scale_O == 0, torch.ones_like(scale_O), scale_O)
    rounded_OI = (wide_OI / scale_O.float().unsqueeze(1)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return rounded_OI.to(torch.int8), scale_O


class Int8Linear(RowScaledLinear):
    """A linear layer with 8-bit integer weights."""

    weight_dtype, scale_dtype = torch.int8, torch.bfloat16
    quantize_rows = staticmethod(quantize_int8)

    @classmethod
    def in_groups(cls, linear: nn.Linear, group_size: int) -> Self:
        """The same with a scale for each group of a row; of whole rows if these do not divide into groups."""
        size_in, size_out = linear.in_features, linear.out_features
        if size_in % group_size:
            return cls.from_linear(linear)
        with torch.device("meta"):
            layer = cls(size_in, size_out, bias=linear.bias is not None, num_groups=size_in // group_size)
        weight, scale = quantize_int8(linear.weight.detach().reshape(-1, group_size))
        layer.weight, layer.scale = weight.view(size_out, size_in), scale.view(size_out, -1)
        layer.bias = linear.bias
        return layer


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@some_rows_at_a_time
def quantize_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit floating point numbers, and their scales: a row's maximum becomes the largest of these numbers."""
    wide_OI = weight_OI.float()
    scale_O = wide_OI.abs().amax(dim=1) / FP8_MAX
    scale_O = torch.where(scale_O == 0, torch.ones_like(scale_O), scale_O)
    return (wide_OI / scale_O.unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale_O


class Fp8Linear(RowScaledLinear):
    """A linear layer with 8-bit floating point weights."""

    weight_dtype, scale_dtype = FP8, torch.float32
    quantize_rows = staticmethod(quantize_fp8)
