"""Vocabulary: what a tokenizer file provides: text → ids, and the bytes of each id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.text.detokenizer import LeadingSpaces

SPACE = "\u2581"  # how SentencePiece writes a space


class Vocabulary(Protocol):
    """A tokenizer file as the Tokenizer uses it; there are two kinds."""

    size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: Mapping[str, int]  # control tokens, which are not text
    named_ids: Mapping[str, int]  # tokens that only their names in a template produce
    leading_spaces: LeadingSpaces
    has_bytes: bool  # each token has bytes of its own; otherwise `decode` is needed
    finds_special: bool  # `encode` turns "<s>" into the token of that name

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text."""

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text; names of special tokens are plain text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token: the name of a special token, nothing for an unknown id."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens, without special tokens."""


def check_unicode(text: str) -> None:
    """Reject half a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode: {error.reason} at character {error.start}", "prompt"
        ) from None
