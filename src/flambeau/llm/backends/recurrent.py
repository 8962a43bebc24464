"""How the tokens of a step reach recurrent layers: by sequence, with the state that each sequence has.

Shapes: T tokens of the step · S sequences · Q tokens of each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.executor.inputs import StepInputs, to_tensor
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.models.recurrent import Advance, States


class WholeRecurrence:
    """Without a cache: the tokens […, T] are whole sequences."""

    def __call__(self, layer: int, recurrence: Advance, *inputs: Tensor) -> Tensor:
        """From inputs […, T, …] with one last dimension to outputs […, T, …]."""
        leading = inputs[0].shape[:-1]
        rows = [x.reshape(-1, leading[-1], x.shape[-1]) for x in inputs]
        states = tuple(torch.zeros(len(rows[0]), *shape, device=inputs[0].device) for shape in recurrence.state_shapes)
        y, _ = recurrence.advance(states, None, *rows)
        return y.view(*leading, *y.shape[2:])


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences that are computed together: padded to the length of the longest, which is less than twice any other."""

    rows_S: Tensor  # which sequences of the step
    tokens_SQ: Tensor  # which tokens of the step; padding repeats a real one
    lengths_S: Tensor | None  # None: all have Q tokens
    real_N: Tensor  # the places in `tokens_SQ` that are not padding, counted row by row

    def to(self, device: torch.device) -> SequenceGroup:
        lengths_S = None if self.lengths_S is None else self.lengths_S.to(device)
        return SequenceGroup(self.rows_S.to(device), self.tokens_SQ.to(device), lengths_S, self.real_N.to(device))


class PagedRecurrence:
    """With the states of a cache. A sequence whose first token is in this step has none yet."""

    def __init__(self, cache: StateCache, inputs: StepInputs) -> None:
        assert inputs.state_slots_S is not None
        self._cache, self._query_len = cache, inputs.query_len
        self._slots_S, self._ends_T = inputs.state_slots_S, inputs.state_ends_T
        self._is_new_S = inputs.positions_T[inputs.query_starts[:-1]] == 0
        self._groups: list[SequenceGroup] = []
        if not self._query_len:
            starts: list[int] = inputs.query_starts.tolist()
            if len(set(np.diff(starts))) == 1:  # a single prompt, for example
                self._query_len = starts[1]
            else:
                self._groups = [group.to(inputs.ids_T.device) for group in group_sequences(starts)]

    def __call__(self, layer: int, recurrence: Advance, *inputs: Tensor) -> Tensor:
        """From inputs [T, …] with one last dimension to outputs [T, …]."""
        if self._query_len:
            rows = [x.view(-1, self._query_len, x.shape[-1]) for x in inputs]
            if self._ends_T is not None:
                return self._advance_one_by_one(layer, recurrence, self._ends_T, rows).flatten(0, 1)
            return self._advance(layer, recurrence, self._slots_S, self._is_new_S, None, rows).flatten(0, 1)
        y_T: Tensor | None = None
        for group in self._groups:
            slots_S, is_new_S = self._slots_S[group.rows_S], self._is_new_S[group.rows_S]
            rows = [x[group.tokens_SQ] for x in inputs]
            y_SQ = self._advance(layer, recurrence, slots_S, is_new_S, group.lengths_S, rows)
            y_T = y_SQ.new_empty(len(inputs[0]), *y_SQ.shape[2:]) if y_T is None else y_T
            y_T[group.tokens_SQ.flatten()[group.real_N]] = y_SQ.flatten(0, 1)[group.real_N]
        assert y_T is not None
        return y_T

    def _advance(
        self,
        layer: int,
        recurrence: Advance,
        slots_S: Tensor,
        is_new_S: Tensor,
        lengths_S: Tensor | None,
        rows: list[Tensor],
    ) -> Tensor:
        y_SQ, states = recurrence.advance(self._states(layer, slots_S, is_new_S), lengths_S, *rows)
        self._keep(layer, slots_S, states)
        return y_SQ

    def _advance_one_by_one(self, layer: int, recurrence: Advance, ends_T: Tensor, rows: list[Tensor]) -> Tensor:
        """Keep the state after each token, in the token's own slot."""
        states = self._states(layer, self._slots_S, self._is_new_S)
        ends_QS, pieces = ends_T.view(-1, self._query_len).t().contiguous(), []
        for place in range(self._query_len):
            y_S1, states = recurrence.advance(states, None, *(x[:, place : place + 1] for x in rows))
            self._keep(layer, ends_QS[place], states)
            pieces.append(y_S1)
        return torch.cat(pieces, dim=1)

    def _states(self, layer: int, slots_S: Tensor, is_new_S: Tensor) -> States:
        return tuple(
            slots[slots_S].masked_fill(is_new_S.view(-1, *[1] * (slots.dim() - 1)), 0)  # old contents may be NaN
            for slots in self._cache.layers[layer]
        )

    def _keep(self, layer: int, slots_S: Tensor, states: States) -> None:
        for slots, state in zip(self._cache.layers[layer], states, strict=True):
            torch.ops.flambeau.keep_state(slots_S, state.to(slots.dtype), slots)


def group_sequences(starts: list[int]) -> list[SequenceGroup]:
    """Groups of sequences of similar length; sequence i has the tokens from `starts[i]` to `starts[i + 1]`."""
    lengths = np.diff(starts)
    kinds = [int(length - 1).bit_length() for length in lengths]
    groups = []
    for kind in sorted(set(kinds)):
        rows = np.flatnonzero(np.equal(kinds, kind))
        own, longest = lengths[rows, None], int(lengths[rows].max())
        places = np.arange(longest)
        tokens = np.asarray(starts)[rows, None] + np.minimum(places, own - 1)
        is_even = bool((own == longest).all())
        real = np.flatnonzero(places < own)
        groups.append(
            SequenceGroup(
                to_tensor(rows), to_tensor(tokens), None if is_even else to_tensor(own[:, 0]), to_tensor(real)
            )
        )
    return groups


def keep_state(slots_S: Tensor, state: Tensor, slots: Tensor) -> None:
    slots.index_copy_(0, slots_S, state)


# An opaque operator: a compiler that benchmarks kernels would write to the states of running sequences.
operators: Any = torch.library.Library("flambeau", "FRAGMENT")  # type: ignore[no-untyped-call]
operators.define("keep_state(Tensor slots, Tensor state, Tensor(a!) kept) -> ()")
operators.impl("keep_state", keep_state, "CPU")
operators.impl("keep_state", keep_state, "CUDA")
operators._register_fake("keep_state", lambda *tensors: None)
