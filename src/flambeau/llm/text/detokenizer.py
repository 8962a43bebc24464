"""Detokenizer: tokens → text while they are generated, cut at a stop string.

A character decoder turns tokens into characters; it returns complete characters at once and keeps incomplete ones.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

LeadingSpaces = Literal["keep", "drop one", "drop all"]
"""What happens to spaces at the start of a text: SentencePiece adds one that is not part of it."""

REPLACEMENT = "\ufffd"
EACH_BYTE = "flambeau.replace_each_byte"  # an error handler of Python's codecs


def replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """One replacement character for each byte that is not text, as SentencePiece decodes it."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, replace_each_byte)


class CharacterDecoder(Protocol):
    """Turns the tokens after a prompt into characters."""

    def push(self, token_id: int) -> str:
        """Return the characters that are complete now."""

    def flush(self) -> str:
        """Return what is left of an incomplete character."""


class Detokenizer:
    """The text that follows a prompt.

    All pushes and the flush together are exactly the text of all tokens at once, up to the stop, however the tokens are
    divided among pushes. The stop string that is complete first ends the text; of two that end together, the longer
    one. A stop string may also be the name of a special token, which is not text itself.
    """

    def __init__(
        self,
        decoder: CharacterDecoder,
        *,
        stop: Sequence[str] = (),
        stop_names: Mapping[int, str] | None = None,
        include_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = [StopString(text) for text in sorted(stop, key=len, reverse=True)]
        self._stop_names = stop_names or {}  # special tokens that end the text
        self._include_stop = include_stop
        self._held = ""  # could be the beginning of a stop string
        self.stopped = False
        self.stopped_after: int | None = None
        """How many tokens of the push that stopped were used; later ones are not part of the text."""
        self.stopped_by = ""  # the stop string that ended the text

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is final now: complete characters that cannot begin a stop string."""
        if self.stopped:
            return ""
        final = ""
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self._stop_names:
                final += self._stop_at_name(self._stop_names[token_id])
            else:
                final += self._release(self._decoder.push(token_id))
            if self.stopped:
                self.stopped_after = count
                break
        return final

    def flush(self) -> str:
        """Return what was held back, at the end of a text without a stop."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.flush())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        """The part of held and new text that is final; the rest is held back."""
        if not text or not self._stops:
            return text
        for at, character in enumerate(text, 1):
            for stop in self._stops:
                if stop.push(character):
                    return self._cut(self._held + text[:at], stop.text)
        text = self._held + text
        keep = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def _cut(self, text: str, stop: str) -> str:
        self.stopped, self._held, self.stopped_by = True, "", stop
        return text if self._include_stop else text[: -len(stop)]

    def _stop_at_name(self, name: str) -> str:
        text = self.flush()
        ends_here, self.stopped = not self.stopped, True
        self.stopped_by = self.stopped_by or name
        return text + name if ends_here and self._include_stop else text


class StopString:
    """Tracks how much of a stop string a text ends with, character by character (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of the stop string that the text ends with
        self._borders = borders(text)

    def push(self, character: str) -> bool:
        """Take one more character; True if the text now ends with the stop string."""
        self.matched = advance(self.text, self._borders, self.matched, character)
        return self.matched == len(self.text)


@functools.lru_cache(maxsize=1024)  # all choices of a request have the same stop strings
def borders(text: str) -> tuple[int, ...]:
    """For each prefix of a text, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(text)
    for at in range(1, len(text)):
        lengths[at] = advance(text, lengths, lengths[at - 1], text[at])
    return tuple(lengths)


def advance(text: str, lengths: Sequence[int], matched: int, character: str) -> int:
    """How many characters of a text are matched after one more."""
    while matched and text[matched] != character:
        matched = lengths[matched - 1]
    return matched + (text[matched] == character)


class ByteDecoder:
    """For vocabularies whose tokens have bytes of their own: the text is these bytes as UTF-8.

    A byte that cannot belong to a character becomes a replacement character as soon as that is certain.
    """

    def __init__(
        self,
        visible_bytes: Callable[[int], bytes],
        spaces: LeadingSpaces,
        prompt_ids: Sequence[int] = (),
        errors: str = "replace",
    ) -> None:
        self._visible_bytes = visible_bytes
        self._spaces = spaces  # becomes "keep" once the text has begun
        decoder: Any = codecs.getincrementaldecoder("utf-8")(errors)
        self._decoder = decoder
        self._decode: Callable[..., str] = decoder.decode
        self._skip_prompt(prompt_ids)

    def push(self, token_id: int) -> str:
        piece = self._visible_bytes(token_id)
        if self._spaces != "keep" and piece:
            piece = self._begin(piece)
        if piece.isascii() and not self._decoder.buffer:  # most tokens; the decoder takes several times as long
            return piece.decode("ascii")
        return self._decode(piece)

    def flush(self) -> str:
        return self._decode(b"", True)

    def _begin(self, piece: bytes) -> bytes:
        stripped = strip_leading(piece, self._spaces)
        if stripped or self._spaces == "drop one":
            self._spaces = "keep"
        return stripped

    def _skip_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Continue where the prompt ends, which may be inside a character.

        Only the last three bytes matter: a byte that begins a character does so whatever precedes it.
        """
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._visible_bytes(token_id) + tail
            if len(tail) >= 4 and strip_leading(tail, self._spaces):
                break
        if tail:
            self._decode(self._begin(tail))


class WindowDecoder:
    """For all other vocabularies: decodes the last few tokens again and returns what was added to their text."""

    CONTEXT = 8  # tokens before the new ones, so that a token is decoded among its neighbors
    MAX_PENDING = 8  # tokens held back for the rest of a character
    MAX_PARTS = 3  # replacement characters that an incomplete character may be shown as

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-self.CONTEXT :])
        self._returned = decode(self._ids)
        self._pending = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._pending += 1
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._return_new(text)
        if self._pending < self.MAX_PENDING:
            return ""
        num_shown = len(text) - len(text.rstrip(REPLACEMENT))
        return self._return_new(text, num_held=min(num_shown, self.MAX_PARTS))  # the text may hold such characters

    def flush(self) -> str:
        return self._return_new(self._decode(self._ids)) if self._pending else ""

    def _return_new(self, text: str, num_held: int = 0) -> str:
        """What was added, without the last `num_held` characters, which further tokens may change."""
        whole = text[: len(text) - num_held]
        new, self._returned = whole[len(self._returned) :], whole
        if not num_held:
            self._pending = 0
        if len(self._ids) >= 2 * self.CONTEXT:
            self._ids = self._ids[-self.CONTEXT :]
            text = self._decode(self._ids)
            self._returned = text[: len(text) - num_held]
        return new


class MarkerDecoder:
    """Gives some special tokens a text; another decoder decodes all others."""

    def __init__(self, decoder: CharacterDecoder, texts: Mapping[int, str]) -> None:
        self._decoder, self._texts = decoder, texts

    def push(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        return self._decoder.push(token_id) if text is None else self._decoder.flush() + text

    def flush(self) -> str:
        return self._decoder.flush()


def strip_leading(text: bytes, spaces: LeadingSpaces) -> bytes:
    """The bytes of a whole text without the leading spaces that are not part of it."""
    if spaces == "drop one":
        return text.removeprefix(b" ")
    return text.lstrip(b" ") if spaces == "drop all" else text
