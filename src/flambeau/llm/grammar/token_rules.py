"""TokenRules: allowed tokens, bad words and repeated n-grams, as masks over those of a sequence's own grammar.

They depend on the tokens alone, so every path that knows grammars keeps them: speculation, CUDA graphs, resumed
replies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.core.sequence import TokenGrammar
from flambeau.llm.grammar.matcher import WORD
from flambeau.llm.sampling_params import SamplingParams

Bits = NDArray[np.int32]
Ending = tuple[int, ...]
RULES = ("allowed_token_ids", "bad_words", "no_repeat_ngram_size")
NO_TOKENS: frozenset[int] = frozenset()


def has_rules(params: SamplingParams) -> bool:
    return bool(params.allowed_token_ids or params.bad_words or params.no_repeat_ngram_size)


class BadSequences:
    """Tokens that may not follow each other: which token would complete such a sequence, by the tokens before it."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last: dict[int, dict[Ending, set[int]]] = {}  # length of the ending → ending → its last tokens
        for *ending, last in sequences:
            self._last.setdefault(len(ending), {}).setdefault(tuple(ending), set()).add(last)

    @property
    def single(self) -> set[int]:
        """The tokens that are bad whatever comes before them."""
        return self._last.get(0, {}).get((), set())

    def after(self, tokens: Sequence[int]) -> Iterable[int]:
        for length, last in self._last.items():
            if 0 < length <= len(tokens):
                yield from last.get(tuple(tokens[-length:]), ())


class Followers:
    """The tokens that have followed each ending of `length` tokens in a text."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._after: dict[Ending, set[int]] = {}

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Add the tokens from `start` on; those before them are their endings."""
        for place in range(max(start, self._length), len(tokens)):
            self._after.setdefault(tuple(tokens[place - self._length : place]), set()).add(tokens[place])

    def of(self, ending: Ending) -> set[int] | frozenset[int]:
        return self._after.get(ending, NO_TOKENS)


class PromptNgrams:
    """The n-grams of a prompt, which its choices share; they are indexed when the first mask needs them."""

    def __init__(self, size: int, prompt_ids: Sequence[int]) -> None:
        self.length = size - 1
        self._ids = prompt_ids

    @cached_property
    def followers(self) -> Followers:
        found = Followers(self.length)
        found.read(self._ids, 0)
        return found

    @cached_property
    def tail(self) -> list[int]:
        """The tokens that n-grams of the text may begin with."""
        return [*self._ids[max(0, len(self._ids) - self.length) :]]


class RepeatedNgrams:
    """The tokens that would complete an n-gram of the prompt or the text once more."""

    def __init__(self, prompt: PromptNgrams) -> None:
        self._prompt = prompt
        self._own = Followers(prompt.length)
        self._num_read = 0  # generated tokens

    def after(self, tokens: Sequence[int], ahead: Sequence[int]) -> set[int]:
        """After the generated tokens and some ahead of them; only the former are kept."""
        tail, length = self._prompt.tail, self._prompt.length
        known = [*tail, *tokens]
        self._own.read(known, len(tail) + self._num_read)
        self._num_read = len(tokens)
        whole = [*known, *ahead]
        if len(whole) < length:
            return set()
        ending = tuple(whole[len(whole) - length :])
        proposed = Followers(length)
        proposed.read(whole, len(known))
        return {*self._prompt.followers.of(ending), *self._own.of(ending), *proposed.of(ending)}


class TokenRules:
    """A grammar for the rules of one sequence, around the grammar that its text has, if it has one."""

    def __init__(
        self,
        *,
        allowed: Bits,
        bad: BadSequences,
        ngrams: PromptNgrams | None,
        names: Sequence[str],
        inner: TokenGrammar | None = None,
        end_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`allowed` are the bits of the tokens that may ever come; it is shared. `end_ids` come after `min_tokens`."""
        self._base = allowed
        self._bad, self._inner, self._names = bad, inner, names
        self._repeats = None if ngrams is None else RepeatedNgrams(ngrams)
        self._end_ids, self._min_tokens = end_ids, min_tokens
        self._is_stuck = self._is_early = False

    @property
    def error(self) -> str:
        if not self.is_contradiction:
            return self._inner.error if self._inner is not None else ""
        early = ["min_tokens"] if self._is_early else []
        form = ["the form of the text"] if self._inner is not None else []
        return f"{' and '.join([*self._names, *early, *form])} leave no token that may follow; ask for less"

    @property
    def is_contradiction(self) -> bool:
        return self._is_stuck and not (self._inner is not None and self._inner.error)

    @property
    def has_form(self) -> bool:
        return self._inner is not None and self._inner.has_form

    def read_to_end(self, new_ids: Sequence[int]) -> int | None:
        return None if self._inner is None else self._inner.read_to_end(new_ids)

    def masks(self, tokens: Sequence[int], ahead: Sequence[int], first: int, num_places: int) -> Bits:
        if self._inner is None:
            bits: Bits = np.repeat(self._base[None], num_places, 0)
        else:
            bits = self._inner.masks(tokens, ahead, first, num_places) & self._base
        for row, place in zip(bits, range(first, first + num_places), strict=True):
            before = [*tokens, *ahead[:place]] if place else tokens
            forbid(row, self._bad.after(before))
            if len(before) < self._min_tokens:
                forbid(row, self._end_ids)
            if self._repeats is not None:
                forbid(row, self._repeats.after(tokens, ahead[:place]))
        self._is_stuck = not bits.any(-1).all()
        self._is_early = len(tokens) < self._min_tokens
        return bits

    def fill(self, tokens: Sequence[int], num_prompt: int, row: Bits) -> None:
        row[:] = self.masks(tokens[num_prompt:], (), 0, 1)[0]


def bits_of(allowed_ids: Sequence[int] | None, bad: BadSequences, vocab_size: int) -> Bits:
    """The bits of the tokens that are allowed whatever comes before them; `allowed_ids` None: all but the bad ones."""
    num_words = -(-vocab_size // WORD)
    flags = np.full(num_words * WORD, allowed_ids is None)
    if allowed_ids is not None:
        flags[np.array(allowed_ids)] = True
    flags[[*bad.single]] = False
    bits: Bits = np.packbits(flags, bitorder="little").view(np.int32)
    return bits


def forbid(row: Bits, tokens: Iterable[int]) -> None:
    """Clear the bits of these tokens."""
    ids = np.fromiter(tokens, np.int64)
    if len(ids):
        np.bitwise_and.at(
            row.view(np.uint32), ids // WORD, ~np.left_shift(np.uint32(1), (ids % WORD).astype(np.uint32))
        )
