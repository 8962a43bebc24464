"""Layers that read small weights as they are, on an NVIDIA GPU.

Int8Linear has no faster twin here: a compiler makes one of its plain form.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flambeau.llm.quantize.cpu_layers import scales_and_zeros, shaped
from flambeau.llm.quantize.fp8 import Fp8Linear, quantize_fp8
from flambeau.llm.quantize.int4 import Int4Linear


class CudaInt4Linear(nn.Module):
    """Int4Linear with its weights in the order of tensor cores; for bfloat16."""

    INNER_K_TILES = (8, 4, 2)  # tiles of 16 inputs that lie together; the most that fit

    def __init__(self, plain: Int4Linear) -> None:
        super().__init__()
        self.group_size = plain.group_size
        self.weight: Tensor
        self.scales_and_zeros: Tensor
        tiles = next((n for n in self.INNER_K_TILES if plain.in_features % (16 * n) == 0), 0)
        if not tiles or plain.out_features % 8:
            raise ValueError(f"{plain.out_features}x{plain.in_features} does not divide into tiles")
        self.register_buffer("weight", torch._convert_weight_to_int4pack(plain.weight, tiles))
        self.register_buffer("scales_and_zeros", scales_and_zeros(plain))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        y = torch._weight_int4pack_mm(x.flatten(0, -2), self.weight, self.group_size, self.scales_and_zeros)
        return shaped(y, x, self.bias)


class CudaFp8Linear(nn.Module):
    """Fp8Linear on tensor cores that multiply 8-bit numbers: inputs are rounded too, each token by its own scale."""

    def __init__(self, plain: Fp8Linear) -> None:
        super().__init__()
        if plain.in_features % 16 or plain.out_features % 16:
            raise ValueError(f"{plain.out_features}x{plain.in_features} does not divide into tiles")
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", plain.weight)
        self.register_buffer("scale", plain.scale.unsqueeze(0))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        small, scale = quantize_fp8(x.flatten(0, -2))
        y = torch._scaled_mm(
            small, self.weight.t(), scale_a=scale.unsqueeze(1), scale_b=self.scale, out_dtype=torch.bfloat16
        )
        return shaped(y, x, self.bias)
