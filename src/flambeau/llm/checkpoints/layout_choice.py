"""Which layers of a network keep their quantized weights, all in one layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from flambeau.llm.checkpoints.layer_formats import Layout, PackedLayer
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.tensor_names import INTERLEAVED, canonical_name, layouts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.coded import CodeLayout
from flambeau.llm.quantize.settings import QuantizationSettings


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
    for module, choices in weights_of(arch, replace(settings, lm_head=not arch.normalized_head, time_steps=True)):
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
