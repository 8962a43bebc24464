"""Slopes of heads: how fast scores fall (ALiBi), and how fast states decay (lightning attention)."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slope of each head [H]; computed on the device, as a captured graph copies nothing from the host."""
    power = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is not above the number of heads
    first = torch.arange(1, power + 1, device=device) / power
    more = (2 * torch.arange(num_heads - power, device=device) + 1) / (2 * power)
    return torch.exp2(-8.0 * torch.cat((first, more)))
