"""Weights in MXFP4 (gpt-oss), read as codes, fp8 or bfloat16: blocks of 32 numbers of 4 bits that share an exponent.

A stack of experts [N, I, O] is stored as `NAME_blocks` [N, O, I/32, 16], two numbers a byte, and `NAME_scales`
[N, O, I/32], the exponents plus 127.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flambeau.llm.checkpoints.layer_formats import UnpackedFiles
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.tensor_names import canonical_name
from flambeau.llm.quantize.coded import FP4
from flambeau.llm.quantize.row_scaled import FP8
from flambeau.llm.quantize.settings import QuantizationSettings

logger = logging.getLogger(__name__)

BLOCKS, SCALES = "_blocks", "_scales"
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
    """A file whose blocks appear as fp8 weights [N, O, I] with scales [N, O, I/32], which represent them exactly.

    Or they appear as codes [N, O, I/2] with scales in bfloat16, which represents powers of two.
    """

    def __init__(
        self, file: WeightFile, scales: dict[str, StoredTensor], *, interleaved_gates: bool, as_codes: bool = False
    ) -> None:
        self.path = file.path
        self._file, self._scales, self._interleaved = file, scales, interleaved_gates
        self._as_codes = as_codes

    def __iter__(self) -> Iterator[StoredTensor]:
        for stored in self._file:
            if stored.name.endswith(BLOCKS):
                count, rows, groups, size = stored.shape
                name = stored.name.removesuffix(BLOCKS)
                of_groups = torch.Size((count, rows, groups))
                if self._as_codes:
                    yield StoredTensor(self, f"{name}.weight", torch.Size((count, rows, groups * size)), torch.uint8)
                    yield StoredTensor(self, f"{name}.scales", of_groups, torch.bfloat16)
                else:
                    yield StoredTensor(self, f"{name}.weight", torch.Size((count, rows, groups * size * 2)), FP8)
                    yield StoredTensor(self, f"{name}.scale", of_groups, torch.float32)
            elif not stored.name.endswith(SCALES):
                yield stored

    def read(self, name: str) -> Tensor:
        """The numbers of a stack of experts, or their scales."""
        stack, _, leaf = name.rpartition(".")
        found = self._file.read(stack + BLOCKS).flatten(2) if leaf == "weight" else self._scales[stack].read()
        if self._interleaved and stack.endswith(".gate_up_proj"):
            found = torch.cat((found[:, ::2], found[:, 1::2]), dim=1)
        if leaf == "weight":
            return found if self._as_codes else fp4_as_fp8(found)
        return torch.exp2(found.float() - EXPONENT_BIAS).to(torch.bfloat16 if self._as_codes else torch.float32)


def keep_mxfp4(files: list[WeightFile], arch: Architecture, *, as_codes: bool = False) -> UnpackedFiles:
    """Files whose weights in MXFP4, if there are any, stay quantized: as codes of 4 bits, or as fp8."""
    packed, scales = packed_stacks(files), scales_of(files)
    if not packed:
        return UnpackedFiles(files)
    for stored in packed:
        name = stored.name.removesuffix(BLOCKS)
        if name not in scales or scales[name].shape != stored.shape[:3] or stored.shape[3] * 2 != GROUP:
            raise CheckpointError(f"{stored.file.path} has {stored.name}, but no file has fitting {name}{SCALES}")
    names = {canonical_name(stored.name.removesuffix(BLOCKS), arch.renames) for stored in packed}
    settings = QuantizationSettings(kind="fp8", block_size=GROUP, layers=frozenset(names))
    if as_codes:
        settings = replace(settings, kind="int4", table=FP4)
    options = {"interleaved_gates": arch.interleaved_gates, "as_codes": as_codes}
    return UnpackedFiles([KeptMxfp4File(file, scales, **options) for file in files], settings)


def fp4_as_fp8(pairs: Tensor) -> Tensor:
    """Pairs of 4-bit numbers […, P], the first in the lower half, to equal numbers of fp8 […, 2 * P]."""
    numbers = torch.tensor(FP4).to(FP8).view(torch.uint8)
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
    table = torch.tensor(FP4, dtype=torch.bfloat16)
    found = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16)
    for i, (block, scale) in enumerate(zip(blocks, scales, strict=True)):  # one expert at a time: the indices are large
        pairs = torch.stack((block & 0x0F, block >> 4), dim=-1).flatten(-2).int()
        numbers = torch.ldexp(table[pairs].float(), scale.int().unsqueeze(-1) - EXPONENT_BIAS)
        found[i] = numbers.flatten(-2).to(torch.bfloat16)
    return found
