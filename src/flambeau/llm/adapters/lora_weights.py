"""read_adapter: the tensors of a LoRA adapter, arranged like the layers of the network that they are added to.

Shapes: R rank · I inputs · O outputs of a layer, or of the part of it that is adapted
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.adapters.lora_config import MERGE, LoraConfig, read_lora_config
from flambeau.llm.checkpoints.parameter_map import ShardFunction, cuts, listed
from flambeau.llm.checkpoints.weight_files import StoredTensor, open_weights
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.tensor_names import ParameterSlice, layouts, parts_of
from flambeau.llm.models.transformer import Transformer

FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
LENGTHS = re.compile(r"^(?P<module>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?$")  # of DoRA
TENSOR = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")  # of latent attention
ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj", *LATENT)  # layers that can be adapted
COLUMN_PARALLEL = ("o_proj", "down_proj")  # ranks have some of their inputs


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What is added to some outputs of a layer: B times A times the input."""

    start: int  # the first of these outputs
    a_RI: Tensor
    b_OR: Tensor  # with the scale of the adapter
    lengths_O: Tensor | None = None  # DoRA: of the rows of the adapted weights

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + len(self.b_OR))

    @property
    def num_bytes(self) -> int:
        return self.a_RI.nbytes + self.b_OR.nbytes


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """All parts of an adapter, by the name of the layer in the network."""

    parts: dict[str, list[LoraPart]]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for parts in self.parts.values() for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTarget:
    """The network that adapters are read for, or one rank's part of it."""

    arch: Architecture  # of the whole network
    local: Architecture  # of this rank's part
    shard: ShardFunction | None
    device: torch.device
    dtype: torch.dtype


def read_adapter(folder: Path, target: AdapterTarget, *, merges: bool = False) -> LoraAdapter:
    """The adapter in a folder. Raises CheckpointError if it does not fit the network, or is not supported.

    `merges`: it becomes a part of the weights, as DoRA needs.
    """
    config = read_lora_config(folder)
    if config.use_dora:
        check_dora(folder, target, merges)
    found = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{folder} has no {' or '.join(FILES)}; save the adapter again")
    pairs = paired(found, has_lengths=config.use_dora)
    weights = adaptable_weights(target.local)
    places = part_places(target.local, weights)
    parts: dict[str, list[LoraPart]] = {}
    unknown: list[str] = []
    for module, layer in pairs.items():
        placed = [*place_parts(module, layer, places, target)]
        if not placed:
            unknown.append(module)
        for owner, part in placed:
            scale = config.scale(module, len(part.a_RI))
            check_shape(module, part, weights[f"{owner}.weight"].shape)
            parts.setdefault(owner, []).append(moved(part, scale, target))
    if unknown:
        raise CheckpointError(
            f"{found} adapts layers that cannot be adapted here: {listed(sorted(unknown))}. Supported are the "
            f"projections of attention and of dense feed-forward layers; {MERGE}{made_for(config)}"
        )
    return LoraAdapter(parts)


def made_for(config: LoraConfig) -> str:
    return f". It was made for {config.base}" if config.base else ""


def check_dora(folder: Path, target: AdapterTarget, merges: bool) -> None:
    """Raise unless DoRA's weights can be computed: from whole weights, while they are loaded."""
    if not merges:
        raise CheckpointError(
            f"{folder} has use_dora: true, and DoRA is supported only as a part of the weights; set merge_lora: true "
            f"with this adapter alone, or {MERGE}"
        )
    if target.shard is not None:
        raise CheckpointError(
            f"{folder} has use_dora: true, which needs whole rows of weights; use one rank, or {MERGE}"
        )


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The tensors of an adapted layer in a file."""

    a: StoredTensor
    b: StoredTensor
    lengths: StoredTensor | None = None


def paired(file: Path, *, has_lengths: bool) -> dict[str, StoredLayer]:
    """The tensors of each adapted layer, by its name in the checkpoint."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    lengths: dict[str, StoredTensor] = {}
    for stored in (stored for one in open_weights(file) for stored in one):
        if has_lengths and (match := LENGTHS.match(stored.name.removeprefix(PREFIX))):
            lengths[match["module"]] = stored
            continue
        match = TENSOR.match(stored.name.removeprefix(PREFIX))
        if match is None:
            raise CheckpointError(f"{file} has {stored.name}, which is not a tensor of a LoRA layer; {MERGE}")
        sides.setdefault(match["module"], {})[match["side"]] = stored
    for module, both in sides.items():
        if len(both) != 2:
            raise CheckpointError(f"{file} has only lora_{next(iter(both))} of {module}; save the adapter again")
        rank_a, rank_b = both["A"].shape[:1], both["B"].shape[1:]
        if both["A"].dtype.is_floating_point is False or len(both["A"].shape) != 2 or rank_a != rank_b:
            raise CheckpointError(
                f"{file}: lora_A {list(both['A'].shape)} and lora_B {list(both['B'].shape)} of {module} do not fit "
                "together; save the adapter again"
            )
    if not sides:
        raise CheckpointError(f"{file} holds no tensors; save the adapter again")
    for module in sides.keys() ^ lengths.keys() if has_lengths else ():
        raise CheckpointError(f"{file} has not all tensors of {module} that DoRA needs; save the adapter again")
    return {module: StoredLayer(both["A"], both["B"], lengths.get(module)) for module, both in sides.items()}


def adaptable_weights(arch: Architecture) -> dict[str, Tensor]:
    """The weights that can be adapted, without memory, by their names in the network."""
    with on_meta_device(torch.float32):
        tensors = Transformer(arch).state_dict()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight") and name.split(".")[-2] in ADAPTED and tensor.dim() == 2
    }


def part_places(arch: Architecture, weights: Mapping[str, Tensor]) -> dict[str, ParameterSlice]:
    """Where the weights are, by their names in any layout of a checkpoint."""
    places: dict[str, ParameterSlice] = {}
    for name, tensor in weights.items():
        for layout in reversed(layouts(arch, name, tensor)):
            places |= layout
    return places


def place_parts(
    module: str,
    layer: StoredLayer,
    places: dict[str, ParameterSlice],
    target: AdapterTarget,
) -> Iterator[tuple[str, LoraPart]]:
    """The layers that an adapted layer of a checkpoint is in, with what is added to each; nothing: it is not known."""
    # The outputs of B are those of the weight, and are arranged in the same way; B itself is never transposed.
    arch = replace(target.arch, transposed="")
    b, lengths = layer.b, layer.lengths
    weight = StoredTensor(b.file, f"{module}.weight", b.shape, b.dtype)
    [(name, arrange)] = cuts(arch, weight, None)
    a_RI, b_OR = layer.a.read(), arrange(b.read())
    lengths_O = None if lengths is None else arrange(lengths.read().view(-1, 1)).flatten()
    if target.shard is None and name in places:
        yield placed(places[name], a_RI, b_OR, lengths_O)
        return
    for part, region in parts_of(arch, name, b_OR).items():
        if part in places:
            rows_OR, inputs_RI = b_OR[region] if region else b_OR, a_RI
            if target.shard is not None:
                if part.split(".")[-2] in COLUMN_PARALLEL:
                    inputs_RI = target.shard(part, a_RI)
                else:
                    rows_OR = target.shard(part, rows_OR)
            part_lengths = lengths_O[region] if lengths_O is not None and region else lengths_O
            yield placed(places[part], inputs_RI, rows_OR, part_lengths)


def placed(place: ParameterSlice, a_RI: Tensor, b_OR: Tensor, lengths_O: Tensor | None = None) -> tuple[str, LoraPart]:
    region: Any = place.region
    start = region[0].start if region else 0
    return place.parameter.rpartition(".")[0], LoraPart(start, a_RI, b_OR, lengths_O)


def check_shape(module: str, part: LoraPart, weight_OI: torch.Size) -> None:
    """Raise if an adapter was made for a network of another size."""
    if part.a_RI.shape[1] != weight_OI[1] or part.columns.stop > weight_OI[0]:
        raise CheckpointError(
            f"the adapter's {module} has {part.a_RI.shape[1]} inputs and {len(part.b_OR)} outputs, and the model's has "
            f"{weight_OI[1]} and {weight_OI[0]}: it was made for another model; serve it with that one"
        )


def moved(part: LoraPart, scale: float, target: AdapterTarget) -> LoraPart:
    """The part on its device and in its type; the scale becomes a part of B."""
    b_OR = (part.b_OR.float() * scale).to(target.device, target.dtype).contiguous()
    lengths_O = None if part.lengths_O is None else part.lengths_O.to(target.device, target.dtype)
    return LoraPart(part.start, part.a_RI.to(target.device, target.dtype).contiguous(), b_OR, lengths_O)
