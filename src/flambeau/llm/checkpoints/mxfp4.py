"""Weights in MXFP4 (gpt-oss), read as fp8 or as bfloat16: blocks of 32 numbers of 4 bits that share an exponent.

A stack of experts [N, I, O] is stored as `NAME_blocks` [N, O, I/32, 16], two numbers a byte, and `NAME_scales`
[N, O, I/32], the exponents plus 127.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.tensor_names import canonical_name
from flambeau.llm.quantize.row_scaled import FP8
from flambeau.llm.quantize.settings import QuantizationSettings

logger = logging.getLogger(__name__)

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
EXPONENT_BIAS = 127
GROUP = 32
PAIRS_AT_ONCE = 1 << 20


class Mxfp4File:
    """A file whose blocks appear as the tensors that they stand for."""

    def __init__(self, file: WeightFile, scales: dict[str, StoredTensor]) -> None:
        self.path = file.path
        self._file, self._scales = file, scales

    def __iter__(self) -> Iterator[StoredTensor]:
        for stored in self._file:
            if stored.name.endswith(BLOCKS):
                count, rows, groups, size = stored.shape
                name = stored.name.removesuffix(BLOCKS)
                yield StoredTensor(self, name, torch.Size((count, groups * size * 2, rows)), torch.bfloat16)
            elif not stored.name.endswith(SCALES):
                yield stored

    def read(self, name: str) -> Tensor:
        """The numbers of a stack of experts."""
        blocks = self._file.read(name + BLOCKS)
        if name not in self._scales:
            raise CheckpointError(f"{self.path} has {name}{BLOCKS}, but no file has {name}{SCALES}")
        return dequantize_mxfp4(blocks, self._scales[name].read()).transpose(1, 2)


def packed_stacks(files: list[WeightFile]) -> list[StoredTensor]:
    """The blocks of experts in MXFP4."""
    tensors = [stored for file in files for stored in file]
    return [stored for stored in tensors if stored.name.endswith(BLOCKS) and stored.dtype == torch.uint8]


def read_mxfp4(files: list[WeightFile]) -> list[WeightFile]:
    """Files whose weights in MXFP4, if there are any, are dequantized when they are read."""
    packed = packed_stacks(files)
    if not packed:
        return files
    size_gb = sum(one.num_bytes for one in packed) / 1e9
    logger.warning(
        "%s: %.1f GB of weights in MXFP4 are dequantized to bfloat16 and take %.1f GB",
        files[0].path,
        size_gb,
        4 * size_gb,
    )
    return [Mxfp4File(file, scales_of(files)) for file in files]


def scales_of(files: list[WeightFile]) -> dict[str, StoredTensor]:
    """The exponents of each stack of experts."""
    tensors = [stored for file in files for stored in file if stored.name.endswith(SCALES)]
    return {stored.name.removesuffix(SCALES): stored for stored in tensors}


class KeptMxfp4File:
    """A file whose blocks appear as fp8 weights [N, O, I] with scales [N, O, I/32], which represent them exactly."""

    def __init__(self, file: WeightFile, scales: dict[str, StoredTensor], *, interleaved_gates: bool) -> None:
        self.path = file.path
        self._file, self._scales, self._interleaved = file, scales, interleaved_gates

    def __iter__(self) -> Iterator[StoredTensor]:
        for stored in self._file:
            if stored.name.endswith(BLOCKS):
                count, rows, groups, size = stored.shape
                name = stored.name.removesuffix(BLOCKS)
                yield StoredTensor(self, f"{name}.weight", torch.Size((count, rows, groups * size * 2)), FP8)
                yield StoredTensor(self, f"{name}.scale", torch.Size((count, rows, groups)), torch.float32)
            elif not stored.name.endswith(SCALES):
                yield stored

    def read(self, name: str) -> Tensor:
        """The numbers of a stack of experts, or their scales."""
        stack, _, leaf = name.rpartition(".")
        if leaf == "weight":
            found = fp4_as_fp8(self._file.read(stack + BLOCKS).flatten(2))
        else:
            found = torch.exp2(self._scales[stack].read().float() - EXPONENT_BIAS)
        if self._interleaved and stack.endswith(".gate_up_proj"):
            numbers = found.view(torch.uint8) if leaf == "weight" else found
            found = torch.cat((numbers[:, ::2], numbers[:, 1::2]), dim=1).view(found.dtype)
        return found


def keep_mxfp4(files: list[WeightFile], arch: Architecture) -> tuple[list[WeightFile], QuantizationSettings | None]:
    """Files whose weights in MXFP4 stay quantized, and the settings of a network for them; None: there are none."""
    packed, scales = packed_stacks(files), scales_of(files)
    if not packed:
        return files, None
    for stored in packed:
        name = stored.name.removesuffix(BLOCKS)
        if name not in scales or scales[name].shape != stored.shape[:3] or stored.shape[3] * 2 != GROUP:
            raise CheckpointError(f"{stored.file.path} has {stored.name}, but no file has fitting {name}{SCALES}")
    names = {canonical_name(stored.name.removesuffix(BLOCKS), arch.renames) for stored in packed}
    settings = QuantizationSettings(kind="fp8", block_size=GROUP, layers=frozenset(names))
    kept: list[WeightFile] = [KeptMxfp4File(file, scales, interleaved_gates=arch.interleaved_gates) for file in files]
    return kept, settings


def fp4_as_fp8(pairs: Tensor) -> Tensor:
    """Pairs of 4-bit numbers […, P], the first in the lower half, to equal numbers of fp8 […, 2 * P]."""
    numbers = torch.tensor((*VALUES, *(-value for value in VALUES))).to(FP8).view(torch.uint8)
    codes = torch.arange(256)
    table = torch.stack((numbers[codes & 15], numbers[codes >> 4]), dim=1).view(torch.int16).flatten()
    flat = pairs.contiguous().flatten()
    found = torch.empty(len(flat), dtype=torch.int16)
    for start in range(0, len(flat), PAIRS_AT_ONCE):  # the indices are larger than the numbers
        some = slice(start, start + PAIRS_AT_ONCE)
        found[some] = table[flat[some].int()]
    return found.view(FP8).view(*pairs.shape[:-1], -1)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks [N, O, I/32, 16] and exponents [N, O, I/32] to numbers [N, O, I]; exact in bfloat16."""
    table = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    found = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16)
    for i, (block, scale) in enumerate(zip(blocks, scales, strict=True)):  # one expert at a time: the indices are large
        pairs = torch.stack((block & 0x0F, block >> 4), dim=-1).flatten(-2).int()
        numbers = torch.ldexp(table[pairs].float(), scale.int().unsqueeze(-1) - EXPONENT_BIAS)
        found[i] = numbers.flatten(-2).to(torch.bfloat16)
    return found
