"""Tokens to characters, one token at a time: what is certain is given at once, half a character is kept."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

LeadingSpaces = Literal["keep", "drop one", "drop all"]
"""What becomes of spaces at the very beginning of a text: SentencePiece writes one there that no one typed."""

REPLACEMENT = "\ufffd"


class Characters(Protocol):
    """Turns the tokens after a prompt into text."""

    def push(self, token_id: int) -> str:
        """The characters that are complete now."""

    def flush(self) -> str:
        """What is left of a character that was never completed."""


def strip_leading(text: bytes, spaces: LeadingSpaces) -> bytes:
    """The bytes of a whole text without the leading spaces that are no part of it."""
    if spaces == "drop one":
        return text.removeprefix(b" ")
    return text.lstrip(b" ") if spaces == "drop all" else text


class ByteCharacters:
    """For vocabularies whose tokens have bytes of their own: text is those bytes in a row, as UTF-8.

    A byte that can belong to no character becomes one replacement character, as soon as that is certain.
    """

    def __init__(
        self, visible_bytes: Callable[[int], bytes], spaces: LeadingSpaces, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._visible_bytes = visible_bytes
        self._spaces = spaces  # becomes "keep" once the text has begun
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._skip_prompt(prompt_ids)

    def push(self, token_id: int) -> str:
        """The characters that are complete now."""
        piece = self._visible_bytes(token_id)
        if self._spaces != "keep" and piece:
            piece = self._begin(piece)
        return self._decode(piece)

    def flush(self) -> str:
        """What is left of a character that was never completed."""
        return self._decode(b"", True)

    def _begin(self, piece: bytes) -> bytes:
        stripped = strip_leading(piece, self._spaces)
        if stripped or self._spaces == "drop one":
            self._spaces = "keep"
        return stripped

    def _skip_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Take over where the prompt ends: within a character, perhaps.

        Only the last three bytes matter for that, and a byte that begins a character does so whatever is before it.
        """
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._visible_bytes(token_id) + tail
            if len(tail) >= 4 and strip_leading(tail, self._spaces):
                break
        if tail:
            self._decode(self._begin(tail))


class WindowCharacters:
    """For all other vocabularies: decodes the last few tokens again and gives what that adds to their text."""

    CONTEXT = 8  # tokens kept before the new ones, so that a token is decoded among its neighbors
    MOST_PENDING = 8  # tokens held back for the rest of a character

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-self.CONTEXT :])
        self._given = decode(self._ids)
        self._pending = 0

    def push(self, token_id: int) -> str:
        """The characters that are complete now."""
        self._ids.append(token_id)
        self._pending += 1
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and self._pending < self.MOST_PENDING:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What was held back."""
        return self._give(self._decode(self._ids)) if self._pending else ""

    def _give(self, text: str) -> str:
        new, self._given, self._pending = text[len(self._given) :], text, 0
        if len(self._ids) >= 2 * self.CONTEXT:
            self._ids = self._ids[-self.CONTEXT :]
            self._given = self._decode(self._ids)
        return new
