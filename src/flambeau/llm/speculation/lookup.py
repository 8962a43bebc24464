"""Prompt look-up: what followed the last time the text ended like this; it needs no second network."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from flambeau.llm.sequence import Sequence
from flambeau.llm.speculation.proposal import Proposal

LONGEST, SHORTEST = 3, 1  # tokens that must be the same


class Lookup:
    """An index of one growing sequence of tokens; each token is looked at once."""

    def __init__(self, tokens: Many[int]) -> None:
        self._tokens = tokens  # the very list that grows
        self._num_indexed = 0
        self._after: dict[tuple[int, ...], int] = {}  # some tokens in a row → where the last such row was followed

    def propose(self, most: int) -> list[int]:
        """Up to so many tokens that followed the longest, then latest row of tokens like the last ones."""
        self._index()
        tokens, end = self._tokens, len(self._tokens)
        for size in range(min(LONGEST, end - 1), SHORTEST - 1, -1):
            if (start := self._after.get(tuple(tokens[end - size :]))) is not None:
                # A text that repeats itself goes on repeating itself.
                return [tokens[start + i % (end - start)] for i in range(most)]
        return []

    def _index(self) -> None:
        """Add the rows that end before the last token: those which end with it have no follower yet."""
        tokens = self._tokens
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)


class LookupProposer:
    """Keeps an index of every sequence that it has proposed tokens for."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._lookups: dict[Sequence, Lookup] = {}

    def propose(self, sequences: Many[Sequence], most: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `most` tokens for each, as if nothing else could have been proposed; None: for nobody."""
        found = [
            self._of(sequence).propose(number) if number else []
            for sequence, number in zip(sequences, most, strict=True)
        ]
        if not any(found):
            return None
        ids = [[*tokens, *[0] * (num_ahead - len(tokens))] for tokens in found]
        return Proposal(torch.tensor(ids, device=self._device), [len(tokens) for tokens in found], None)

    def _of(self, sequence: Sequence) -> Lookup:
        if sequence not in self._lookups:
            self._lookups[sequence] = Lookup(sequence.tokens)
        return self._lookups[sequence]

    def kept(self, sequence: Sequence, num_before: int, num_proposed: int, num_kept: int) -> None:
        """The tokens of the sequence say it all."""

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        self._lookups.pop(sequence, None)
