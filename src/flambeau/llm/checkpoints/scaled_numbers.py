"""Layers from integers or floating point numbers of 8 bits, with a scale for all, for each row, group or block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flambeau.llm.checkpoints.layer_formats import LazyTensor, PackedLayer, Parts
from flambeau.llm.checkpoints.mxfp4 import EXPONENT_BIAS
from flambeau.llm.checkpoints.packed_layouts import eight_bit_layer, ill_formed
from flambeau.llm.checkpoints.weight_files import StoredTensor

Sizes = tuple[int, int]
NUMBERS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledNumbers:
    """Stored numbers [O, I], with a scale and perhaps a zero for each block of them."""

    weight: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None
    blocks: Sizes  # their number in rows and columns
    size: Sizes  # of a block

    def whole(self) -> Tensor:
        """The weights that they stand for."""
        value = self.weight.read().float()
        if self.zero is not None:
            value = value.sub_(in_blocks(self._zeros(self.zero), self.size, value.shape))
        return value.mul_(in_blocks(self._scales(), self.size, value.shape))

    def levels(self) -> Tensor:
        """Integers without a sign, whose zero is in the middle."""
        return self.weight.read().view(torch.uint8) ^ 128

    def row_scales(self) -> Tensor:
        """The scales of the blocks of each row."""
        return self._of_rows(self._scales())

    def row_zeros(self) -> Tensor:
        """The zeros of the blocks of each row, as levels."""
        assert self.zero is not None
        return self._of_rows(self._zeros(self.zero)) + 128

    def _scales(self) -> Tensor:
        return scale_values(self.scale.read()).reshape(self.blocks)

    def _zeros(self, zero: StoredTensor) -> Tensor:
        return zero.read().float().reshape(self.blocks)

    def _of_rows(self, values: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        return in_blocks(values, (self.size[0], 1), torch.Size((rows, self.blocks[1]))).expand(rows, -1)


def scaled_layer(
    name: str,
    parts: Parts,
    weight: StoredTensor,
    scale: StoredTensor,
    *,
    zero: StoredTensor | None = None,
    block: Sequence[int] | None = None,
    has_bytes: bool = True,
) -> PackedLayer:
    """A layer of such numbers; `block` is the size of blocks that the configuration declares.

    Without `has_bytes`, integers may be much smaller than their type: zeros would be rounded too far beside them.
    """
    found = scale_blocks(weight.shape, scale.shape, block) if len(weight.shape) == 2 else None
    if found is None or weight.dtype not in NUMBERS:
        raise ill_formed(name, parts)
    if zero is not None and not zero.read().any():
        zero = None
    (rows, columns), (blocks, size) = weight.shape, found
    numbers = ScaledNumbers(weight=weight, scale=scale, zero=zero, blocks=blocks, size=size)
    whole = LazyTensor(weight.shape, torch.float32, numbers.whole)
    is_integer, has_groups = weight.dtype == torch.int8, columns % size[1] == 0
    layer = PackedLayer(weight=whole)
    if is_integer and has_groups and (zero is None or has_bytes):
        zeros = None if zero is None else numbers.row_zeros
        layer = eight_bit_layer(whole, size[1], levels=numbers.levels, scales=numbers.row_scales, zeros=zeros)
    if zero is not None or weight.dtype == torch.float8_e5m2:
        return layer
    unchanged = LazyTensor(weight.shape, weight.dtype, weight.read, stored=weight)
    if size[1] == columns:
        of_rows = LazyTensor(torch.Size((rows,)), torch.float32, lambda: numbers.row_scales().flatten())
        return replace(layer, layout=("int8" if is_integer else "fp8", 0), own={"weight": unchanged, "scale": of_rows})
    if is_integer or not has_groups:
        return layer
    of_blocks = LazyTensor(torch.Size((rows, blocks[1])), torch.float32, numbers.row_scales)
    return replace(layer, layout=("fp8", size[1]), own={"weight": unchanged, "scale": of_blocks})


def scale_blocks(shape: torch.Size, scale: torch.Size, block: Sequence[int] | None) -> tuple[Sizes, Sizes] | None:
    """How many blocks of a matrix have a scale each, in rows and columns, and their size; None: the scales do not fit.

    Scales with the shape of the declared blocks are taken for these, even if there are as many as rows.
    """
    rows, columns = shape
    number = scale.numel()
    if block and (scale == (by := (-(-rows // block[0]), -(-columns // block[1]))) or is_spread(scale, by)):
        return by, (block[0], block[1])
    if number == 1:
        return (1, 1), (rows, columns)
    if scale in ((rows,), (rows, 1), (1, rows)):
        return (rows, 1), (1, columns)
    if len(scale) == 2 and scale[0] == rows and columns % scale[1] == 0:
        return (rows, scale[1]), (1, columns // scale[1])
    return None


def is_spread(scale: torch.Size, blocks: Sizes) -> bool:
    """Whether scales have the shape of blocks among dimensions of 1, as ModelOpt's have."""
    return len(scale) > 2 and tuple(scale[::2]) == blocks and scale.numel() == blocks[0] * blocks[1]


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents of 2 (MX formats)."""
    return torch.exp2(scale.float() - EXPONENT_BIAS) if scale.dtype == torch.uint8 else scale.float()


def in_blocks(values: Tensor, size: Sequence[int], shape: torch.Size) -> Tensor:
    """The value of its block for each number of a matrix; the last blocks may be cut off."""
    for dim in (0, 1):
        if values.shape[dim] > 1 and size[dim] > 1:
            values = values.repeat_interleave(size[dim], dim=dim)
    return values[: shape[0], : shape[1]]
