"""The entries of a head that wait to be computed, and where those of a round go.

Shapes: S sequences · F entries of each in the first pass · T entries of a pass · J tokens proposed after the first ·
B blocks of the longest sequence · X numbers of hidden states
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.executor.inputs import InputBuilder, Ints, StepInputs, to_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Where the entries of a round go. Padding is behind the entries of a sequence, and has position 0 and slot 0."""

    ids_SF: Ints  # the tokens after the entries
    positions_SF: Ints
    slots_SF: Ints
    counts_S: Ints  # entries of each sequence that are no padding; 0: its hidden states are not known
    starts_S: Ints  # the position of the first
    positions_SJ: Ints  # of the passes after the first, one entry of each sequence
    slots_SJ: Ints
    next_S: Ints  # the position of the first proposed token
    tables_SB: Ints


@dataclass(slots=True)
class WaitingEntries:
    """Hidden states of the newest tokens of a sequence, whose entries are not computed yet."""

    start: int  # the position of the first
    parts: list[Tensor] = field(default_factory=list)  # [T, X] each
    length: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    def add(self, states_TX: Tensor) -> None:
        self.parts.append(states_TX)
        self.length += len(states_TX)

    def num_ready(self, sequence: Sequence, num_depths: int = 1) -> int:
        """Those whose next tokens are known, as many as there are layers one after another."""
        return min(self.end, len(sequence.tokens) - num_depths) - self.start

    def take(self, number: int, num_kept: int = 0) -> Tensor:
        """The first ones [number, X], of which all but the last `num_kept` wait no longer."""
        states_TX = torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0]
        number_removed = max(0, number - num_kept)
        rest = states_TX[number_removed:]
        self.parts = [rest.clone()] if len(rest) else []  # what is left does not keep all of a prompt in memory
        self.start, self.length = self.start + number_removed, len(rest)
        return states_TX[:number]


def plan_round(
    builder: InputBuilder,
    sequences: Many[Sequence],
    waiting: Many[WaitingEntries],
    lengths: Many[int],
    num_ahead: int,
    width: int | None = None,
) -> RoundPlan:
    """Where the entries that wait go, and those of the passes after them; `width` places for each sequence."""
    rows = builder.tables.rows(sequences)
    counts_S, starts_S = (np.array([getattr(each, name) for each in waiting]) for name in ("length", "start"))
    places_F = np.arange(int(counts_S.max()) if width is None else width)
    is_real_SF = places_F < counts_S[:, None]
    positions_SF, slots_SF = builder.positions_and_slots(rows, starts_S[:, None] + places_F, is_real_SF)
    ids_SF = np.zeros(is_real_SF.shape, dtype=np.int64)
    ids_SF[is_real_SF] = np.concatenate(next_ids(sequences, waiting, counts_S.tolist()))
    next_S = np.array([len(sequence.tokens) for sequence in sequences])
    places_J = np.arange(1, num_ahead)
    is_real_SJ = places_J < np.array(lengths)[:, None]
    positions_SJ, slots_SJ = builder.positions_and_slots(rows, next_S[:, None] - 2 + places_J, is_real_SJ)
    end = max(int(starts_S.max()) + len(places_F), int(positions_SJ.max(initial=0)) + 1)  # padding counts
    return RoundPlan(
        ids_SF=ids_SF,
        positions_SF=positions_SF,
        slots_SF=slots_SF,
        counts_S=counts_S,
        starts_S=starts_S,
        positions_SJ=positions_SJ,
        slots_SJ=slots_SJ,
        next_S=next_S,
        tables_SB=builder.tables.columns(rows, -(-end // builder.block_size)),
    )


def first_inputs(plan: RoundPlan) -> StepInputs:
    """The inputs of the pass over all entries that wait."""
    num_sequences, width = plan.ids_SF.shape
    return StepInputs(
        to_tensor(plan.ids_SF.reshape(-1)),
        to_tensor(plan.positions_SF.reshape(-1)),
        to_tensor(plan.slots_SF.reshape(-1)),
        to_tensor(np.arange(num_sequences + 1) * width),
        to_tensor(plan.starts_S + width),  # padding counts
        to_tensor(plan.tables_SB),
        query_len=width,
    )


def later_inputs(plan: RoundPlan, device: torch.device) -> list[StepInputs]:
    """The inputs of the passes after the first, one entry for each sequence; the ids are not known yet."""
    tables_SB = to_tensor(plan.tables_SB).to(device)
    starts = torch.arange(len(plan.next_S) + 1, device=device)
    positions_JS, slots_JS = (to_tensor(each.T).to(device) for each in (plan.positions_SJ, plan.slots_SJ))
    return [
        StepInputs(positions_S, positions_S, slots_S, starts, positions_S + 1, tables_SB, query_len=1)
        for positions_S, slots_S in zip(positions_JS, slots_JS, strict=True)
    ]


def last_places(plan: RoundPlan) -> Tensor:
    """Where the last entry of each sequence is among all places of the first pass [S]."""
    num_sequences, width = plan.ids_SF.shape
    return to_tensor(np.arange(num_sequences) * width + np.maximum(plan.counts_S, 1) - 1)


def real_places(plan: RoundPlan) -> Ints:
    """Which places of the first pass are no padding [T]."""
    return (np.arange(plan.ids_SF.shape[1]) < plan.counts_S[:, None]).reshape(-1).nonzero()[0]


def with_padding(plan: RoundPlan, states_TX: Tensor) -> Tensor:
    """Hidden states for all places of the first pass; zeros for padding."""
    if len(states_TX) == plan.ids_SF.size:
        return states_TX
    padded = states_TX.new_zeros(plan.ids_SF.size, states_TX.shape[1])
    padded[to_tensor(real_places(plan)).to(states_TX.device)] = states_TX
    return padded


def next_ids(
    sequences: Many[Sequence], waiting: Many[WaitingEntries], lengths: Many[int], depth: int = 0
) -> list[Ints]:
    """The tokens after those that wait, or further ones."""
    starts = [each.start + 1 + depth for each in waiting]
    spans = zip(sequences, starts, lengths, strict=True)
    return [np.array(s.tokens[start : start + n], np.int64) for s, start, n in spans]
