"""Rotary positions: the angles of every position, and the turning of queries and keys by them.

The two halves of a head are the two coordinates, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flambeau.llm.models.architecture import Architecture, RopeScaling


def angles(arch: Architecture, length: int) -> tuple[Tensor, float]:
    """The angle [length, D/2] of each position and dimension, and the factor that scales cosine and sine."""
    inverse = 1.0 / arch.rope_theta ** (torch.arange(0, arch.head_size, 2, dtype=torch.float32) / arch.head_size)
    factor = 1.0
    scaling = arch.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        inverse = stretch_llama3(inverse, scaling)
    elif scaling is not None:
        inverse, factor = stretch_yarn(inverse, arch, scaling)
    return torch.outer(torch.arange(length, dtype=torch.float32), inverse), factor


def rotation_tables(arch: Architecture, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, D/2] of every position."""
    table, factor = angles(arch, length)
    return table.cos() * factor, table.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn […, heads, D] by the angles […, 1, D/2] of its tokens."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def stretch_llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow frequencies are slowed down by the factor, quick ones kept, those between blended."""
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((scaling.original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def stretch_yarn(inverse: Tensor, arch: Architecture, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Dimensions that turn often are kept, those that turn rarely are slowed down, with a ramp between."""

    def dimension(turns: float) -> float:
        ratio = scaling.original_length / (turns * 2 * math.pi)
        return arch.head_size * math.log(ratio) / (2 * math.log(arch.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, arch.head_size - 1)
    ramp = ((torch.arange(arch.head_size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    blended = inverse / scaling.factor * ramp + inverse * (1 - ramp)
    factor = scaling.attention_factor
    return blended, 0.1 * math.log(scaling.factor) + 1.0 if factor is None else factor
