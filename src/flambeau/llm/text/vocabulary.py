"""What a tokenizer's file knows: text to ids, and the bytes of each id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flambeau.llm.errors import BadRequest
from flambeau.llm.text.characters import LeadingSpaces

SPACE = "\u2581"  # how SentencePiece writes a space


class Vocabulary(Protocol):
    """Either kind of tokenizer file, as the Tokenizer uses it."""

    size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: Mapping[str, int]  # tokens that steer the model and are no text
    named_ids: Mapping[str, int]  # tokens that come from no plain text, only from their names in a template
    leading_spaces: LeadingSpaces
    has_bytes: bool  # whether each token has bytes of its own; else `decode` is needed
    finds_special: bool  # whether `encode` reads "<s>" and the like as the token of that name

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text."""

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text in which the names of special tokens are only text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a special one has its name's, one that does not exist none."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens, without special ones."""


def check_unicode(text: str) -> None:
    """Refuse half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text is not valid Unicode: {error.reason} at character {error.start}", "prompt"
        ) from None
