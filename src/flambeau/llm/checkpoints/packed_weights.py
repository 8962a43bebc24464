"""Weight files that were quantized elsewhere, read into our own layouts where these fit exactly, else dequantized.

A `LayerFormat` turns the stored tensors of one linear layer into a `PackedLayer`. `unpack` decides which layers keep
their quantized weights, before any weight is read: a module of the network does if all projections fused in it can be
stored in the same layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.tensor_names import INTERLEAVED, canonical_name, layouts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.coded import CodeLayout
from flambeau.llm.quantize.groups import GroupLayout
from flambeau.llm.quantize.settings import PartLayout, QuantizationSettings
from flambeau.llm.quantize.settings import Parts as GroupParts

EMBEDDINGS = "model.embed_tokens"
OWN_EMBEDDINGS = "model.layer_inputs.embed_tokens"  # of layers
ROW_TABLES = (EMBEDDINGS, OWN_EMBEDDINGS)
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
Layout = tuple[Quantization, int] | CodeLayout  # a kind and the size of its groups, 0 if it has none; or codes


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


Parts = Mapping[str, StoredTensor]  # the stored tensors of a layer, by the ends of their names


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormat:
    """How a method of quantization stores a linear layer."""

    title: str  # for log lines
    markers: tuple[str, ...]  # ends of names: a layer that has one of these tensors is quantized
    leaves: frozenset[str]  # the ends of the names of all tensors that the layer's weights are made of
    read: Callable[[str, Parts], PackedLayer]  # raises CheckpointError for tensors that do not fit
    unused: tuple[str, ...] = ()  # ends of names of tensors without an effect here
    remark: str = ""  # on what is done otherwise than the method says


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


def unpack(
    files: list[WeightFile],
    arch: Architecture,
    layer_format: LayerFormat,
    *,
    keeps_blocks: bool = False,
    keeps_codes: bool = False,
    keeps_groups: bool = False,
) -> UnpackedFiles:
    """The files with their quantized layers in a form that the network can take.

    Without `keeps_blocks`, fp8 with several scales for a row is dequantized. With `keeps_codes`, codes of 4 bits stay;
    with `keeps_groups`, integers of 8 bits in groups or with zeros do.
    """
    tensors = {stored.name: stored for file in files for stored in file}
    marked = marked_layers(tensors, layer_format.markers)
    if not marked:
        raise CheckpointError(
            f"config.json says that the weights are quantized ({layer_format.title}), but no file has a tensor "
            f"{' or '.join(layer_format.markers)}; download the checkpoint again, or remove quantization_config"
        )
    check_scales(tensors, marked, layer_format)
    layers = {name: as_stored(arch, name, read_layer(name, tensors, layer_format)) for name in marked}
    if keeps_codes:
        layers = {name: with_codes(layer) for name, layer in layers.items()}
    settings, kept = choose_layout(arch, layers, keeps_blocks=keeps_blocks)
    message = describe(layer_format.title, layers, kept, settings, layer_format.remark)
    replaced: dict[str, Mapping[str, LazyTensor]] = {}
    for name, layer in layers.items():
        leaves = layer.own if name in kept else {"weight": layer.weight}
        replaced |= {f"{name}.{leaf}": {} for leaf in layer_format.leaves}
        replaced[marked[name]] = {f"{name}.{leaf}": value for leaf, value in leaves.items()}
    if keeps_groups and (choice := better_choice(arch, layers, tensors, kept)) is not None:
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


def choose_layout(
    arch: Architecture, layers: Mapping[str, PackedLayer], *, keeps_blocks: bool = False
) -> tuple[QuantizationSettings | None, frozenset[str]]:
    """The settings of a network for these layers, and the layers that stay quantized in it."""
    if is_rearranged(arch, layers):
        return None, frozenset()
    sizes: Counter[Layout] = Counter()
    for layer in layers.values():
        if layer.layout is not None and (keeps_blocks or not has_blocks(layer.layout)):
            sizes[layer.layout] += layer.weight.shape.numel()
    if not sizes:
        return None, frozenset()
    most, _ = sizes.most_common(1)[0]
    settings = settings_for(most)
    canonical = {canonical_name(f"{name}.weight", arch.renames): name for name in layers}
    modules: set[str] = set()
    kept: set[str] = set()
    # The rows of a head that have to be normalized are so only as whole weights.
    for module, choices in weights_of(arch, replace(settings, lm_head=not arch.normalized_head)):
        for tensors in choices:
            names = {canonical.get(tensor) for tensor in tensors}
            found = {name for name in names if name is not None and fits(layers[name], name, most, arch)}
            if found == names:
                modules.add(module)
                kept |= found
    if not modules:
        return None, frozenset()
    settings = replace(settings, lm_head="lm_head" in modules, layers=frozenset(modules))
    return settings, frozenset(kept)


def has_blocks(layout: Layout) -> bool:
    """Whether a row of fp8 has several scales."""
    return not isinstance(layout, CodeLayout) and layout[0] == "fp8" and layout[1] > 0


def settings_for(layout: Layout) -> QuantizationSettings:
    """The settings of a network whose layers all have this layout."""
    if isinstance(layout, CodeLayout):
        return QuantizationSettings(
            kind="int4",
            table=layout.table,
            block_size=layout.size,
            lm_head=True,
            wide_scales=layout.has_wide_scales,
        )
    kind, size = layout
    if has_blocks(layout):
        return QuantizationSettings(kind=kind, block_size=size, lm_head=True)
    return QuantizationSettings(kind=kind, group_size=size or 64, lm_head=True, wide_scales=True)


def is_rearranged(arch: Architecture, layers: Iterable[str]) -> bool:
    """Whether rows of the files have to be put into another order, which is done with whole weights only."""
    is_other = arch.interleaved_rope or arch.interleaved_gates or arch.grouped_qkv or bool(arch.transposed)
    return is_other or any(INTERLEAVED.search(f"{name}.weight") for name in layers)


def fits(layer: PackedLayer, name: str, layout: Layout, arch: Architecture) -> bool:
    """Whether a layer has this layout, and all its tensors the names of its weight."""
    start = canonical_name(f"{name}.weight", arch.renames).removesuffix("weight")
    return layer.layout == layout and all(
        canonical_name(f"{name}.{leaf}", arch.renames) == start + leaf for leaf in layer.own
    )


def weights_of(arch: Architecture, settings: QuantizationSettings) -> Iterator[tuple[str, list[list[str]]]]:
    """The modules that can be quantized, and the sets of tensors that can fill each of them."""
    with on_meta_device():
        model = Transformer(arch)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and settings.applies_to(name, module):
            yield name, [list(layout) for layout in layouts(arch, f"{name}.weight", module.weight)]
        elif isinstance(module, Experts):
            for leaf in ("gate_up_proj", "down_proj"):
                stack = getattr(module, leaf)
                if settings.fits(f"{name}.{leaf}", stack.shape[2]):
                    yield f"{name}.{leaf}", [list(layouts(arch, f"{name}.{leaf}", stack)[0])]


# ---- integers in groups ----


@dataclass(slots=True)
class GroupChoice:
    """The modules that keep integers in groups, and what appears in the place of their stored tensors."""

    layers: Mapping[str, PackedLayer]  # by the names of stored tensors
    groups: dict[str, GroupParts] = field(default_factory=dict)
    replaced: dict[str, Mapping[str, LazyTensor]] = field(default_factory=dict)
    _names: dict[str, list[str]] = field(default_factory=dict)  # of the stored tensors of each module

    def drop_incomplete_experts(self) -> None:
        """Leave out one matrix of experts without the other: the GPU kernels multiply both or none."""
        owners = Counter(module.rpartition(".")[0] for module in self.groups if ".experts." in module)
        for module in [*self.groups]:
            if owners.get(module.rpartition(".")[0]) == 1 and ".experts." in module:
                del self.groups[module]
                for name in self._names.pop(module):
                    del self.replaced[name]

    def add(self, module: str, parts: GroupParts, names: Mapping[str, str], floats: Mapping[str, StoredTensor]) -> None:
        """Take a module; `names` has the start of the new names of each stored tensor."""
        self.groups[module] = parts
        self._names[module] = [*names]
        for name, start in names.items():
            if name in self.layers:
                self.replaced[name] = {f"{start}.{leaf}": value for leaf, value in self._leaves(module, name).items()}
            else:
                stored = floats[name]
                self.replaced[name] = {f"{start}.weight": LazyTensor(stored.shape, stored.dtype, stored.read)}

    def _leaves(self, module: str, name: str) -> Mapping[str, LazyTensor]:
        layer = self.layers[name]
        if layer.groups is None:
            return {"weight": layer.weight}
        has_pairs = isinstance(layer.groups, GroupLayout) and layer.groups.has_pairs
        return layer.own if has_pairs and module not in ROW_TABLES else layer.levels

    @property
    def kept(self) -> frozenset[str]:
        """The stored tensors whose integers are kept."""
        return frozenset(name for name in self.replaced if name in self.layers and self.layers[name].groups is not None)

    @property
    def settings(self) -> QuantizationSettings | None:
        if not self.groups:
            return None
        bits = Counter[int]()
        for name in self.kept:
            bits[getattr(self.layers[name].groups, "bits", 0)] += self.layers[name].weight.shape.numel()
        kind: Quantization = "int4" if bits.most_common(1)[0][0] <= 4 else "int8"
        return QuantizationSettings(kind=kind, lm_head="lm_head" in self.groups, groups=self.groups, wide_scales=True)


def choose_groups(
    arch: Architecture,
    layers: Mapping[str, PackedLayer],
    tensors: Mapping[str, StoredTensor],
    *,
    whole_experts: bool = False,
) -> GroupChoice:
    """Which modules keep integers in groups; of fused projections, each in its own layout.

    `tensors` are all that are stored, by name. With `whole_experts`, both matrices of experts are kept or none.
    """
    choice = GroupChoice(layers)
    if is_rearranged(arch, [name.removesuffix(".weight") for name in layers]):
        return choice
    canonical = {canonical_name(name, arch.renames): name for name in tensors}
    for module, sets in group_modules(arch):
        for names in sets:
            if not all(name in canonical for name in names):
                continue
            stored = [canonical[name] for name in names]
            parts = tuple(layers[name].groups if name in layers else None for name in stored)
            starts = {name: theirs.removesuffix(".weight") for name, theirs in zip(stored, names, strict=True)}
            if module in ROW_TABLES:
                starts = dict.fromkeys(stored, f"{module}.rows")
            if len({*parts}) > 1:
                starts = {name: f"{module}.parts.{i}" for i, name in enumerate(stored)}
            is_fixed = all(
                canonical_name(f"{start}.weight", arch.renames) == f"{start}.weight" for start in starts.values()
            )
            can_join = len({*parts}) == 1 or ".experts." not in module
            if any(parts) and is_fixed and can_join:
                choice.add(module, parts[:1] if len({*parts}) == 1 else parts, starts, tensors)
            break
    if whole_experts:
        choice.drop_incomplete_experts()
    return choice


def better_choice(
    arch: Architecture,
    layers: Mapping[str, PackedLayer],
    tensors: Mapping[str, StoredTensor],
    kept: frozenset[str],
) -> GroupChoice | None:
    """Modules that keep integers in groups, if these are more weights than the layers that are kept otherwise."""
    if len(kept) == len(layers) or not any(layer.groups is not None for layer in layers.values()):
        return None
    weights = {f"{name}.weight": layer for name, layer in layers.items()}
    weights |= {name: replace(layer, groups=None) for name, layer in weights.items() if is_embedding(arch, name)}
    choice = choose_groups(arch, weights, {**tensors, **dict.fromkeys(weights, next(iter(tensors.values())))})
    more = sum(weights[name].weight.shape.numel() for name in choice.kept)
    return choice if more > sum(layers[name].weight.shape.numel() for name in kept) else None


def is_embedding(arch: Architecture, name: str) -> bool:
    return canonical_name(name, arch.renames) == f"{EMBEDDINGS}.weight"


def group_modules(arch: Architecture) -> Iterator[tuple[str, list[list[str]]]]:
    """The modules that may keep integers in groups, and the sets of tensors that can fill each of them."""
    every = QuantizationSettings(kind="int8", lm_head=not arch.normalized_head)
    with on_meta_device():
        model = Transformer(arch)
    yield EMBEDDINGS, [[f"{EMBEDDINGS}.weight"]]
    if arch.layer_input_size:
        yield OWN_EMBEDDINGS, [[f"{OWN_EMBEDDINGS}.weight"]]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and every.applies_to(name, module):
            yield name, [list(layout) for layout in layouts(arch, f"{name}.weight", module.weight)]
        elif isinstance(module, Experts):
            for leaf in ("gate_up_proj", "down_proj"):
                stack = getattr(module, leaf)
                yield f"{name}.{leaf}", [list(layout) for layout in layouts(arch, f"{name}.{leaf}", stack)[1:]]


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
