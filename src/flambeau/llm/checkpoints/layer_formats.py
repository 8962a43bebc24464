"""How other tools store linear layers, and the files whose layers appear in a form that the network can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.config import Quantization
from flambeau.llm.quantize.coded import CodeLayout
from flambeau.llm.quantize.settings import PartLayout, QuantizationSettings

Layout = tuple[Quantization, int] | CodeLayout  # a kind and the size of its groups, 0 if it has none; or codes
Parts = Mapping[str, StoredTensor]  # the stored tensors of a layer, by the ends of their names


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is computed from stored ones when it is read."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    stored: StoredTensor | None = None  # of which it is an unchanged copy


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """The weights of one linear layer, dequantized or in our own layout."""

    weight: LazyTensor  # [outputs, inputs]
    layout: Layout | None = None  # None: only dequantized, or codes
    own: Mapping[str, LazyTensor] = field(default_factory=dict)  # tensors of that layout by their names in a layer
    codes: CodeLayout | None = None  # codes of 4 bits, which some kernels multiply; None: it has no such form
    coded: Mapping[str, LazyTensor] = field(default_factory=dict)  # tensors of that form: of a CodedLinear
    groups: PartLayout | None = None  # in groups, which only kernels multiply fast; None: it has no such form
    levels: Mapping[str, LazyTensor] = field(default_factory=dict)  # tensors of that form


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormat:
    """How a method of quantization stores a linear layer."""

    title: str  # for log lines
    markers: tuple[str, ...]  # ends of names: a layer that has one of these tensors is quantized
    leaves: frozenset[str]  # the ends of the names of all tensors that the layer's weights are made of
    read: Callable[[str, Parts], PackedLayer]  # raises CheckpointError for tensors that do not fit
    unused: tuple[str, ...] = ()  # ends of names of tensors without an effect here
    remark: str = ""  # on what is done otherwise than the method says


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptForms:
    """The forms that quantized weights keep beside our own layouts. Weights in others are dequantized."""

    blocks: bool = False  # fp8 with several scales for a row
    codes: bool = False  # 4 bits that index a table
    groups: Literal["cpu", "gpu"] | None = None  # integers in groups, as the kernels of this kind of device read them


NO_FORMS = KeptForms()


@dataclass(frozen=True, slots=True)
class UnpackedFiles:
    """Files with tensors that the network can take, and how the network has to be quantized for them."""

    files: list[WeightFile]
    settings: QuantizationSettings | None = None
    message: str = ""  # one line on what was done
    is_smaller: bool = True  # no layer was dequantized


class UnpackedFile:
    """A file whose quantized layers appear as other tensors."""

    def __init__(self, file: WeightFile, replaced: Mapping[str, Mapping[str, LazyTensor]]) -> None:
        self.path: Path = file.path
        self._file, self._replaced = file, replaced
        self._lazy = {name: tensor for tensors in replaced.values() for name, tensor in tensors.items()}

    def __iter__(self) -> Iterator[StoredTensor]:
        for stored in self._file:
            if stored.name not in self._replaced:
                yield stored
                continue
            for name, tensor in self._replaced[stored.name].items():
                if tensor.stored is not None and tensor.stored.name == name:
                    yield tensor.stored  # which threads may copy to a GPU
                else:
                    yield StoredTensor(self, name, tensor.shape, tensor.dtype)

    def read(self, name: str) -> Tensor:
        """A tensor in the form that the network takes."""
        return self._lazy[name].read()
