"""Fp8Linear: weights as 8-bit floating point numbers (e4m3) with one scale for each output.

Shapes: I inputs · O outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from flambeau.llm.quantize.rows import RowScaledLinear

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max


def quantize_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit floating point numbers, and their scales: a row's largest number is the largest there is."""
    wide_OI = weight_OI.float()
    scale_O = wide_OI.abs().amax(dim=1) / LARGEST
    scale_O = torch.where(scale_O == 0, torch.ones_like(scale_O), scale_O)
    return (wide_OI / scale_O.unsqueeze(1)).clamp_(-LARGEST, LARGEST).to(DTYPE), scale_O


class Fp8Linear(RowScaledLinear):
    """A linear layer with weights of 8-bit floating point numbers."""

    weight_dtype, scale_dtype = DTYPE, torch.float32
    rounded = staticmethod(quantize_fp8)
