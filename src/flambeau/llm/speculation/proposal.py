"""Proposal: tokens that may come next, from whoever proposes them.

Shapes: S sequences · K tokens proposed for each at most · R sequences of which the distribution alone is promised ·
V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flambeau.llm.sampling.rows import Row
from flambeau.llm.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens for a batch, how many of them count, and what they were drawn from."""

    ids_SK: Tensor
    lengths: list[int]
    q_RKV: Tensor | None  # probabilities; None: no other token could have been proposed


class Proposer(Protocol):
    """Knows, or guesses, what comes next."""

    def propose(self, sequences: Many[Sequence], most: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `most` tokens for each of the sequences, in a tensor for `num_ahead`; None: for nobody."""

    def kept(self, sequence: Sequence, num_before: int, num_proposed: int, num_kept: int) -> None:
        """Of the tokens proposed for a sequence, so many were kept; it had `num_before` tokens then."""

    def forget(self, sequence: Sequence) -> None:
        """It is over."""


def by_promise(rows: Many[Row]) -> tuple[list[int], list[int]]:
    """The places of those rows of which the very tokens are promised, and of those with a distribution alone."""
    exact = [i for i, row in enumerate(rows) if row.is_repeatable]
    return exact, [i for i, row in enumerate(rows) if not row.is_repeatable] if len(exact) < len(rows) else []


def part(batch: Tensor, places: list[int]) -> Tensor:
    """What a tensor of the whole batch [S, …] says about some places of it."""
    return batch if len(places) == batch.shape[0] else batch[places]


def put(batch: Tensor, places: list[int], some: Tensor) -> None:
    """Write what `part` has read."""
    if len(places) == batch.shape[0]:
        batch.copy_(some)
    else:
        batch[places] = some
