"""Parameters that the files of a family do not have, because they are known: zeros, or sines of positions."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from flambeau.llm.models.architecture import Architecture

POSITIONS = "model.embed_positions.weight"
LONGEST_WAVE = 10000.0  # of sines, in positions and radians


def may_lack(arch: Architecture, name: str) -> bool:
    """Whether files may have no tensor for a parameter."""
    return bool(arch.zeros and re.search(arch.zeros, name)) or (arch.sinusoids and name == POSITIONS)


def absent_value(arch: Architecture, name: str, parameter: Tensor, device: torch.device) -> Tensor:
    """What a parameter is that the files do not have."""
    if name == POSITIONS:
        return sinusoids(*parameter.shape).to(device, parameter.dtype)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)


def sinusoids(num_positions: int, size: int) -> Tensor:
    """Sines, then cosines, of each position at several frequencies."""
    frequencies = torch.exp(torch.arange(size // 2, dtype=torch.float32) * -(math.log(LONGEST_WAVE) / (size // 2 - 1)))
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
