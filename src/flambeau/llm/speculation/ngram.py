"""N-gram speculation: proposes what followed the last time the text ended with the same tokens. No second network."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.speculation.speculator import Proposal, Proposer, TokenSpan

MIN_MATCH, MAX_MATCH = 1, 3  # tokens of the n-grams that are indexed
LONG_REPEAT = 6  # tokens: a text that repeats this many mostly goes on repeating, which is rare in running text


class NgramIndex:
    """An index of one growing list of tokens; each token is indexed once."""

    def __init__(self, tokens: Many[int]) -> None:
        self._tokens = tokens  # the sequence's own list
        self._num_indexed = 0
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → where its last occurrence was followed

    def propose(self, limit: int, min_match: int = MIN_MATCH) -> list[int]:
        """Up to `limit` tokens that followed the last occurrence of the current ending, longest match first.

        At least `min_match` tokens must match.
        """
        self._index()
        tokens, end = self._tokens, len(self._tokens)
        for size in range(min(MAX_MATCH, end - 1), min(MAX_MATCH, min_match) - 1, -1):
            start = self._after.get(tuple(tokens[end - size :]))
            if start is not None and self._matches(start, max(size, min_match)):
                # Beyond the end of the text, the repetition itself is repeated.
                return [tokens[start + i % (end - start)] for i in range(limit)]
        return []

    def _matches(self, start: int, size: int) -> bool:
        """Whether the `size` tokens before `start` are the last tokens."""
        tokens = self._tokens
        return size <= MAX_MATCH or (start >= size and tokens[start - size : start] == tokens[len(tokens) - size :])

    def _index(self) -> None:
        """Add the n-grams that end before the last token; those that end with it have no follower yet."""
        tokens = self._tokens
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in range(MIN_MATCH, min(MAX_MATCH, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)


class NgramProposer:
    """Keeps an index of every sequence that it has proposed tokens for."""

    reads_states = False

    def __init__(self, device: torch.device | str = "cpu", *, min_match: int = MIN_MATCH) -> None:
        self._device, self._min_match = torch.device(device), min_match
        self._indices: dict[Sequence, NgramIndex] = {}

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each, as if no other token could have been proposed; None: for none."""
        found = [
            self._index_of(sequence).propose(limit, self._min_match) if limit else []
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        if not any(found):
            return None
        ids = [[*tokens, *[0] * (num_ahead - len(tokens))] for tokens in found]
        return Proposal(torch.tensor(ids, device=self._device), [len(tokens) for tokens in found], None)

    def _index_of(self, sequence: Sequence) -> NgramIndex:
        if sequence not in self._indices:
            self._indices[sequence] = NgramIndex(sequence.tokens)
        return self._indices[sequence]

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """Nothing to do: the index reads the sequence's tokens."""

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Nothing to do: the index reads the sequence's tokens."""

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)


class NgramFirstProposer:
    """Asks the slower proposer only if the text of some sequence does not repeat itself at length."""

    def __init__(self, other: Proposer, ngram: NgramProposer) -> None:
        self._other, self._ngram = other, ngram
        self.reads_states = other.reads_states
        self._last_used: Proposer = other

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        proposal = self._ngram.propose(sequences, limits, num_ahead)
        if proposal is not None and all(
            length or not limit for length, limit in zip(proposal.lengths, limits, strict=True)
        ):
            self._last_used = self._ngram
            return proposal
        self._last_used = self._other
        return self._other.propose(sequences, limits, num_ahead)

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        self._last_used.record_accepted(sequence, num_before, num_proposed, num_accepted)

    def observe(self, spans: Many[TokenSpan]) -> None:
        self._other.observe(spans)

    def forget(self, sequence: Sequence) -> None:
        self._ngram.forget(sequence)
        self._other.forget(sequence)
