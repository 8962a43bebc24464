"""TextStream: tokens to text as they are made, cut at a stop string."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from flambeau.llm.text.tokenizer import Tokenizer


class TextStream:
    """The text that follows a prompt.

    All pushes and the flush together are exactly the text of all tokens at once, up to the stop. It does not matter
    how tokens are divided among pushes. Of several stop strings the one that is complete first ends the text, and of
    two that end together the longer. A stop string may also be the name of a special token, which is no text itself.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._characters = tokenizer.characters(prompt_ids)
        self._stops = [StopString(text) for text in sorted(stop, key=len, reverse=True)]
        self._stop_names = {i: text for text in stop if (i := tokenizer.special_id(text)) is not None}
        self._include_stop = include_stop
        self._held = ""  # could be the beginning of a stop string
        self.stopped = False
        self.stopped_after: int | None = None
        """How many tokens of the push that stopped were used; later ones are no part of the text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now: complete characters that cannot be the beginning of a stop string."""
        if self.stopped:
            return ""
        certain = ""
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self._stop_names:
                certain += self._stop_at_name(self._stop_names[token_id])
            else:
                certain += self._pass(self._characters.push(token_id))
            if self.stopped:
                self.stopped_after = count
                break
        return certain

    def flush(self) -> str:
        """What was held back, at the end of a text that met no stop."""
        if self.stopped:
            return ""
        text = self._pass(self._characters.flush())
        held, self._held = self._held, ""
        return text + held

    def _pass(self, text: str) -> str:
        """What of a text goes on; the rest is held back."""
        if not text or not self._stops:
            return text
        for at, character in enumerate(text, 1):
            for stop in self._stops:
                if stop.is_complete_with(character):
                    return self._cut(self._held + text[:at], stop.text)
        text = self._held + text
        keep = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def _cut(self, text: str, stop: str) -> str:
        self.stopped, self._held = True, ""
        return text if self._include_stop else text[: -len(stop)]

    def _stop_at_name(self, name: str) -> str:
        text = self.flush()
        ends_here, self.stopped = not self.stopped, True
        return text + name if ends_here and self._include_stop else text


class StopString:
    """Follows a text character by character and knows how much of a stop string its end is (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # how many characters of the stop string the text ends with
        self._shorter = borders(text)

    def is_complete_with(self, character: str) -> bool:
        """Take one more character; whether the text now ends with the stop string."""
        self.matched = advance(self.text, self._shorter, self.matched, character)
        return self.matched == len(self.text)


@functools.lru_cache(maxsize=1024)  # all choices of a request have the same
def borders(text: str) -> tuple[int, ...]:
    """For each beginning of a text, where to go on after a mismatch: its longest beginning that is also its end."""
    shorter = [0] * len(text)
    for at in range(1, len(text)):
        shorter[at] = advance(text, shorter, shorter[at - 1], text[at])
    return tuple(shorter)


def advance(text: str, shorter: Sequence[int], matched: int, character: str) -> int:
    """How many characters of a text are matched after one more."""
    while matched and text[matched] != character:
        matched = shorter[matched - 1]
    return matched + (text[matched] == character)
