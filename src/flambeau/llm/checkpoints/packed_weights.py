"""Weight files that were quantized elsewhere, read into our own layouts where these fit exactly, else dequantized.

A `LayerFormat` turns the stored tensors of one linear layer into a `PackedLayer`. `unpack` decides which layers keep
their quantized weights, before any weight is read: a module of the network does if all projections fused in it can be
stored in the same layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from flambeau.llm.checkpoints.group_choice import GroupChoice, better_choice
from flambeau.llm.checkpoints.layer_formats import (
    NO_FORMS,
    KeptForms,
    LayerFormat,
    LazyTensor,
    PackedLayer,
    UnpackedFile,
    UnpackedFiles,
)
from flambeau.llm.checkpoints.layout_choice import choose_layout
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.tensor_names import canonical_name
from flambeau.llm.quantize.settings import QuantizationSettings

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def unpack(
    files: list[WeightFile],
    arch: Architecture,
    layer_format: LayerFormat,
    forms: KeptForms = NO_FORMS,
) -> UnpackedFiles:
    """The files with their quantized layers in a form that the network can take."""
    tensors = {stored.name: stored for file in files for stored in file}
    marked = marked_layers(tensors, layer_format.markers)
    if not marked:
        raise CheckpointError(
            f"config.json says that the weights are quantized ({layer_format.title}), but no file has a tensor "
            f"{' or '.join(layer_format.markers)}; download the checkpoint again, or remove quantization_config"
        )
    check_scales(tensors, marked, layer_format)
    layers = {name: as_stored(arch, name, read_layer(name, tensors, layer_format)) for name in marked}
    if forms.codes:
        layers = {name: with_codes(layer) for name, layer in layers.items()}
    settings, kept = choose_layout(arch, layers, keeps_blocks=forms.blocks)
    message = describe(layer_format.title, layers, kept, settings, layer_format.remark)
    replaced: dict[str, Mapping[str, LazyTensor]] = {}
    for name, layer in layers.items():
        leaves = layer.own if name in kept else {"weight": layer.weight}
        replaced |= {f"{name}.{leaf}": {} for leaf in layer_format.leaves}
        replaced[marked[name]] = {f"{name}.{leaf}": value for leaf, value in leaves.items()}
    if forms.groups and (choice := better_choice(arch, layers, tensors, kept)) is not None:
        settings, kept = choice.settings, frozenset(name.removesuffix(".weight") for name in choice.kept)
        message = describe_groups(layer_format.title, choice, layer_format.remark)
        replaced |= {name: parts for name, parts in choice.replaced.items() if name not in choice.layers}  # floats
        for name, layer in layers.items():
            dequantized = {f"{name}.weight": layer.weight}
            replaced[marked[name]] = choice.replaced.get(f"{name}.weight", dequantized)
    replaced |= {name: {} for name in tensors if name.endswith(tuple(f".{leaf}" for leaf in layer_format.unused))}
    opened: list[WeightFile] = [UnpackedFile(file, replaced) for file in files]
    return UnpackedFiles(opened, settings, message, is_smaller=len(kept) == len(layers))


def check_scales(tensors: Mapping[str, StoredTensor], marked: Iterable[str], layer_format: LayerFormat) -> None:
    """Raise for numbers of fp8 that no scale belongs to: they would be taken for the weights themselves."""
    known = {f"{name}.{leaf}" for name in marked for leaf in layer_format.leaves}
    alone = sorted(name for name, stored in tensors.items() if stored.dtype in FP8_TYPES and name not in known)
    if alone:
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        raise CheckpointError(
            f"config.json says that the weights are quantized ({layer_format.title}), but no file has a scale for the "
            f"fp8 numbers of {alone[0]}{more}; download the checkpoint again"
        )


def marked_layers(names: Iterable[str], markers: Sequence[str]) -> dict[str, str]:
    """The quantized layers, and the tensor of each that marks it."""
    known = dict.fromkeys(names)
    ends = [(name, marker) for name in known for marker in markers if name.endswith(f".{marker}")]
    marked = {name.removesuffix(f".{marker}"): name for name, marker in ends}
    # Other modules may have a parameter of that name.
    return {name: marker for name, marker in marked.items() if marker != f"{name}.scale" or f"{name}.weight" in known}


def read_layer(name: str, tensors: Mapping[str, StoredTensor], layer_format: LayerFormat) -> PackedLayer:
    parts = {leaf: tensors[f"{name}.{leaf}"] for leaf in layer_format.leaves if f"{name}.{leaf}" in tensors}
    return layer_format.read(name, parts)


def with_codes(layer: PackedLayer) -> PackedLayer:
    """A layer whose own layout is that of its codes, if it has any."""
    return layer if layer.codes is None else replace(layer, layout=layer.codes, own=layer.coded)


def as_stored(arch: Architecture, name: str, layer: PackedLayer) -> PackedLayer:
    """A layer as the family's files have it: tools quantize linear layers, also those that GPT-2 stores transposed."""
    if not arch.transposed or not re.search(arch.transposed, canonical_name(f"{name}.weight", arch.renames)):
        return layer
    weight = layer.weight
    return PackedLayer(weight=LazyTensor(weight.shape[::-1], weight.dtype, lambda: weight.read().t()))


def describe_groups(title: str, choice: GroupChoice, remark: str = "") -> str:
    """One line on what stays quantized and what is dequantized."""
    bits = Counter(layout.bits for name in choice.kept if (layout := choice.layers[name].groups) is not None)
    parts = [f"{counted(count, 'tensor')} {verb(count, 'stay')} int{each}" for each, count in sorted(bits.items())]
    others = [layer.weight.shape.numel() for name, layer in choice.layers.items() if name not in choice.kept]
    if others:
        parts.append(dequantized("tensor", others))
    return f"weights quantized by {title}: {', '.join(parts)}{f'; {remark}' if remark else ''}"


def describe(
    title: str,
    layers: Mapping[str, PackedLayer],
    kept: frozenset[str],
    settings: QuantizationSettings | None,
    remark: str = "",
) -> str:
    """One line on what stays quantized and what is dequantized."""
    others = [layer.weight.shape.numel() for name, layer in layers.items() if name not in kept]
    parts = []
    if settings is not None:
        group = f" in groups of {settings.group_size}" if settings.kind == "int4" else ""
        group = f" in blocks of {settings.block_size} inputs" if settings.block_size else group
        parts.append(f"{counted(len(kept), 'layer')} {verb(len(kept), 'stay')} {settings.title}{group}")
    if others:
        parts.append(dequantized("layer", others))
    return f"weights quantized by {title}: {', '.join(parts)}{f'; {remark}' if remark else ''}"


def dequantized(noun: str, sizes: Sequence[int]) -> str:
    """Words on weights of so many numbers."""
    count, size = len(sizes), sum(sizes) * 2
    words = f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB" if size >= 5e4 else f"{size} bytes"
    are = "is" if count == 1 else "are"
    return f"{counted(count, noun)} {are} dequantized and {verb(count, 'take')} {words} in 16 bits"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def verb(count: int, word: str) -> str:
    return f"{word}s" if count == 1 else word
