"""Text → words and n-grams → indices in a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.errors import HandlerError

UNKNOWN = "<unk>"
PADDING = "<pad>"
# These marks become words of their own, the others separate words.
_MARKS = str.maketrans({**{mark: f" {mark} " for mark in "'.,()!?"}, ";": " ", ":": " "})


# ---- words; the names and results are those of torchtext ----


def basic_english(text: str) -> list[str]:
    """Lower-case words; punctuation marks are words, double quotes are dropped."""
    return text.lower().replace('"', "").replace("<br />", " ").translate(_MARKS).split()


def get_tokenizer(tokenizer: str | Callable[[str], Any] | None, language: str = "en") -> Callable[[str], Any]:
    """A tokenizer by name; None splits at white space, and a function is returned unchanged."""
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
    """The words, then pairs of neighbors, and so on up to `ngrams` words joined by a space."""
    for size in range(1, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])


# ---- indices ----


def load_vocabulary(path: Path, *, weights_only: bool = True) -> Any:
    """A dict of token → index; with `weights_only=False` also any object that was pickled."""
    import torch

    try:
        vocabulary = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        remedy = (
            "save a dict of token → index with torch.save, or, if you trust the file, "
            "set weights_only: false in model-config.yaml"
        )
        raise HandlerError(f"the vocabulary {path.name} cannot be loaded: {error}; {remedy}") from error
    if isinstance(vocabulary, (list, tuple)):
        return {token: index for index, token in enumerate(vocabulary)}
    if isinstance(vocabulary, Mapping) or not weights_only:
        return vocabulary
    raise HandlerError(
        f"the vocabulary {path.name} holds {type(vocabulary).__name__}, not a dict of token → index or a list of tokens"
    )


def index_of(vocabulary: Any, token: str) -> int | None:
    """The index of a token, else that of `<unk>`; None if the vocabulary has neither."""
    found = look_up(vocabulary, token)
    return found if found is not None else look_up(vocabulary, UNKNOWN)


def reference_index(vocabulary: Any) -> int:
    """The index of a token without meaning: padding, else the unknown token, else the first."""
    found = look_up(vocabulary, PADDING)
    return found if found is not None else index_of(vocabulary, UNKNOWN) or 0


def look_up(vocabulary: Any, token: str) -> int | None:
    """The index of a token in a mapping, or in an object with `__getitem__` or `lookup`."""
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(token)
    else:
        # A user's own class: there is no common protocol.
        get = vocabulary.__getitem__ if hasattr(vocabulary, "__getitem__") else vocabulary.lookup
        try:
            found = get(token)
        except (LookupError, RuntimeError):  # torchtext's compiled vocabulary raises RuntimeError
            return None
    return None if found is None else int(found)
