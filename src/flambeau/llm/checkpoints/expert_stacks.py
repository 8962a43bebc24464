"""Stacks of quantized experts [N, O, I] with a scale for each block (Step): they appear as a layer for each expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile

LEAVES = ("weight", "weight_scale_inv")


class StackFile:
    """A file in which stacks appear as their parts."""

    def __init__(self, file: WeightFile, stacks: frozenset[str]) -> None:
        self.path = file.path
        self._file, self._stacks = file, stacks
        self._parts: dict[str, tuple[StoredTensor, int]] = {}

    def __iter__(self) -> Iterator[StoredTensor]:
        for stored in self._file:
            layer, _, leaf = stored.name.rpartition(".")
            if layer not in self._stacks or leaf not in LEAVES:
                yield stored
                continue
            block, _, projection = layer.rpartition(".")
            for expert in range(stored.shape[0]):
                name = f"{block}.experts.{expert}.{projection}.{leaf}"
                self._parts[name] = stored, expert
                yield StoredTensor(self, name, torch.Size(stored.shape[1:]), stored.dtype)

    def read(self, name: str) -> Tensor:
        """The part of one expert."""
        stored, expert = self._parts[name]
        return stored.read()[expert]


def in_single_experts(files: list[WeightFile]) -> list[WeightFile]:
    """Files without stacks of experts that have scales."""
    shapes = {stored.name: len(stored.shape) for file in files for stored in file}
    names = (
        name.removesuffix(f".{LEAVES[1]}") for name, size in shapes.items() if size == 3 and name.endswith(LEAVES[1])
    )
    stacks = frozenset(name for name in names if shapes.get(f"{name}.{LEAVES[0]}") == 3)
    return [StackFile(file, stacks) for file in files] if stacks else files
