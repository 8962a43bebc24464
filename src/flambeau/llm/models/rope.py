"""Rotary position embeddings: the angles of every position, and the rotation of queries and keys.

The two halves of a head are the two coordinates, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from flambeau.llm.models.architecture import Architecture, RopeScaling

MAX_TABLE_LENGTH = 1 << 20
Angles = tuple[Tensor, Tensor]  # cosine and sine […, 1, D] of some positions


class Rotations(NamedTuple):
    """What attention needs to know of positions."""

    ordinary: Angles
    local: Angles  # of layers with a local theta
    query_scale: Tensor | None = None  # […, 1, 1]: what queries are multiplied with, of some layers
    log_positions: Tensor | None = None  # […, 1]
    positions: Tensor | None = None  # of tokens, in networks with compressed entries …
    inverse: tuple[Tensor, float] | None = None  # from one place to the next, and a factor: of means of keys (Qwen 4)
    of_starts: Mapping[int, Angles] = MappingProxyType({})  # … and by the length of a group: of the group's first token


class Rotation(nn.Module):
    """The cosine and sine of every position, in float32 whatever the type of the network.

    Tables have those of all positions, unless sequences may be so long that they would take gigabytes. With longrope,
    the first positions have the short factors; `for_length` replaces them while a longer sequence is computed.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        # Rotated layers differ in their heads only if those with a window have a rotation of their own.
        wide, local = layers_of_each_rotation(arch)
        given, arch = arch, arch.of_layer(wide)
        self.arch = arch
        self.cos: Tensor
        self.sin: Tensor
        self.inverse: Tensor
        self.switch_length = arch.switch_length
        self.has_tables = arch.max_length <= MAX_TABLE_LENGTH or self.switch_length is not None
        # Layers with a window may have a theta of their own, without scaling.
        theta = arch.local_rope_theta
        if theta:
            arch = replace(given.of_layer(local), rope_theta=theta, rope_scaling=None, local_rope_theta=None, shapes=())
        self.local = Rotation(arch) if theta else None
        # Rotations are multiplied with the exponentials of these.
        size = (self.arch.rotary_size or self.arch.head_size) // 2
        self.alpha = nn.Parameter(torch.zeros(size, dtype=torch.float32)) if self.arch.learned_rope else None
        self.make_tables(torch.get_default_device())

    def forward(self, positions: Tensor, rotary_3T: Tensor | None = None) -> Rotations:
        """What `rotate` needs for the positions […]; `rotary_3T` are others that rotate (see `position_axes`)."""
        if rotary_3T is not None:
            assert self.arch.position_axes, "the network rotates by one position only"
            angles = self.angles_of_axes(rotary_3T)
            return Rotations(angles, angles, query_scale(self.arch, positions))
        angles = self.angles(positions)
        local = self.local.angles(positions) if self.local is not None else angles
        if self.arch.compression is not None:
            rates = sorted({*self.arch.compression.rates} - {0})
            of_starts = {rate: self.angles((positions - (rate - 1)).clamp(min=0)) for rate in rates}
            return Rotations(angles, local, positions=positions, of_starts=of_starts)
        logs = torch.log(positions.float() + 1.0).unsqueeze(-1) if self.arch.position_scales else None
        has_means = self.arch.indexer is not None and self.arch.indexer.has_mean_keys
        inverse = (self.inverse, self.factor) if has_means else None
        return Rotations(angles, local, query_scale(self.arch, positions), logs, inverse=inverse)

    def angles(self, positions: Tensor) -> Angles:
        if self.has_tables:
            cos, sin = self.cos[positions], self.sin[positions]
        else:
            angles = positions.unsqueeze(-1).float() * self.inverse
            cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
            sin = -sin if self.arch.reversed_rope else sin
        return both_halves(cos, sin)

    def angles_of_axes(self, positions_3T: Tensor) -> Angles:
        """Each pair of dimensions is rotated by one of three positions of its token."""
        axes = torch.tensor(self.arch.position_axes, device=positions_3T.device)
        # Not from the tables: with a video, positions may be less than zero.
        angles = positions_3T[axes].T.float() * self.inverse
        return both_halves(angles.cos() * self.factor, angles.sin() * self.factor)

    @contextmanager
    def for_length(self, length: int) -> Iterator[None]:
        """Have the tables of a sequence of this length. They are changed in place: compiled code reads them."""
        if self.switch_length is None or length <= self.switch_length:
            yield
            return
        self._replace(self._long)
        try:
            yield
        finally:
            self._replace(self._short)

    @torch.inference_mode()
    def _replace(self, first: list[Tensor]) -> None:
        for table, rows in zip((self.cos, self.sin), first, strict=True):
            table[: len(rows)].copy_(rows)

    def make_tables(self, device: torch.device) -> None:
        is_empty = device.type == "meta" or not self.has_tables  # a network on the meta device has none yet
        length = 0 if is_empty else self.arch.max_length
        inverse, self.factor = inverse_wavelengths(self.arch)
        factors = None
        if self.alpha is not None and not self.alpha.is_meta:
            factors = self.alpha.detach().cpu().float().exp()
            inverse = inverse * factors
        self.register_buffer("inverse", inverse.to(device), persistent=False)
        tables = [table.to(device) for table in rotation_tables(self.arch, length, factors=factors)]
        if self.switch_length is not None:
            self._long = [table[: self.switch_length].clone() for table in tables]
            self._short = [table.to(device) for table in rotation_tables(self.arch, len(self._long[0]), is_long=False)]
            for table, short in zip(tables, self._short, strict=True):
                table[: len(short)] = short
        self.register_buffer("cos", tables[0], persistent=False)
        self.register_buffer("sin", tables[1], persistent=False)
        if self.local is not None:
            self.local.make_tables(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to the network's device, but keep float32: the tables are computed again."""
        self.make_tables(fn(self.cos).device)
        return self


def layers_of_each_rotation(arch: Architecture) -> tuple[int, int]:
    """A layer without a window, and one with it."""
    layers = range(arch.num_layers)
    wide = next((layer for layer in layers if arch.window(layer) is None and arch.of_layer(layer).rotary_size != 0), 0)
    return wide, next((layer for layer in layers if arch.window(layer) is not None), wide)


def both_halves(cos: Tensor, sin: Tensor) -> Angles:
    """[…, D/2] to […, 1, D], as `rotate` takes them."""
    return torch.cat((cos, cos), dim=-1).unsqueeze(-2), torch.cat((-sin, sin), dim=-1).unsqueeze(-2)


def query_scale(arch: Architecture, positions: Tensor) -> Tensor | None:
    """What the queries at these positions are multiplied with; None: nothing."""
    if not arch.temperature_length:
        return None
    first = 0.0 if arch.tempers_rotated else 1.0
    passed = torch.floor((positions.float() + first) / arch.temperature_length)
    return (torch.log1p(passed) * arch.temperature_scale + 1.0)[..., None, None]


def rotation_tables(
    arch: Architecture, length: int, *, is_long: bool = True, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, D/2] of every position, computed on the CPU so that all devices have the same.

    `is_long` chooses the factors of longrope; `factors` are of each rotation.
    """
    inverse, factor = inverse_wavelengths(arch, is_long=is_long)
    inverse = inverse if factors is None else inverse * factors
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), inverse)
    return angles.cos() * factor, angles.sin() * (-factor if arch.reversed_rope else factor)


def inverse_wavelengths(arch: Architecture, *, is_long: bool = True) -> tuple[Tensor, float]:
    """The rotation of each pair of dimensions per position, and the factor of cosine and sine."""
    size = arch.head_size if arch.rotary_size is None else max(2, arch.rotary_size)  # 0: nothing is rotated
    dimensions = torch.arange(0, size, 2, dtype=torch.float32, device="cpu")
    inverse = 1.0 / arch.rope_theta ** (dimensions / size)
    scaling = arch.rope_scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "proportional":
        num_rotated = int(scaling.proportion * size // 2)
        return inverse / scaling.factor * (torch.arange(size // 2, device="cpu") < num_rotated), 1.0
    if scaling.kind == "linear":
        return inverse / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return stretch_llama3(inverse, scaling), 1.0
    if scaling.kind == "longrope":
        factors = scaling.long_factors if is_long else scaling.short_factors
        inverse = inverse / torch.tensor(factors, dtype=torch.float32, device="cpu")
        return inverse, long_attention_factor(scaling, is_long=is_long)
    return stretch_yarn(inverse, arch, scaling), yarn_attention_factor(scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate […, heads, D] by the angles […, 1, D] of its tokens; the sine of the first half is negative."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return torch.addcmul(wide * cos, torch.cat((second, first), dim=-1), sin).to(x.dtype)


def unpaired(x: Tensor) -> Tensor:
    """[…, D] whose pairs of coordinates lie side by side: the first ones of all pairs, then the second ones."""
    return torch.unflatten(x, -1, (-1, 2)).transpose(-1, -2).flatten(-2)


def stretch_llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((scaling.original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def stretch_yarn(inverse: Tensor, arch: Architecture, scaling: RopeScaling) -> Tensor:
    """High frequencies are kept, low ones divided by the factor, with a ramp between."""

    size = arch.rotary_size or arch.head_size

    def dimension(turns: float) -> float:
        ratio = scaling.original_length / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(arch.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    places = torch.arange(size // 2, dtype=torch.float32, device="cpu")
    ramp = ((places - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)


def long_attention_factor(scaling: RopeScaling, *, is_long: bool) -> float:
    mscale = scaling.long_mscale if is_long else scaling.short_mscale
    if mscale is not None:
        return mscale
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length)) if scaling.factor > 1 else 1.0


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosine and sine that keeps attention sharp over longer texts."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dimensions:
        return sharpness(scaling.mscale) / sharpness(scaling.mscale_all_dimensions)
    return sharpness(1.0)
