"""Speculator: who gets how many tokens proposed in a step, as long as it pays."""

from __future__ import annotations

from collections.abc import Sequence as Many

from flambeau.llm.scheduling.sequence import Sequence
from flambeau.llm.speculation.proposal import Proposal, Proposer
from flambeau.llm.speculation.worth import Worth


class Speculator:
    """A proposer, and what is known about its worth."""

    def __init__(self, proposer: Proposer, *, numbers: Many[int], max_step_tokens: int) -> None:
        self._proposer = proposer
        self._most = max(numbers)
        self._max_step_tokens = max_step_tokens
        self._worth = Worth(numbers)

    def num_ahead(self, running: Many[Sequence]) -> int:
        """How many tokens to propose for each sequence in the next step; 0: none."""
        decoding = [sequence for sequence in running if sequence.is_decoding]
        if not any(sequence.params.speculate for sequence in decoding):
            return 0
        if 2 * len(decoding) * (1 + self._most) > self._max_step_tokens:  # prompts need room in a step too
            return 0
        return self._worth.num_ahead(kind_of(decoding))

    def propose(self, sequences: Many[Sequence], num_ahead: int) -> Proposal | None:
        """Tokens for those who want any and have room for them; None: for nobody."""
        # The token that the network adds by itself needs room too.
        most = [min(num_ahead, s.room - 1) if s.params.speculate else 0 for s in sequences]
        return self._proposer.propose(sequences, most, num_ahead) if any(most) else None

    def kept(self, sequence: Sequence, num_proposed: int, num_kept: int) -> None:
        """A round is over; the sequence does not have its new tokens yet."""
        sequence.num_drafted += num_proposed
        sequence.num_accepted += num_kept
        self._proposer.kept(sequence, len(sequence.tokens), num_proposed, num_kept)

    def note(self, sequences: Many[Sequence], num_ahead: int, seconds: float, kept: Many[int]) -> None:
        """How long a step took that did nothing but decode, and how many proposals each sequence has kept."""
        self._worth.note(kind_of(sequences), num_ahead, seconds, kept)

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        self._proposer.forget(sequence)


def kind_of(sequences: Many[Sequence]) -> tuple[int, bool, bool]:
    """What makes steps alike in their price and in what they keep: about how many sequences, and how they sample."""
    is_greedy = all(sequence.params.is_greedy for sequence in sequences)
    is_repeatable = is_greedy or all(sequence.row.is_repeatable for sequence in sequences)
    return len(sequences).bit_length(), is_greedy, is_repeatable  # 1, 2–3, 4–7, 8–15 …
