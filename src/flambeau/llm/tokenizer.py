"""Tokenizer: text ↔ token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    eos_ids: frozenset[int]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder."""
    raise NotImplementedError(path)
