"""CodedLinear: 4-bit codes that index a table of 16 numbers, with a scale for each group of a row (MXFP4, NVFP4, nf4).

CudaCodedLinear and CudaCodedStack are the same in the order of the GPU's kernels.

Shapes: … any leading dimensions · I inputs · O outputs · N groups of a row · P pairs of a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.quantize.row_scaled import in_portions

CODE_GROUPS = (16, 32, 64, 128, 256)  # sizes of groups that kernels know
POSITIVE_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
FP4 = (*POSITIVE_FP4, *(-value for value in POSITIVE_FP4))  # e2m1


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """How the weights of a layer are stored."""

    table: tuple[float, ...]
    size: int  # weights of a group
    has_wide_scales: bool = True  # float32; powers of two are exact in bfloat16

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4

    @property
    def is_fp4(self) -> bool:
        """Whether codes are the bits of floating point numbers."""
        return self.table == FP4


class CodedLinear(nn.Module):
    """A linear layer with two codes per byte, the first in the lower half."""

    def __init__(self, in_features: int, out_features: int, layout: CodeLayout, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.layout = in_features, out_features, layout
        self.weight: Tensor
        self.scales: Tensor
        self.register_buffer("weight", torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        scale_dtype = torch.float32 if layout.has_wide_scales else torch.bfloat16
        self.register_buffer("scales", torch.empty(out_features, in_features // layout.size, dtype=scale_dtype))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        return dequantize_codes(self.weight, self.scales, self.layout, dtype)

    def read_rows(self, ids: Tensor) -> Tensor:
        """The weights […, I] of the outputs […], in float32."""
        return dequantize_codes(self.weight[ids], self.scales[ids], self.layout, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def dequantize_codes(
    pairs: Tensor, scales: Tensor, layout: CodeLayout, dtype: torch.dtype, *, is_ordered: bool = False
) -> Tensor:
    """The weights […, I] from codes […, P] and the scales […, N] of their groups; some rows at a time.

    With `is_ordered`, codes are in the order of the GPU's kernels.
    """
    table = table_of_pairs(layout, pairs.device)

    def of_rows(some: Tensor, their_scales: Tensor) -> Tensor:
        some = in_file_order(some, layout.size) if is_ordered else some
        numbers = table[some.int()].view(*their_scales.shape, -1)
        return numbers.mul_(their_scales.float().unsqueeze(-1)).flatten(1)

    return in_portions(of_rows, pairs, scales, dtype)


def table_of_pairs(layout: CodeLayout, device: torch.device) -> Tensor:
    """The two numbers [256, 2] of each byte."""
    codes, table = torch.arange(256), torch.tensor(layout.table)
    return torch.stack((table[codes & 15], table[codes >> 4]), dim=1).to(device)


# ---- for GPUs ----


def half_groups_apart(pairs: Tensor, group_size: int) -> Tensor:
    """Codes […, P] of neighbors as those of inputs that are half a group apart, the first in the upper half of a byte.

    Each half of the bytes can then be multiplied with its own half of the inputs.
    """
    bytes_of_groups = pairs.view(*pairs.shape[:-1], -1, group_size // 2)
    first, second = bytes_of_groups.chunk(2, dim=-1)
    low = (first & 15) << 4 | (second & 15)
    high = first & 240 | second >> 4
    return torch.stack((low, high), dim=-1).flatten(-3)


def in_file_order(pairs: Tensor, group_size: int) -> Tensor:
    """The inverse of `half_groups_apart`."""
    groups = pairs.view(*pairs.shape[:-1], -1, group_size // 4, 2)
    low, high = groups.unbind(-1)
    return torch.cat((low >> 4 | high & 240, low & 15 | (high & 15) << 4), dim=-1).flatten(-2)


def narrow_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in bfloat16 for a network of that type, whose weights are rounded anyway; powers of two stay exact."""
    return scales.to(torch.bfloat16) if dtype == torch.bfloat16 else scales


class CudaCodedLinear(nn.Module):
    """CodedLinear in the order of the Triton kernels: the two codes of a byte are half a group apart."""

    def __init__(self, plain: CodedLinear, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.in_features, self.out_features, self.layout = plain.in_features, plain.out_features, plain.layout
        self.weight: Tensor
        self.scales: Tensor
        self.register_buffer("weight", half_groups_apart(plain.weight, plain.layout.size))
        self.register_buffer("scales", narrow_scales(plain.scales, dtype))
        self.bias = plain.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        return dequantize_codes(self.weight, self.scales, self.layout, dtype, is_ordered=True)

    def read_rows(self, ids: Tensor) -> Tensor:
        """The weights […, I] of the outputs […], in float32."""
        return dequantize_codes(self.weight[ids], self.scales[ids], self.layout, torch.float32, is_ordered=True)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O], for many tokens or without the kernels: the weights are widened first."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def table_tensor(layout: CodeLayout, device: torch.device) -> Tensor:
    return torch.tensor(layout.table, dtype=torch.float32, device=device)
