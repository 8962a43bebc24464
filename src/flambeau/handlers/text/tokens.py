"""Text → words and n-grams, as the torchtext functions of these names do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Apart from the words: these marks are words of their own, the others part words, double quotes vanish.
_MARKS = str.maketrans({**{mark: f" {mark} " for mark in "'.,()!?"}, ";": " ", ":": " "})


def basic_english(text: str) -> list[str]:
    """Lower-case words, with punctuation marks as words of their own."""
    return text.lower().replace('"', "").replace("<br />", " ").translate(_MARKS).split()


def get_tokenizer(tokenizer: str | Callable[[str], Any] | None, language: str = "en") -> Callable[[str], Any]:
    """A tokenizer by its name; None splits at white space, and a function is taken as it is."""
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if tokenizer != "basic_english":
        raise ValueError(f"there is no tokenizer {tokenizer!r}; give basic_english, or a function")
    if language != "en":
        raise ValueError(f"basic_english is for language 'en', not {language!r}")
    return basic_english


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """The words, then the pairs of neighbors, and so on up to `ngrams` words joined by a space."""
    for size in range(1, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])
