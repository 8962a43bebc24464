"""Stack: the quantized weights of all experts, widened when they are used.

Shapes: N experts · O outputs · I inputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.quantize.fp8 import Fp8Linear
from flambeau.llm.quantize.int4 import Int4Linear, dequantize_groups
from flambeau.llm.quantize.int8 import Int8Linear
from flambeau.llm.quantize.rows import dequantize_rows


class Stack(nn.Module):
    """Stands where a parameter [N, O, I] stood, and is used like it."""

    def __init__(self, rows: Int8Linear | Int4Linear | Fp8Linear, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        for name, buffer in rows.named_buffers():
            self.register_buffer(name, buffer.view(num_experts, -1, *buffer.shape[1:]))

    def __len__(self) -> int:
        return len(self.get_buffer("weight"))

    def __getitem__(self, chosen: Any) -> Tensor:
        """The weights [O, I] of an expert, or […, O, I] of several."""
        buffers = {name: buffer[chosen] for name, buffer in self.named_buffers()}
        dequantize = dequantize_groups if "minimums" in buffers else dequantize_rows
        return dequantize(**buffers, dtype=self.dtype)

    def transpose(self, first: int, second: int) -> Tensor:
        """All weights, with two dimensions exchanged."""
        return self[:].transpose(first, second)


def as_rows(weight_NOI: Tensor) -> nn.Linear:
    """The weights of all experts as one linear layer, whose rows can be quantized like any others."""
    with torch.device("meta"):
        linear = nn.Linear(weight_NOI.shape[2], weight_NOI.shape[0] * weight_NOI.shape[1], bias=False)
    linear.weight = nn.Parameter(weight_NOI.detach().flatten(0, 1), requires_grad=False)
    return linear
