"""Which tensor of a checkpoint fills which part of which parameter: settled before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flambeau.llm.checkpoints.weight_files import Stored, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.naming import (
    HARMLESS,
    Piece,
    Region,
    num_alternating_heads,
    our_name,
    parts_of,
    to_halves,
    ways,
)
from flambeau.llm.models.transformer import Transformer

Shard = Callable[[str, Tensor], Tensor]
Cut = Callable[[Tensor], Tensor]

NUM_NAMED = 5  # tensors of each kind in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One tensor on its way from a file into a parameter."""

    stored: Stored
    cut: Cut  # what is taken of the tensor, and how it is arranged
    parameter: str
    region: Region
    num_bytes: int

    @property
    def owner(self) -> str:
        """The name of the module that has the parameter."""
        return self.parameter.rpartition(".")[0]


@dataclass(slots=True)
class Misfits:
    """What is wrong with a checkpoint, to be said all at once."""

    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    ill_shaped: list[str] = field(default_factory=list)

    def raise_any(self, files: list[WeightFile]) -> None:
        """Refuse the checkpoint if anything is wrong with it."""
        kinds = {"missing": self.missing, "not known": self.unknown, "of another shape or type": self.ill_shaped}
        if any(kinds.values()):
            said = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names)
            where = files[0].path if len(files) == 1 else f"{files[0].path.parent} ({len(files)} files)"
            raise CheckpointError(f"the weights in {where} do not fit the architecture: {said}")


def fit(model: Transformer, arch: Architecture, files: list[WeightFile], shard: Shard | None) -> list[Placement]:
    """A place for every tensor, so that every parameter is filled; `arch` is that of the files."""
    targets = parameters_of(model)
    choices = {name: ways(model.arch, name, target) for name, target in targets.items()}
    places = {name: piece for one in choices.values() for way in reversed(one) for name, piece in way.items()}
    misfits, found, placements = Misfits(), set(), []
    for stored in (stored for file in files for stored in file if not is_harmless(model, stored.name)):
        for name, cut in cuts(arch, stored, shard):
            found.add(name)
            if name not in places:
                misfits.unknown.append(f"{stored.name} ({stored.file.path.name})")
                continue
            given = cut(torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
            if problem := mismatch(given, part_of(targets, places[name])):
                misfits.ill_shaped.append(f"{stored.name} ({problem} in {stored.file.path.name})")
                continue
            placements.append(to_placement(stored, cut, places[name], given))
    for one in choices.values():
        if not any(way.keys() <= found for way in one):
            misfits.missing += sorted(one[0].keys() - found)
    misfits.raise_any(files)
    return placements


def parameters_of(model: Transformer) -> dict[str, Tensor]:
    """All that a checkpoint holds of a network."""
    return model.state_dict(keep_vars=True)


def is_harmless(model: Transformer, name: str) -> bool:
    """Whether a tensor may be left aside: old files hold angles, and tied embeddings twice."""
    return bool(HARMLESS.search(name)) or (model.lm_head is None and our_name(name) == "lm_head.weight")


def cuts(arch: Architecture, stored: Stored, shard: Shard | None) -> Iterator[tuple[str, Cut]]:
    """The tensors, by our names, that one in a file is cut into."""
    name, heads = our_name(stored.name), num_alternating_heads(arch, stored.name)
    is_alternating = 0 < heads * arch.head_size <= stored.shape[0]

    def arrange(tensor: Tensor) -> Tensor:
        if not is_alternating or tensor.is_meta:  # whose shape is all that is asked for
            return tensor
        return to_halves(tensor, heads, arch.head_size)

    if shard is None:
        yield name, arrange
        return

    def cut_part(tensor: Tensor, part: str, region: Region) -> Tensor:
        return shard(part, arrange(tensor)[region] if region else arrange(tensor))

    for part, region in parts_of(arch, name, torch.empty(stored.shape, device="meta")).items():
        yield part, partial(cut_part, part=part, region=region)


def part_of(targets: dict[str, Tensor], piece: Piece) -> Tensor:
    """The part of a parameter that a tensor fills."""
    target = targets[piece.parameter]
    return target[piece.region] if piece.region else target


def mismatch(given: Tensor, wanted: Tensor) -> str:
    """How a tensor differs from what it is to fill; empty: it fits."""
    if given.shape != wanted.shape:
        return f"{list(given.shape)} instead of {list(wanted.shape)}"
    if given.dtype != wanted.dtype and not (given.is_floating_point() and wanted.is_floating_point()):
        return f"{given.dtype} instead of {wanted.dtype}"
    return ""


def to_placement(stored: Stored, cut: Cut, piece: Piece, given: Tensor) -> Placement:
    """The way of a tensor into its place."""
    return Placement(stored=stored, cut=cut, parameter=piece.parameter, region=piece.region, num_bytes=given.nbytes)


def listed(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
