"""LoraSteps: which steps with adapters the GPU kernels compute, and the slots of their adapters.

All else runs as plain PyTorch: adapters that do more than add to attention and dense feed-forward layers, and all of
them if there is no memory for slots.

Shapes: T tokens of the step · N rows of them · V vocabulary
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.layer_changes import AdapterChanges
from flambeau.llm.backends.cuda.lora_slots import (
    MAX_SLOTS,
    MIN_SLOTS,
    LoraSlots,
    can_hold,
    layer_shapes,
    rank_of,
)
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.transformer import Transformer

log = logging.getLogger(__name__)

IN_PLAIN_PYTORCH = "steps with adapters run as plain PyTorch, not on the GPU kernels: %s"


class LoraSteps:
    """The slots of loaded adapters. A larger set of them is another generation, whose steps are captured again."""

    def __init__(self, store: AdapterStore, model: Transformer, device: torch.device) -> None:
        self._store, self._device = store, device
        self._dtype: torch.dtype = next(model.parameters()).dtype
        self._shapes = layer_shapes(model.arch)
        self._holdable: dict[int, bool] = {}
        self._held: tuple[int, ...] = ()
        self._told: set[str] = set()
        self._has_failed = False
        self.slots: LoraSlots | None = None
        self.generation = 0

    def place(self, adapters_T: Tensor) -> Tensor | None:
        """The places of these adapters in the slots; None: plain PyTorch adds them."""
        held = {number: adapter for number, adapter in self._store.adapters.items() if self._can_hold(number, adapter)}
        if not {number for number in adapters_T.tolist() if number} <= held.keys():
            self._tell("one changes more than attention and dense feed-forward layers")
            return None
        if len(held) > MAX_SLOTS:
            self._tell(f"more than {MAX_SLOTS} are loaded")
            return None
        if self._has_failed or not self._make_room(held):
            return None
        assert self.slots is not None
        if self._held != tuple(held):
            self.slots.update(held)
            self._held = tuple(held)
        return self.slots.places(adapters_T)

    def holdable(self) -> dict[int, AdapterChanges]:
        """The adapters that have slots."""
        return {number: self._store.adapters[number] for number in self._held if number in self._store.adapters}

    def _can_hold(self, number: int, adapter: AdapterChanges) -> bool:
        if number not in self._holdable:
            self._holdable[number] = can_hold(adapter, self._shapes)
        return self._holdable[number]

    def _make_room(self, held: dict[int, AdapterChanges]) -> bool:
        """Have enough slots of a large enough rank; False if there is no memory for them."""
        rank = max(map(rank_of, held.values()))
        old = self.slots
        if old is not None and old.num_slots >= len(held) and old.rank >= rank:
            return True
        num_slots = max(MIN_SLOTS, 1 << (len(held) - 1).bit_length())
        sizes = (num_slots, rank) if old is None else (max(num_slots, old.num_slots), max(rank, old.rank))
        error = self._allocate(*sizes, None)
        if error is not None and self._allocate(*sizes, ()) is not None:
            self._has_failed = True
            self._tell(f"there is no memory for {sizes[0]} of rank {sizes[1]} ({error})")
            return False
        self._held = ()
        self.generation += 1
        return True

    def _allocate(self, num_slots: int, rank: int, together: tuple[str, ...] | None) -> str | None:
        """Have slots, `together` for some layers, which takes more memory; if there is too little, what says so."""
        try:
            self.slots = LoraSlots(self._shapes, num_slots, rank, self._device, self._dtype, together)
        except torch.OutOfMemoryError as error:
            return str(error)
        return None

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.info(IN_PLAIN_PYTORCH, reason)


class WithAdapter:
    """A network or backend every second of whose sequences has an adapter, from the first on: to compare both."""

    def __init__(self, inner: Any, number: int) -> None:
        self._inner, self._number = inner, number

    def _given(self, inputs: StepInputs) -> StepInputs:
        lengths = inputs.query_starts.cpu().diff()
        numbers = self._number * (1 - torch.arange(len(lengths)) % 2)
        return replace(inputs, adapters_T=numbers.repeat_interleave(lengths))

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        return self._inner.prefill(self._given(inputs), rows_N)  # type: ignore[no-any-return]

    def decode(self, inputs: StepInputs) -> Tensor:
        return self._inner.decode(self._given(inputs))  # type: ignore[no-any-return]

    def run(self, inputs: StepInputs) -> Tensor:
        given = self._given(inputs)
        assert given.adapters_T is not None
        moved = replace(given, adapters_T=given.adapters_T.to(inputs.ids_T.device))
        return self._inner.run(moved)  # type: ignore[no-any-return]
