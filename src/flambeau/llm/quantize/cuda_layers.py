"""Layers whose small weights suit an NVIDIA GPU.

Int8Linear has no faster twin here: the kernels, or a compiler, make one of its plain form.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.quantize.cpu_layers import shaped
from flambeau.llm.quantize.fp8 import Fp8Linear, quantize_fp8
from flambeau.llm.quantize.int4 import Int4Linear, unpack_int4


class CudaInt4Linear(nn.Module):
    """Int4Linear with its weights in the order of the GPU's kernels: the two of a byte lie half a group apart."""

    def __init__(self, plain: Int4Linear) -> None:
        super().__init__()
        self.group_size = plain.group_size
        self.weight: Tensor
        self.scales: Tensor
        self.minimums: Tensor
        groups = unpack_int4(plain.weight).view(plain.out_features, -1, 2, plain.group_size // 2)
        self.register_buffer("weight", (groups[:, :, 0] << 4 | groups[:, :, 1]).flatten(1))
        self.register_buffer("scales", plain.scales)
        self.register_buffer("minimums", plain.minimums)
        self.bias = plain.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I] that are meant."""
        pairs = self.weight.view(len(self.weight), -1, self.group_size // 2)
        levels = torch.cat((pairs >> 4, pairs & 15), dim=2).to(dtype)
        scaled = torch.addcmul(self.minimums.to(dtype).unsqueeze(2), levels, self.scales.to(dtype).unsqueeze(2))
        return scaled.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]: many tokens are worth widening the weights for; for a few there are kernels."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


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
