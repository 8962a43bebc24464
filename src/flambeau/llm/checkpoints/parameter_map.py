"""Which tensor of a checkpoint fills which part of which parameter; decided before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.checkpoints.absent_weights import may_lack
from flambeau.llm.checkpoints.convolution_parts import in_real_parts
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead
from flambeau.llm.models.tensor_names import (
    EXPERTS,
    FURTHER_TOKENS,
    GATES,
    IGNORED,
    ONE_HEAD_NORM,
    STACKED,
    ParameterSlice,
    Region,
    canonical_name,
    layer_number,
    layouts,
    num_interleaved_heads,
    parts_of,
    renamed,
    to_halves,
    ungrouped,
    vision_name,
)
from flambeau.llm.models.transformer import Transformer

ShardFunction = Callable[[str, Tensor], Tensor]
Cut = Callable[[Tensor], Tensor]

KEYS = re.compile(r"\.self_attn\.(k|v)_(proj|norm)\.")
TIME_MIX = re.compile(r"\.time_mix_(key|value|receptance)$")  # [1, 1, E] in files of RWKV
STACK = re.compile(r"\.experts\.(gate_up|down)_proj$")
ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")
MAX_NAMES = 5  # tensors of each kind in an error message


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One stored tensor and the part of a parameter that it fills."""

    stored: StoredTensor
    cut: Cut  # takes and arranges the needed part of the tensor
    parameter: str
    region: Region
    num_bytes: int

    @property
    def owner(self) -> str:
        """The name of the module that has the parameter."""
        return self.parameter.rpartition(".")[0]


@dataclass(slots=True)
class WeightMismatches:
    """Everything that is wrong with a checkpoint, for one error."""

    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    ill_shaped: list[str] = field(default_factory=list)

    def raise_if_any(self, files: list[WeightFile]) -> None:
        kinds = {"missing": self.missing, "not known": self.unknown, "of another shape or type": self.ill_shaped}
        if any(kinds.values()):
            found = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names)
            where = files[0].path if len(files) == 1 else f"{files[0].path.parent} ({len(files)} files)"
            raise CheckpointError(f"the weights in {where} do not fit the architecture: {found}")


def map_weights(
    model: Transformer | DraftHead, arch: Architecture, files: list[WeightFile], shard: ShardFunction | None
) -> list[Placement]:
    """A placement for every tensor, so that every parameter is filled; `arch` describes the files."""
    targets = parameters_of(model)
    choices = {name: layouts(model.arch, name, target) for name, target in targets.items()}
    places = {name: place for one in choices.values() for layout in reversed(one) for name, place in layout.items()}
    mismatches, found, placements = WeightMismatches(), set(), []
    known: dict[str, StoredTensor] = {}
    given_files = in_real_parts(files, arch)
    for stored in (stored for file in given_files for stored in file if not is_ignored(model, stored.name)):
        check_repeated(known.setdefault(stored.name, stored), stored)
        for name, cut in cuts(arch, stored, shard):
            found.add(name)
            if name not in places:
                mismatches.unknown.append(f"{stored.name} ({stored.file.path.name})")
                continue
            given = cut(torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
            place = places[name]
            if problem := mismatch(given, part_of(targets, place)):
                mismatches.ill_shaped.append(f"{stored.name} ({problem} in {stored.file.path.name})")
                continue
            placements.append(to_placement(stored, cut, place, given))
    for name, one in choices.items():
        if not any(layout.keys() <= found for layout in one) and not may_lack(arch, name):
            mismatches.missing += sorted(one[0].keys() - found)
    mismatches.raise_if_any(files)
    return placements


def check_repeated(first: StoredTensor, stored: StoredTensor) -> None:
    """Raise if two files have a tensor of the same name, but not with the same numbers."""
    if first is stored:
        return
    if first.shape != stored.shape or first.dtype != stored.dtype or not torch.equal(first.read(), stored.read()):
        raise CheckpointError(
            f"{first.file.path.name} and {stored.file.path.name} in {stored.file.path.parent} have different tensors "
            f"of the name {stored.name}; remove the file that does not belong to the checkpoint, or download it again"
        )


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers that a checkpoint holds."""
    return model.state_dict(keep_vars=True)


def is_ignored(model: Transformer | DraftHead, name: str) -> bool:
    """Whether a tensor is not needed: constants of old files, tied embeddings again, layers for further tokens.

    The encoder of images is loaded apart from the decoder (vision_weights.py).
    """
    arch, layer = model.arch, re.match(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.", name)
    is_unused = layer is not None and 0 <= int(layer[1]) - arch.num_layers < arch.num_unused_layers
    is_unused = is_unused or (isinstance(model, Transformer) and bool(FURTHER_TOKENS.search(name)))
    is_unused = is_unused or bool(arch.unused and re.search(arch.unused, name))
    is_vision = arch.vision is not None and vision_name(name) is not None
    is_unused = is_unused or has_shared_keys(arch, name) or is_of_zero_expert(arch, name)
    return bool(IGNORED.search(name) or is_unused or is_vision) or (
        model.lm_head is None and canonical_name(name, model.arch.renames) == "lm_head.weight"
    )


def has_shared_keys(arch: Architecture, name: str) -> bool:
    """Whether a tensor makes keys or values in a layer that reads those of another."""
    found, layer = KEYS.search(name), layer_number(name)
    return found is not None and layer is not None and layer < arch.num_layers and arch.key_layer(layer) != layer


def is_of_zero_expert(arch: Architecture, name: str) -> bool:
    """Whether a tensor belongs to an expert that gives its input; transformers writes weights that it does not use."""
    found = ONE_EXPERT.search(name) if arch.num_zero_experts else None
    return found is not None and int(found[1]) >= arch.num_experts


def is_turned(arch: Architecture, name: str, shape: torch.Size) -> bool:
    """Whether a stack of experts has inputs before outputs, in a family whose files may have either order."""
    if not arch.either_order or len(shape) != 3 or (found := STACK.search(name)) is None:
        return False
    return shape[-1] != (arch.hidden_size if found[1] == "gate_up" else arch.expert_size)


def as_is(tensor: Tensor) -> Tensor:
    return tensor


def cuts(arch: Architecture, stored: StoredTensor, shard: ShardFunction | None) -> Iterator[tuple[str, Cut]]:
    """The tensors that a stored one is cut into, by canonical name; keys may be values, too."""
    for name, cut in own_cuts(arch, stored, shard):
        yield name, cut
        if ".self_attn.k_proj." in name and layer_number(name) in arch.values_from_keys:
            yield name.replace(".k_proj.", ".v_proj."), partial(copied, cut)


def copied(cut: Cut, tensor: Tensor) -> Tensor:
    """A part with memory of its own."""
    return cut(tensor).clone()


def own_cuts(arch: Architecture, stored: StoredTensor, shard: ShardFunction | None) -> Iterator[tuple[str, Cut]]:
    """The same without values that are keys."""
    name = canonical_name(stored.name, arch.renames)
    head_rows = arch.head_size if name.endswith("_norm.weight") else 1
    heads = num_interleaved_heads(arch, name if arch.interleaved_rope else renamed(stored.name, arch.renames))
    is_transposed = bool(arch.transposed and re.search(arch.transposed, name)) or is_turned(arch, name, stored.shape)
    is_grouped = (arch.grouped_qkv or arch.qvk_blocks > 0) and ".qkv_proj." in name
    has_alternating_gates = arch.interleaved_gates and bool(GATES.search(name))

    is_flat = name.endswith(".mlp.score_bias")  # [1, N] in files of Ernie
    if arch.recurrence is not None and arch.recurrence.kind == "kimi_delta":
        is_flat = is_flat or name.endswith(".mixer.A_log")  # [1, 1, H, 1] in those of Kimi
    is_flat = is_flat or bool(TIME_MIX.search(name))
    is_normalized = arch.normalized_head and name == "lm_head.weight"
    is_below = arch.flat_experts and len(stored.shape) == 2 and bool(EXPERTS.search(name) or STACKED.search(name))

    def arrange(tensor: Tensor) -> Tensor:
        if is_flat:  # [2, N] where those of images are the second
            return (tensor[0] if tensor.dim() == 2 else tensor).flatten()
        if is_below:
            tensor = torch.unflatten(tensor, 0, (arch.num_experts, -1))
        if is_transposed:
            tensor = tensor.transpose(-1, -2)
        if tensor.is_meta:  # only the shape is needed; torch.cat would import a compiler here, which takes 70 MB
            return tensor
        if is_normalized:
            return F.normalize(tensor.float(), dim=-1).to(tensor.dtype)
        if has_alternating_gates:
            tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
        if is_grouped and tensor.numel():
            tensor = ungrouped(tensor, arch)
        if not 0 < heads * arch.head_size <= tensor.shape[0] * head_rows:
            return tensor
        rows = tensor.reshape(-1, *tensor.shape[2 if head_rows > 1 else 1 :])  # a norm's weights are [H, D]
        return to_halves(rows, heads, arch.head_size, arch.rotary_size).view_as(tensor)

    if shard is None:
        changes = is_flat or is_below or is_normalized or is_transposed or has_alternating_gates or is_grouped or heads
        yield name, arrange if changes else as_is
        return

    def cut_part(tensor: Tensor, part: str, region: Region) -> Tensor:
        return shard(part, arrange(tensor)[region] if region else arrange(tensor))

    if found := ONE_HEAD_NORM.search(name):
        heads_of_all = torch.arange(arch.num_heads if found[2] == "q" else arch.num_kv_heads).view(-1, 1)
        own = shard(f"{name[: found.end(1)]}.weight", heads_of_all).flatten().tolist()
        if int(found[3]) in own:
            yield f"{name[: found.end(1)]}.norms.{own.index(int(found[3]))}.weight", arrange
        return
    if EXPERTS.search(name) or STACKED.search(name):  # whole: a stack may be computed each time that it is read
        yield name, lambda tensor: cut_stack(arch, name, arrange(tensor), shard)
        return
    for part, region in parts_of(arch, name, arrange(torch.empty(stored.shape, device="meta"))).items():
        yield part, partial(cut_part, part=part, region=region)


def cut_stack(arch: Architecture, name: str, stack: Tensor, shard: ShardFunction) -> Tensor:
    """The part of a stack of experts that is left if each projection of each expert is cut."""
    of_experts: list[list[Tensor]] = [[] for _ in stack]
    for part, (expert, *rows) in parts_of(arch, name, stack).items():
        assert isinstance(expert, int)
        of_experts[expert].append(shard(part, stack[(expert, *rows)]))
    pieces = of_experts[0]
    found = stack.new_empty(len(stack), sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
    for one, pieces in zip(found, of_experts, strict=True):
        for into, piece in zip(one.split([len(piece) for piece in pieces]), pieces, strict=True):
            into.copy_(piece)
    return found


def part_of(targets: dict[str, Tensor], place: ParameterSlice) -> Tensor:
    target = targets[place.parameter]
    return target[place.region] if place.region else target


def mismatch(given: Tensor, wanted: Tensor) -> str:
    """How a tensor differs from the part that it fills; empty if it fits."""
    if given.shape != wanted.shape:
        return f"{list(given.shape)} instead of {list(wanted.shape)}"
    are_alike = given.is_floating_point() and wanted.is_floating_point()
    are_alike = are_alike or {given.dtype, wanted.dtype} == {torch.int32, torch.int64}
    if given.dtype != wanted.dtype and not are_alike:
        return f"{given.dtype} instead of {wanted.dtype}"
    return ""


def to_placement(stored: StoredTensor, cut: Cut, place: ParameterSlice, given: Tensor) -> Placement:
    return Placement(stored=stored, cut=cut, parameter=place.parameter, region=place.region, num_bytes=given.nbytes)


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
