"""Convolutions of gated delta nets that are stored apart for queries, keys and values (OLMo hybrid).

Its publisher writes the rows of each. transformers writes three pieces of one size under the same names, whatever the
parts are: these files appear as the publisher's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.tensor_names import CONVOLUTION_PART, canonical_name

PARTS = "qkv"


@dataclass(frozen=True, slots=True)
class ConvolutionRows:
    """Rows of the convolution, which lie in one or more of its pieces."""

    pieces: tuple[StoredTensor, ...]  # of the whole convolution, in order
    rows: slice

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows.stop - self.rows.start, *self.pieces[0].shape[1:]))

    def read(self) -> Tensor:
        return torch.cat([piece.read() for piece in self.pieces])[self.rows]


class ConvolutionFile:
    """A file in which some tensors are parts of others."""

    def __init__(self, file: WeightFile, parts: dict[str, ConvolutionRows]) -> None:
        self.path = file.path
        self._file, self._parts = file, parts

    def __iter__(self) -> Iterator[StoredTensor]:
        for stored in self._file:
            part = self._parts.get(stored.name)
            yield stored if part is None else StoredTensor(self, stored.name, part.shape, stored.dtype)

    def read(self, name: str) -> Tensor:
        """The rows of a part."""
        return self._parts[name].read()


def in_real_parts(files: list[WeightFile], arch: Architecture) -> list[WeightFile]:
    """Files whose convolutions are those of queries, keys and values."""
    recurrence = arch.recurrence
    if recurrence is None or recurrence.kind != "delta_net":
        return files
    keys = recurrence.num_groups * recurrence.state_size
    ends = (keys, 2 * keys, recurrence.conv_size)
    parts: dict[str, ConvolutionRows] = {}
    for pieces in pieces_of(files, arch):
        sizes = [piece.shape[0] for piece in pieces]
        if sum(sizes) == ends[-1] and sizes != [keys, keys, ends[-1] - ends[1]]:
            rows = [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]
            parts |= {piece.name: ConvolutionRows(pieces, own) for piece, own in zip(pieces, rows, strict=True)}
    return [ConvolutionFile(file, parts) for file in files] if parts else files


def pieces_of(files: list[WeightFile], arch: Architecture) -> Iterator[tuple[StoredTensor, ...]]:
    """The three pieces of each layer that has them."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for stored in (stored for file in files for stored in file):
        name = canonical_name(stored.name, arch.renames)
        if found := CONVOLUTION_PART.search(name):
            layers.setdefault(name[: found.start()], {})[found[1]] = stored
    for pieces in layers.values():
        if len(pieces) == len(PARTS):
            yield tuple(pieces[part] for part in PARTS)
