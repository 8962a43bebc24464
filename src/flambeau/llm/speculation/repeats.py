"""RepeatsProposer: what the text says again, where it repeats itself at length; else what another proposer says."""

from __future__ import annotations

from collections.abc import Sequence as Many

from flambeau.llm.scheduling.sequence import Sequence
from flambeau.llm.speculation.lookup import LookupProposer
from flambeau.llm.speculation.proposal import Proposal, Proposer

LONG = 6  # tokens: whoever has said so many again mostly goes on; in running text that hardly happens


class RepeatsProposer:
    """Asks the other proposer, whose answer takes time, only if somebody's text does not repeat itself."""

    def __init__(self, other: Proposer, lookup: LookupProposer) -> None:
        self._other, self._lookup = other, lookup
        self._asked: Proposer = other

    def propose(self, sequences: Many[Sequence], most: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `most` tokens for each; None: for nobody."""
        proposal = self._lookup.propose(sequences, most, num_ahead)
        if proposal is not None and all(
            length or not wanted for length, wanted in zip(proposal.lengths, most, strict=True)
        ):
            self._asked = self._lookup
            return proposal
        self._asked = self._other
        return self._other.propose(sequences, most, num_ahead)

    def kept(self, sequence: Sequence, num_before: int, num_proposed: int, num_kept: int) -> None:
        """Whoever has proposed them is told."""
        self._asked.kept(sequence, num_before, num_proposed, num_kept)

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        self._lookup.forget(sequence)
        self._other.forget(sequence)
