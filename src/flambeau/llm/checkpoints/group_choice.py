"""Which modules of a network keep integers in groups, each in its own layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from flambeau.llm.checkpoints.layer_formats import LazyTensor, PackedLayer
from flambeau.llm.checkpoints.layout_choice import is_rearranged
from flambeau.llm.checkpoints.weight_files import StoredTensor
from flambeau.llm.config import Quantization
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.tensor_names import canonical_name, layouts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.groups import GroupLayout
from flambeau.llm.quantize.settings import Parts, QuantizationSettings

EMBEDDINGS = "model.embed_tokens"
OWN_EMBEDDINGS = "model.layer_inputs.embed_tokens"  # of layers
ROW_TABLES = (EMBEDDINGS, OWN_EMBEDDINGS)


@dataclass(slots=True)
class GroupChoice:
    """The modules that keep integers in groups, and what appears in the place of their stored tensors."""

    layers: Mapping[str, PackedLayer]  # by the names of stored tensors
    groups: dict[str, Parts] = field(default_factory=dict)
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

    def add(self, module: str, parts: Parts, names: Mapping[str, str], floats: Mapping[str, StoredTensor]) -> None:
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
    every = QuantizationSettings(kind="int8", lm_head=not arch.normalized_head, time_steps=True)
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
