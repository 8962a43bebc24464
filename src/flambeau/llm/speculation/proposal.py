"""Proposal: tokens that may come next; Proposer: what proposes them.

Shapes: S sequences · K tokens proposed for each at most · R sequences for which only the distribution is promised ·
V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flambeau.llm.core.sequence import SamplingState, Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens for a batch, how many of them count, and what they were drawn from."""

    ids_SK: Tensor
    lengths: list[int]
    q_RKV: Tensor | None  # probabilities; None: no other token could have been proposed


class Proposer(Protocol):
    """Guesses the next tokens of sequences."""

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence, in a tensor of `num_ahead` columns; None: for none."""

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """Called after verification; the sequence had `num_before` tokens when they were proposed."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence."""


def split_by_exactness(states: Many[SamplingState]) -> tuple[list[int], list[int]]:
    """The indices of sequences whose exact tokens are promised, and of those with a promised distribution only."""
    exact = [i for i, state in enumerate(states) if state.is_repeatable]
    return exact, [i for i, state in enumerate(states) if not state.is_repeatable] if len(exact) < len(states) else []


def gather_rows(batch: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a batch [S, …]; the batch itself if they are all of them."""
    return batch if len(rows) == batch.shape[0] else batch[rows]


def scatter_rows(batch: Tensor, rows: list[int], values: Tensor) -> None:
    """Write what `gather_rows` reads."""
    if len(rows) == batch.shape[0]:
        batch.copy_(values)
    else:
        batch[rows] = values
