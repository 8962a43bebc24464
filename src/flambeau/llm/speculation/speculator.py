"""Speculator: decides how many tokens are proposed for whom. Proposer and Proposal: what a method provides."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flambeau.llm.core.sequence import SamplingState, Sequence
from flambeau.llm.speculation.adaptive_k import AdaptiveK


class Speculator:
    """A proposer, and the number of tokens that has paid off so far."""

    def __init__(self, proposer: Proposer, *, numbers: Many[int], max_step_tokens: int) -> None:
        self._proposer = proposer
        self._max_ahead = max(numbers)
        self._max_step_tokens = max_step_tokens
        self._adaptive_k = AdaptiveK(numbers)

    def num_ahead(self, running: Many[Sequence]) -> int:
        """How many tokens to propose for each sequence in the next step."""
        decoding = [sequence for sequence in running if sequence.is_decoding]
        if not any(sequence.params.speculate for sequence in decoding):
            return 0
        if len(decoding) > max_batch(self._max_step_tokens, self._max_ahead):
            return 0
        return self._adaptive_k.num_ahead(batch_kind(decoding))

    def propose(self, sequences: Many[Sequence], num_ahead: int) -> Proposal | None:
        """Tokens for the sequences that allow speculation and have room; None: for none."""
        # The token that the target adds itself needs room too.
        limits = [min(num_ahead, s.room - 1) if s.params.speculate else 0 for s in sequences]
        return self._proposer.propose(sequences, limits, num_ahead) if any(limits) else None

    def record_accepted(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Called after verification, before the sequence gets its new tokens."""
        sequence.num_drafted += num_proposed
        sequence.num_accepted += num_accepted
        self._proposer.record_accepted(sequence, len(sequence.tokens), num_proposed, num_accepted)

    def record_step(self, sequences: Many[Sequence], num_ahead: int, seconds: float, num_accepted: Many[int]) -> None:
        """The duration of a step that only decoded, and the accepted tokens of each sequence."""
        self._adaptive_k.record(batch_kind(sequences), num_ahead, seconds, num_accepted)

    @property
    def reads_states(self) -> bool:
        """Whether `observe` has to be called."""
        return self._proposer.reads_states

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Called after each pass of the target, before the sequences get new tokens."""
        self._proposer.observe(spans)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has left or was preempted."""
        self._proposer.forget(sequence)


def max_batch(max_step_tokens: int, num_ahead: int) -> int:
    """How many sequences may have proposals at a time: prompts need room in a step too."""
    return max_step_tokens // (2 * (1 + num_ahead))


def batch_kind(sequences: Many[Sequence]) -> tuple[int, bool, bool]:
    """Groups steps of similar cost and acceptance: by batch size (1, 2–3, 4–7, 8–15 …) and by sampling method."""
    is_greedy = all(sequence.params.is_greedy for sequence in sequences)
    is_repeatable = is_greedy or all(sequence.sampling.is_repeatable for sequence in sequences)
    return len(sequences).bit_length(), is_greedy, is_repeatable


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of a sequence that a pass of the target has computed, those of rejected proposals left out."""

    sequence: Sequence
    start: int  # the position of the first
    row: int  # of the first, among the tokens of the pass
    length: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens for a batch, how many of them count, and what they were drawn from."""

    ids_SK: Tensor
    lengths: list[int]
    q_RKV: Tensor | None  # probabilities; None: no other token could have been proposed


class Proposer(Protocol):
    """Guesses the next tokens of sequences."""

    @property
    def reads_states(self) -> bool:
        """Whether it reads the target's hidden states, so that `observe` has to be called."""

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence, in a tensor of `num_ahead` columns; None: for none."""

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """Called after verification; the sequence had `num_before` tokens when they were proposed."""

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Called after each pass of the target, before the sequences get new tokens."""

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
