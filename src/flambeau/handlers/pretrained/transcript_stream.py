"""A transcript in pieces, while transformers' generate() runs in a thread."""

from __future__ import annotations

import queue
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]


class StreamClosed(Exception):
    """Nobody reads the stream any more."""


class TranscriptStream:
    """A streamer for generate(). Its texts are parts of the whole text, up to the last word that is complete.

    Whisper generates a long sound in windows, and drops what follows the last segment that is complete: text of a
    window is sent at its end. `timestamp_begin` is the first token that is a time; None: no windows.
    """

    def __init__(self, decode: Decode, eos_ids: Collection[int] = (), timestamp_begin: int | None = None) -> None:
        self._decode = decode
        self._eos_ids = eos_ids
        self._timestamp_begin = timestamp_begin
        self._texts: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self._kept: list[int] = []  # tokens of the windows before
        self._tokens: list[int] = []  # of this window
        self._is_prompt = True  # what comes next
        self._sent = ""
        self._is_closed = False

    # ---- called by generate() ----

    def put(self, value: Any) -> None:
        if self._is_closed:
            raise StreamClosed
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += value.flatten().tolist()
        if self._timestamp_begin is None:
            self._send(self._tokens)

    def end(self) -> None:
        """The end of a window."""
        if self._timestamp_begin is not None:
            tokens = [token for token in self._tokens if token not in self._eos_ids]
            self._kept += complete_segments(tokens, self._timestamp_begin)
            self._send(self._kept)
        self._tokens, self._is_prompt = [], True

    def _send(self, tokens: Sequence[int]) -> None:
        text = self._decode(tokens)
        self._put(text[: complete_length(text)])

    def _put(self, text: str) -> None:
        if len(text) > len(self._sent) and text.startswith(self._sent):
            self._texts.put(text[len(self._sent) :])
            self._sent = text

    # ---- called by the handler ----

    def texts(self, generate: Callable[[], str]) -> Iterator[str]:
        """The pieces of what `generate`, which uses this streamer, returns in the end."""
        threading.Thread(target=self._run, args=(generate,), name="transcript", daemon=True).start()
        try:
            while (text := self._texts.get()) is not None:
                if isinstance(text, BaseException):
                    raise text
                yield text
        finally:
            self._is_closed = True  # the thread ends with its next token

    def _run(self, generate: Callable[[], str]) -> None:
        try:
            whole = generate()
            if not whole.startswith(self._sent):
                raise RuntimeError(
                    f"the transcript is not what was streamed of it, which ends with {self._sent[-40:]!r}; "
                    "ask for it without stream"
                )
            self._put(whole)
            self._texts.put(None)
        except BaseException as error:
            self._texts.put(error)


def complete_length(text: str) -> int:
    """The characters before the last space, or up to the last letter of a script that may have no spaces."""
    for end in range(len(text), 0, -1):
        if text[end - 1] == " ":
            return end - 1
        if unicodedata.category(text[end - 1]) == "Lo":
            return end
    return 0


def complete_segments(tokens: Sequence[int], timestamp_begin: int) -> Sequence[int]:
    """The tokens of a window that Whisper keeps. It computes what follows the last pair of times again."""
    is_time = [token >= timestamp_begin for token in tokens]
    pairs = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    return tokens if not pairs or is_time[-2:] == [False, True] else tokens[: pairs[-1]]
