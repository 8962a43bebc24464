"""ReasoningBudget: ends a thought after so many tokens, by the markers that the model would write itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.core.sequence import TokenGrammar
from flambeau.llm.grammar.matcher import WORD

Bits = NDArray[np.int32]


class ReasoningBudget:
    """A grammar in three parts: the reply as it would be, the tokens that end its thought, and the answer.

    The first one applies up to `limit` tokens, and beyond them if the model is not thinking then.
    """

    is_contradiction = False

    def __init__(
        self,
        *,
        limit: int,
        close_ids: Sequence[int],
        is_thinking: Callable[[Sequence[int]], bool],
        vocab_size: int,
        reply: TokenGrammar | None,
        answer: TokenGrammar | None,
    ) -> None:
        self._limit, self._close_ids, self._is_thinking = limit, close_ids, is_thinking
        self._num_words = -(-vocab_size // WORD)
        self._reply, self._answer = reply, answer
        self._answer_at = limit + len(close_ids)
        self._ids: list[int] = []  # all that was read
        self._is_cut: bool | None = None  # None: the limit is not reached yet

    @property
    def has_form(self) -> bool:
        grammar = self._answer or self._reply
        return grammar is not None and grammar.has_form

    @property
    def error(self) -> str:
        return (self._reply.error if self._reply else "") or (self._answer.error if self._answer else "")

    def read_to_end(self, new_ids: Sequence[int]) -> int | None:
        for number, token in enumerate(new_ids, 1):
            grammar = self._grammar_at(len(self._ids))
            self._ids.append(token)
            if grammar is not None and grammar.read_to_end([token]) is not None:
                return number
        return None

    def _grammar_at(self, place: int) -> TokenGrammar | None:
        if place < self._limit or not self._cuts(self._ids):
            return self._reply
        return self._answer if place >= self._answer_at else None

    def _cuts(self, ids: Sequence[int]) -> bool:
        """Whether the thought is ended here; `ids` has at least the tokens up to the limit."""
        if self._is_cut is None:
            is_cut = self._is_thinking(ids[: self._limit])
            if len(self._ids) >= self._limit:  # they are not only proposed
                self._is_cut = is_cut
            return is_cut
        return self._is_cut

    def masks(self, tokens: Sequence[int], ahead: Sequence[int], first: int, num_places: int) -> Bits:
        self._ids = [*tokens]
        begin, end = len(tokens) + first, len(tokens) + first + num_places
        known = [*tokens, *ahead]
        if end <= self._limit or len(known) < self._limit or not self._cuts(known):
            return self._of_reply(tokens, ahead, first, num_places)
        rows = []
        if begin < self._limit:
            rows.append(self._of_reply(tokens, ahead, first, self._limit - begin))
        for place in range(max(begin, self._limit), min(end, self._answer_at)):
            rows.append(self._only(self._close_ids[place - self._limit]))
        if end > self._answer_at:
            start = max(begin, self._answer_at)
            rows.append(self._of_answer(tokens, known, start, end - start))
        return np.concatenate(rows)

    def fill(self, tokens: Sequence[int], num_prompt: int, row: Bits) -> None:
        row[:] = self.masks(tokens[num_prompt:], (), 0, 1)[0]

    def _of_reply(self, tokens: Sequence[int], ahead: Sequence[int], first: int, num_places: int) -> Bits:
        if self._reply is None:
            return self._all(num_places)
        bits: Bits = self._reply.masks(tokens, ahead, first, num_places)
        return bits

    def _of_answer(self, tokens: Sequence[int], known: Sequence[int], start: int, num_places: int) -> Bits:
        if self._answer is None:
            return self._all(num_places)
        read_to = max(len(tokens), self._answer_at)
        bits: Bits = self._answer.masks(tokens[self._answer_at :], known[read_to:], start - read_to, num_places)
        return bits

    def _all(self, num_places: int) -> Bits:
        return np.full((num_places, self._num_words), -1, np.int32)

    def _only(self, token: int) -> Bits:
        bits = np.zeros((1, self._num_words), np.uint32)
        bits[0, token // WORD] = np.uint32(1 << token % WORD)
        return bits.view(np.int32)
