"""GrammarMatcher: where the text of one sequence is in its grammar, and which tokens may follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORD = 32  # tokens in a word of a mask
TOO_COMPLEX = "the grammar needs more time or memory for the next token than a step has; simplify it"


class GrammarMatcher:
    """Reads the tokens of one sequence as they come. Not thread-safe."""

    has_form = True
    is_contradiction = False

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int], vocab_size: int, *, ignore_eos: bool) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self._num_words = -(-vocab_size // WORD)
        self._num_read = 0
        self._ignored_ids = [*eos_ids] if ignore_eos else []
        self._other_bits = ~end_bits(eos_ids, self._num_words)
        self.error = ""

    def read_to_end(self, new_ids: Sequence[int]) -> int | None:
        for number, token in enumerate(new_ids, 1):
            if self.error or token in self._eos_ids:
                return None
            self._num_read += 1
            if not self._matcher.consume_token(token):
                self._fail()
            elif self._matcher.is_stopped():
                return number
        return None

    def masks(self, tokens: Sequence[int], ahead: Sequence[int], first: int, num_places: int) -> NDArray[np.int32]:
        self._read(tokens)
        bits = np.full((num_places, self._num_words), -1, np.int32)
        num_ahead = 0
        for place in range(first + num_places):
            if place >= first:
                self._fill(bits[place - first])
            if place >= len(ahead) or place == first + num_places - 1 or not self._try(ahead[place]):
                break
            num_ahead += 1
        if num_ahead:
            self._matcher.rollback(num_ahead)
        return bits

    def fill(self, tokens: Sequence[int], num_prompt: int, row: NDArray[np.int32]) -> None:
        if len(tokens) - num_prompt != self._num_read:
            self._read(tokens[num_prompt:])
        self._fill(row)

    def _read(self, tokens: Sequence[int]) -> None:
        """Catch up with a sequence that was resumed; other tokens have been read as they came."""
        new = [*tokens[self._num_read :]]
        self._num_read = len(tokens)
        if new and not self.error and not self._matcher.consume_tokens(new):
            self._fail()

    def _try(self, token: int) -> bool:
        """Go one token ahead; False if it is not allowed or ends the text."""
        return token not in self._eos_ids and self._matcher.try_consume_tokens([token]) == 1

    def _fill(self, row: NDArray[np.int32]) -> None:
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                self._fail()
        if self.error:
            row[:] = 0  # no token can be chosen, which ends the sequence
        elif any(row[token // WORD] >> token % WORD & 1 for token in self._ignored_ids):
            others = row & self._other_bits
            if others.any():
                row[:] = others

    def _fail(self) -> None:
        reason = self._matcher.get_error().partition("\n")[0]
        self.error = f"{TOO_COMPLEX} ({reason})" if reason else TOO_COMPLEX


def end_bits(ids: Collection[int], num_words: int) -> NDArray[np.int32]:
    bits: NDArray[Any] = np.zeros(num_words, np.uint32)
    for token in ids:
        bits[token // WORD] |= np.uint32(1 << token % WORD)
    return bits.view(np.int32)
