"""LoraSlots: the matrices of adapters at fixed addresses, so that a captured step can use those loaded later.

Every adapter has a slot. Its matrices have the largest rank of all, padded with zeros. A fused layer has segments, such
as queries, keys and values: each has its own A, and the rows of B belong to the segment of their output.

Shapes: T rows · L slots · P segments · X ranks of all segments, R each · Y ranks of all slots, R each · I inputs · O
outputs
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.adapters.layer_changes import AdapterChanges, LayerChange
from flambeau.llm.backends.cuda.few_row_kernel import runs_on
from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.backends.cuda.warpgroup_kernel import PLANE
from flambeau.llm.models.architecture import Architecture

MIN_SLOTS, MIN_RANK = 8, 16
MAX_SLOTS, MAX_RANK = 64, 128  # other adapters run as plain PyTorch
COLUMNS = 64  # outputs that a program computes, fewer where segments begin in between
MIN_COLUMNS = 16
MAX_TOGETHER = 512  # ranks of all slots that one product multiplies with all rows
# Parts of a network whose layers the kernels do not compute with adapters.
WITHOUT_SLOTS = {
    *("attention_input_scale", "attention_output_scale", "feed_forward_layers", "has_mlp"),
    *("latent_size", "mlp_scales", "recurrence", "wide_residual"),
}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a linear layer, and where its segments begin."""

    inputs: int
    outputs: int
    starts: tuple[int, ...] = (0,)

    @property
    def columns(self) -> int:
        """Outputs of a program: all of one segment."""
        columns = COLUMNS
        while any(start % columns for start in self.starts):
            columns //= 2
        return columns

    @property
    def segments(self) -> list[tuple[int, int]]:
        return [*zip(self.starts, (*self.starts[1:], self.outputs), strict=True)]


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """The matrices of all adapters for one layer."""

    shape: LayerShape
    a_LXI: Tensor
    b_LRO: Tensor
    is_together: bool = False  # one product multiplies all rows with the matrices of all slots
    b_OY: Tensor | None = None  # B of all slots side by side, if such a product adds it

    @property
    def num_slots(self) -> int:
        return len(self.b_LRO)

    @property
    def rank(self) -> int:
        return self.b_LRO.shape[1]

    @property
    def num_ranks(self) -> int:
        """Of all segments."""
        return self.a_LXI.shape[1]

    def set(self, slot: int, change: LayerChange | None) -> None:
        """Copy an adapter's matrices to a slot; None: it does not change this layer."""
        self.a_LXI[slot].zero_()
        self.b_LRO[slot].zero_()
        for part in () if change is None else change.parts:
            assert part.b_OR is not None
            for segment, (start, stop) in enumerate(self.shape.segments):
                low, high = max(start, part.start), min(stop, part.columns.stop)
                if low < high:
                    first, rank = segment * self.rank, len(part.a_RI)
                    self.a_LXI[slot, first : first + rank].copy_(part.a_RI)
                    self.b_LRO[slot, :rank, low:high].copy_(part.b_OR[low - part.start : high - part.start].T)
        self.arrange(slot)

    def arrange(self, slot: int) -> None:
        """Copy a slot's B to those that lie side by side."""
        if self.b_OY is not None:
            self.b_OY[:, slot * self.rank : (slot + 1) * self.rank].copy_(self.b_LRO[slot].T)


def can_be_together(shape: LayerShape, num_slots: int, rank: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one product may multiply all rows with the matrices of all slots: bfloat16 ones that are not large."""
    together = num_slots * rank
    fits = num_slots > 1 and together % PLANE == 0 and together <= min(MAX_TOGETHER, shape.inputs // 4)
    return fits and dtype == torch.bfloat16 and runs_on(device)


class LoraSlots:
    """All layers' slots, and which adapter is in which."""

    def __init__(
        self,
        shapes: Mapping[str, LayerShape],
        num_slots: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        together: Collection[str] | None = None,
    ) -> None:
        """`together` are the layers whose products multiply all rows with all slots; None: all that can."""
        sizes = num_slots, rank, device, dtype
        self.num_slots, self.rank = num_slots, rank
        self.together = {
            name
            for name, shape in shapes.items()
            if (can_be_together(shape, *sizes) if together is None else name in together)
        }
        self.layers = {name: empty_slots(shape, *sizes, name in self.together) for name, shape in shapes.items()}
        self._slots: dict[int, int] = {}  # of each adapter's number

    def alone(self, adapter: AdapterChanges, number: int) -> LoraSlots:
        """One adapter in slots for the same kernels. A comparison needs them: these here change while steps run."""
        like = next(iter(self.layers.values())).a_LXI
        shapes = {name: layer.shape for name, layer in self.layers.items()}
        num_slots = min(self.num_slots, max(2, PLANE // self.rank)) if self.together else 1
        found = LoraSlots(shapes, num_slots, self.rank, like.device, like.dtype, self.together)
        found.update({number: adapter})
        return found

    def update(self, adapters: Mapping[int, AdapterChanges]) -> None:
        """Give every adapter a slot; there are enough of them."""
        for number in self._slots.keys() - adapters.keys():
            del self._slots[number]
        free = sorted({*range(self.num_slots)} - {*self._slots.values()})
        for number in adapters.keys() - self._slots.keys():
            self._slots[number] = slot = free.pop(0)
            for name, layer in self.layers.items():
                layer.set(slot, adapters[number].layers.get(name))

    def places(self, adapters_T: Tensor) -> Tensor:
        """The slot of each row's adapter plus one; 0: it has none."""
        return torch.tensor([self._slots[number] + 1 if number else 0 for number in adapters_T.tolist()])


def empty_slots(
    shape: LayerShape, num_slots: int, rank: int, device: torch.device, dtype: torch.dtype, is_together: bool
) -> LayerSlots:
    a_LXI = torch.zeros(num_slots, len(shape.starts) * rank, shape.inputs, device=device, dtype=dtype)
    b_LRO = torch.zeros(num_slots, rank, shape.outputs, device=device, dtype=dtype)
    is_fused = len(shape.starts) > 1
    b_OY = (
        torch.zeros(shape.outputs, num_slots * rank, device=device, dtype=dtype) if is_fused and is_together else None
    )
    return LayerSlots(shape, a_LXI, b_LRO, is_together, b_OY)


def plain_lora(y_TO: Tensor, x_TI: Tensor, places_T: Tensor, layer: LayerSlots) -> Tensor:
    """The outputs with the adapters of the rows in plain PyTorch: the twin of the kernels."""
    found = y_TO.float().clone()
    for row, place in enumerate(places_T.tolist()):
        if place:
            for segment, (start, stop) in enumerate(layer.shape.segments):
                a_RI = layer.a_LXI[place - 1, segment * layer.rank : (segment + 1) * layer.rank].float()
                inner_R = a_RI @ x_TI[row].float()
                found[row, start:stop] += inner_R @ layer.b_LRO[place - 1, :, start:stop].float()
    return found


def layer_shapes(arch: Architecture) -> dict[str, LayerShape]:
    """The layers that slots hold: attention and dense feed-forward layers; empty: the network has others."""
    if WITHOUT_SLOTS & {*arch.extras} or unknown_parts(arch):
        return {}
    hidden, inner = arch.hidden_size, arch.intermediate_size
    queries, keys = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    attended = queries
    queries = 2 * queries if arch.gates_attention else queries
    shapes = {}
    for number in range(arch.num_layers):
        name = f"model.layers.{number}"
        shapes[f"{name}.self_attn.qkv_proj"] = LayerShape(hidden, queries + 2 * keys, (0, queries, queries + keys))
        shapes[f"{name}.self_attn.o_proj"] = LayerShape(attended, hidden)
        if not arch.has_experts(number):
            up = LayerShape(hidden, 2 * inner, (0, inner)) if arch.has_gate else LayerShape(hidden, inner)
            shapes[f"{name}.mlp.{'gate_up_proj' if arch.has_gate else 'up_proj'}"] = up
            shapes[f"{name}.mlp.down_proj"] = LayerShape(inner, hidden)
    return shapes if all(shape.columns >= MIN_COLUMNS for shape in shapes.values()) else {}


def can_hold(adapter: AdapterChanges, shapes: Mapping[str, LayerShape]) -> bool:
    """Whether slots hold all that an adapter changes."""
    if adapter.norms or adapter.embedding is not None:
        return False
    return all(name in shapes and fits(change, shapes[name]) for name, change in adapter.layers.items())


def fits(change: LayerChange, shape: LayerShape) -> bool:
    """Whether a change is a sum of products, of which each segment has at most one."""
    if change.scale_O is not None or change.shift_O is not None or change.has_matrix:
        return False
    if any(len(part.a_RI) > MAX_RANK for part in change.parts):
        return False
    spans = [(part.start, part.columns.stop) for part in change.parts]
    return all(sum(low < stop and start < high for low, high in spans) <= 1 for start, stop in shape.segments)


def rank_of(adapter: AdapterChanges) -> int:
    """The largest rank, rounded up to a power of two."""
    ranks = [len(part.a_RI) for change in adapter.layers.values() for part in change.parts]
    return max(MIN_RANK, 1 << (max(ranks, default=1) - 1).bit_length())
