"""Weights in MXFP4 (gpt-oss), read as bfloat16: blocks of 32 numbers of 4 bits that share an exponent.

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

logger = logging.getLogger(__name__)

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
EXPONENT_BIAS = 127


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


def read_mxfp4(files: list[WeightFile]) -> list[WeightFile]:
    """Files whose weights in MXFP4, if there are any, are dequantized when they are read."""
    tensors = [stored for file in files for stored in file]
    packed = [stored for stored in tensors if stored.name.endswith(BLOCKS) and stored.dtype == torch.uint8]
    if not packed:
        return files
    scales = {one.name.removesuffix(SCALES): one for one in tensors if one.name.endswith(SCALES)}
    size_gb = sum(one.num_bytes for one in packed) / 1e9
    logger.warning(
        "%s: %.1f GB of weights in MXFP4 are dequantized to bfloat16 and take %.1f GB",
        files[0].path,
        size_gb,
        4 * size_gb,
    )
    return [Mxfp4File(file, scales) for file in files]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks [N, O, I/32, 16] and exponents [N, O, I/32] to numbers [N, O, I]; exact in bfloat16."""
    table = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    found = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16)
    for i, (block, scale) in enumerate(zip(blocks, scales, strict=True)):  # one expert at a time: the indices are large
        pairs = torch.stack((block & 0x0F, block >> 4), dim=-1).flatten(-2).int()
        numbers = torch.ldexp(table[pairs].float(), scale.int().unsqueeze(-1) - EXPONENT_BIAS)
        found[i] = numbers.flatten(-2).to(torch.bfloat16)
    return found
