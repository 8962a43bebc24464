"""GroupedLinear: integers of 4 to 8 bits in groups, as GGUF files have them; JoinedLinear: layers in several forms.

A weight is `scale · level + minimum`. Without minimums the middle level stands for zero. These are the plain versions:
the CPU kernels pack and multiply them; cuda_groups.py puts them into the order of the GPU's kernels.

Shapes: … any leading dimensions · I inputs · O outputs · N groups of a row · F blocks of a row with factors
· K their factors: of scales, and of minimums if there are any
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.quantize.int4 import GROUP_SIZES

FACTOR_SIZE = 256  # weights whose scales of 8 bits have a common factor
SCALE_DTYPES = {32: torch.float32, 16: torch.float16, 8: torch.int8}


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How the weights of a layer are stored."""

    bits: int  # of a level
    size: int  # weights of a group
    has_minimums: bool = False
    scale_bits: int = 32  # of scales and minimums; 8: integers, with factors in float16

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def has_pairs(self) -> bool:
        """Whether an Int4Linear can hold such weights, with or without minimums of their own."""
        return self.bits == 4 and self.size in GROUP_SIZES and self.scale_bits == 32


class GroupedLinear(nn.Module):
    """A linear layer with a level of each weight in a byte."""

    def __init__(self, in_features: int, out_features: int, layout: GroupLayout, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.layout = in_features, out_features, layout
        self.dtype = torch.get_default_dtype()  # of what is read from it
        shape, dtype = (out_features, in_features // layout.size), SCALE_DTYPES[layout.scale_bits]
        # Blocks are smaller only in a rank's part of a layer, whose border cuts a block.
        of_factors = out_features, in_features // math.gcd(FACTOR_SIZE, in_features), 1 + layout.has_minimums
        factors = torch.empty(of_factors, dtype=torch.float16) if layout.scale_bits == 8 else None
        self.weight: Tensor
        self.scales: Tensor
        self.minimums: Tensor | None
        self.factors: Tensor | None  # [O, F, K]
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(shape, dtype=dtype))
        self.register_buffer("minimums", torch.empty(shape, dtype=dtype) if layout.has_minimums else None)
        self.register_buffer("factors", factors)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        scales, minimums = wide_scales(self.scales, self.minimums, self.factors)
        return dequantize_levels(self.weight, scales, minimums, self.layout).to(dtype)

    def read_rows(self, ids: Tensor) -> Tensor:
        """The weights […, I] of the outputs […]."""
        buffers = (self.scales, self.minimums, self.factors)
        scales, minimums = wide_scales(*(None if each is None else each[ids] for each in buffers))
        return dequantize_levels(self.weight[ids], scales, minimums, self.layout).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def wide_scales(scales: Tensor | None, minimums: Tensor | None, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums […, N] times their factors […, F, K], which may be flat, in float32."""
    assert scales is not None
    if factors is None:
        return scales.float(), None if minimums is None else minimums.float()
    each = factors.float().view(*scales.shape[:-1], -1, 1 if minimums is None else 2)
    shape = (*each.shape[:-1], -1)
    wide, *others = (
        (values.float().view(shape) * each[..., i : i + 1]).flatten(-2)
        for i, values in enumerate((scales, minimums))
        if values is not None
    )
    return wide, others[0] if others else None


def dequantize_levels(weight: Tensor, scales: Tensor, minimums: Tensor | None, layout: GroupLayout) -> Tensor:
    """The weights […, I] in float32 from levels […, I], and the scales and minimums […, N] of their groups."""
    levels = weight.view(*scales.shape, -1).float()
    if minimums is None:
        return levels.sub_(layout.middle).mul_(scales.unsqueeze(-1)).flatten(-2)
    return torch.addcmul(minimums.unsqueeze(-1), levels, scales.unsqueeze(-1)).flatten(-2)


class JoinedLinear(nn.Module):
    """Linear layers of the same inputs, whose outputs follow each other: projections that are stored differently."""

    def __init__(self, parts: Sequence[nn.Module], bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        y = torch.cat([part(x) for part in self.parts], dim=-1)
        return y if self.bias is None else y + self.bias
