"""Int8Linear: weights of 8 bits with one scale for each output.

Shapes: I inputs · O outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from flambeau.llm.quantize.rows import RowScaledLinear

LARGEST = 127


def quantize_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of 8 bits and their scales; what is rounded to is known exactly in bfloat16."""
    wide_OI = weight_OI.float()
    scale_O = (wide_OI.abs().amax(dim=1) / LARGEST).to(torch.bfloat16)
    scale_O = torch.where(scale_O == 0, torch.ones_like(scale_O), scale_O)
    rounded_OI = (wide_OI / scale_O.float().unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
    return rounded_OI.to(torch.int8), scale_O


class Int8Linear(RowScaledLinear):
    """A linear layer with weights of 8 bits."""

    weight_dtype, scale_dtype = torch.int8, torch.bfloat16
    rounded = staticmethod(quantize_int8)
