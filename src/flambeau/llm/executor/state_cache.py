"""StateCache: the states of recurrent layers, in slots: of sequences, snapshots for later ones, and spare slots.

A state has the same size however long its sequence is. It is kept in float32: errors would add up over its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from flambeau.llm.core.state_slots import StateCopy
from flambeau.llm.models.architecture import Architecture

Slots = tuple[Tensor, ...]  # [slots, …]: windows of convolutions, and state matrices if there are any


class StateCache:
    """Tensors of the states of every recurrent layer. Slot 0 is for padding and belongs to no sequence."""

    num_spare: int = 0  # slots for the states after proposed tokens

    def __init__(
        self, arch: Architecture, num_slots: int, num_spare: int = 0, *, device: torch.device | str = "cpu"
    ) -> None:
        shapes_of = {} if arch.recurrence is None else arch.recurrence.all_shapes
        self.layers: dict[int, Slots] = {
            layer: tuple(torch.zeros(1 + num_slots + num_spare, *shape, device=device) for shape in shapes)
            for layer, shapes in shapes_of.items()
        }
        self.num_slots, self.num_spare = num_slots, num_spare
        self.has_layers = bool(self.layers)  # not computed later: torch.compile of PyTorch 2.11 knows no bool of a dict

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """Make copies between slots, one after the other."""
        for source, target in copies:
            for slots in chain.from_iterable(self.layers.values()):
                slots[target].copy_(slots[source])


def state_bytes(arch: Architecture) -> int:
    """The size of a sequence's state in all layers."""
    return 0 if arch.recurrence is None else arch.recurrence.num_state_numbers * torch.float32.itemsize
