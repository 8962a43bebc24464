"""Prompt look-up: what followed the last time the text ended like this; it needs no second network."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from flambeau.llm.scheduling.sequence import Sequence
from flambeau.llm.speculation.proposal import Proposal

LONGEST, SHORTEST = 3, 1  # tokens that must be the same


class Lookup:
    """An index of one growing sequence of tokens; each token is looked at once."""

    def __init__(self, tokens: Many[int]) -> None:
        self._tokens = tokens  # the very list that grows
        self._num_indexed = 0
        self._after: dict[tuple[int, ...], int] = {}  # some tokens in a row → where the last such row was followed

    def propose(self, most: int, shortest: int = SHORTEST) -> list[int]:
        """Up to so many tokens that followed the last time a row of tokens was like the last ones; longer rows first.

        At least `shortest` tokens must have been the same.
        """
        self._index()
        tokens, end = self._tokens, len(self._tokens)
        for size in range(min(LONGEST, end - 1), min(LONGEST, shortest) - 1, -1):
            start = self._after.get(tuple(tokens[end - size :]))
            if start is not None and self._is_like(start, max(size, shortest)):
                # A text that repeats itself goes on repeating itself.
                return [tokens[start + i % (end - start)] for i in range(most)]
        return []

    def _is_like(self, start: int, size: int) -> bool:
        """Whether so many tokens before a place are the last ones."""
        tokens = self._tokens
        return size <= LONGEST or (start >= size and tokens[start - size : start] == tokens[len(tokens) - size :])

    def _index(self) -> None:
        """Add the rows that end before the last token: those which end with it have no follower yet."""
        tokens = self._tokens
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)


class LookupProposer:
    """Keeps an index of every sequence that it has proposed tokens for."""

    def __init__(self, device: torch.device | str = "cpu", *, shortest: int = SHORTEST) -> None:
        self._device, self._shortest = torch.device(device), shortest
        self._lookups: dict[Sequence, Lookup] = {}

    def propose(self, sequences: Many[Sequence], most: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `most` tokens for each, as if nothing else could have been proposed; None: for nobody."""
        found = [
            self._of(sequence).propose(number, self._shortest) if number else []
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
