"""Layers that read small weights as they are, on a CPU.

PyTorch's operations for this compute in bfloat16, which costs less precision than the weights have lost. A token's
result does not depend on how many there are, so that texts stay the same whatever the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flambeau.llm.quantize.int4 import Int4Linear, unpack_int4
from flambeau.llm.quantize.int8 import Int8Linear

ALIGNMENT_BYTES = 64


class CpuInt8Linear(nn.Module):
    """Int8Linear without widening its weights."""

    def __init__(self, plain: Int8Linear) -> None:
        super().__init__()
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", aligned(plain.weight))
        self.register_buffer("scale", aligned(plain.scale))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        flat = x.flatten(0, -2).to(torch.bfloat16)
        y = torch._weight_int8pack_mm(flat, self.weight, self.scale)
        return shaped(y, x, self.bias)


class CpuInt4Linear(nn.Module):
    """Int4Linear with its weights in the order in which PyTorch reads them."""

    def __init__(self, plain: Int4Linear) -> None:
        super().__init__()
        self.group_size = plain.group_size
        self.weight: Tensor
        self.scales_and_zeros: Tensor
        levels = unpack_int4(plain.weight).to(torch.int32)
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1))
        self.register_buffer("scales_and_zeros", scales_and_zeros(plain))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        flat = x.flatten(0, -2).to(torch.bfloat16)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.weight, self.group_size, self.scales_and_zeros)
        return shaped(y, x, self.bias)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor where PyTorch may read it: a mapped file has it anywhere, and its int8 kernel crashes on that."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


def shaped(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs [tokens, O] in the type and leading dimensions of the inputs, with the bias."""
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def scales_and_zeros(plain: Int4Linear) -> Tensor:
    """[groups, outputs, 2] as PyTorch wants them: its zero is the value of level 8, not of level 0."""
    zeros = plain.minimums.float() + 8 * plain.scales.float()
    pairs = torch.stack((plain.scales, zeros.to(plain.scales.dtype)), dim=2)
    return pairs.transpose(0, 1).contiguous()
