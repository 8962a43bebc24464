"""StreamParser: the base of the parsers of all families.

A parser is written as if the whole text were there: a generator that yields where it needs more text. What it emits
depends on the text so far and not on how the text was divided, so a stream and a whole reply say the same.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flambeau.llm.chat.deltas import CallDelta, ChatDelta
from flambeau.llm.chat.json_text import SCALAR_END, JsonScanner, escape_text

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # yields while more text is needed

MARK = "\ufdd1"  # before the name of a special token in the text; a noncharacter, so that no other text has it
NAME = re.compile(r"[\w.:/-]{1,256}")
MAX_HEAD = 4096  # characters before the arguments of a call, such as its name and id


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtMarkers:
    """The texts around a model's reasoning."""

    open: str
    close: str
    label: str = ""  # a word after the opening one that is not part of the reasoning
    wrappers: Sequence[str] = ()  # around the answer after a thought, and no part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """What a parser knows of its model and request."""

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the schemas of their parameters, by name
    thought: ThoughtMarkers | None = None
    starts_in_thought: bool = False  # the prompt has opened it
    special: frozenset[str] = frozenset()  # markers that are special tokens in this vocabulary


class StreamParser:
    """Separates reasoning, answer and calls. A subclass says what a call looks like; by itself it finds none."""

    open, close = "", ""  # around calls, in families that have such markers
    markers: Sequence[str] = ()  # texts that begin a call

    def __init__(self, options: ParserOptions) -> None:
        self.options = options
        self.is_reasoning = options.starts_in_thought
        self.num_calls = 0
        self._arguments: list[str] = []  # of the last call, in pieces
        self._text, self._at = "", 0  # `_at`: how far it is read
        self._hold_at: int | None = None  # from here on the text may have to be read again
        self._is_over = False
        self._delta = ChatDelta()
        self._space = ""  # at the end of the answer so far; it does not belong to a call that follows
        self._drops_space = False  # the answer begins after reasoning or a call
        self._has_text = False
        self._wrappers: Sequence[str] = ()
        self._steps = self._parse()

    @property
    def has_called(self) -> bool:
        return self.num_calls > 0

    @property
    def ends_in_call(self) -> bool:
        return not is_json("".join(self._arguments))

    def take(self, text: str) -> ChatDelta:
        cut = self._at if self._hold_at is None else self._hold_at
        self._text = self._text[cut:] + text
        self._at -= cut
        self._hold_at = None if self._hold_at is None else 0
        return self._advance()

    def finish(self) -> ChatDelta:
        self._is_over = True
        delta = self._advance()
        if not self.has_called and not self._drops_space:
            delta.text += self._space
        self._space = ""
        return delta

    def _advance(self) -> ChatDelta:
        self._delta = ChatDelta()
        next(self._steps, None)
        return self._delta

    # ---- the reply ----

    def _parse(self) -> Steps[None]:
        if self.options.starts_in_thought:
            yield from self._read_thought()
        while True:
            yield from self._begin_segment()
            marker = yield from self._emit_text_until(*map(self.spell, self.markers))
            if marker is None:
                return
            start = self._at
            if not (yield from self._attempt(self._read_call(marker), start - len(marker))):
                self._at += len(marker)
                self._put_text("" if marker.startswith(MARK) else marker)

    def _begin_segment(self) -> Steps[None]:
        """Read thoughts and calls without a marker, which stand at the beginning or after a call."""
        thought = self.options.thought
        while True:
            if thought is not None and (yield from self._skip(self.spell(thought.open))):
                if thought.label:
                    yield from self._skip(thought.label)
                yield from self._read_thought()
            elif not (yield from self._attempt(self._read_bare_call(), self._at)):
                return

    def _read_call(self, marker: str) -> Steps[None]:
        """Read what follows a marker. It is no call unless `_begin_call` was called."""
        return
        yield

    def _read_bare_call(self) -> Steps[None]:
        """Read a call without a marker."""
        return
        yield

    def _attempt(self, steps: Steps[None], start: int) -> Steps[bool]:
        """Read a call; if none has begun, go back to the start."""
        num_calls = self.num_calls
        self._hold_at = start
        yield from steps
        if self.num_calls == num_calls:
            assert self._hold_at is not None
            self._at = self._hold_at
        self._hold_at = None
        return self.num_calls > num_calls

    def _read_thought(self) -> Steps[None]:
        assert self.options.thought is not None
        self.is_reasoning = True
        close, held, has_begun = self.spell(self.options.thought.close), "", False
        while True:
            size, found = self._find((close,))
            text = held + self._cut(size)
            text = text if has_begun else text.lstrip()
            kept = text.rstrip()
            held, has_begun = text[len(kept) :], has_begun or bool(kept)
            self._delta.reasoning += kept
            if found:
                break
            if not (yield from self._more()):
                return
        self._at += len(close)
        self._wrappers = self.options.thought.wrappers
        self.is_reasoning, self._drops_space = False, not self._has_text

    # ---- what is emitted ----

    def _put_text(self, text: str) -> None:
        text = self._space + text
        if self._drops_space:
            text = text.lstrip()
        kept = text.rstrip() if self.markers or self._wrappers else text
        self._space = text[len(kept) :]
        self._delta.text += kept
        if kept:
            self._has_text, self._drops_space = True, False

    def _begin_call(self, name: str) -> None:
        self._hold_at = None
        self._space = ""
        self._drops_space = not self._has_text
        self._delta.calls.append(CallDelta(self.num_calls, name))
        self.num_calls += 1
        self._arguments = []

    def _put_arguments(self, text: str) -> None:
        if not text:
            return
        self._arguments.append(text)
        calls, index = self._delta.calls, self.num_calls - 1
        if calls and calls[-1].index == index:
            last = calls.pop()
            calls.append(CallDelta(index, last.name, last.arguments + text))
        else:
            calls.append(CallDelta(index, "", text))

    # ---- reading ----

    def spell(self, marker: str) -> str:
        """A marker as it is in the text."""
        return MARK + marker if marker in self.options.special else marker

    def _more(self) -> Steps[bool]:
        """Wait for more text, or for its end, which lets incomplete markers count as text; False after the end."""
        if self._is_over:
            return False
        yield
        return True

    def _cut(self, size: int) -> str:
        text = self._text[self._at : self._at + size]
        self._at += size
        return text

    def _find(self, markers: Sequence[str]) -> tuple[int, str]:
        """The number of characters before the first marker, and the marker; "" if there is none yet.

        Then, text at the end that may be the beginning of a marker does not count.
        """
        if not markers:
            return len(self._text) - self._at, ""
        if (found := any_of(tuple(markers)).search(self._text, self._at)) is not None:
            return found.start() - self._at, found[0]
        size = len(self._text) - self._at
        return size if self._is_over else size - partial_size(self._text[self._at :], markers), ""

    def _emit_text_until(self, *markers: str) -> Steps[str | None]:
        """Emit the answer up to a marker, which is read too; None at the end. Other special tokens are left out."""
        others = [MARK + name for name in self.options.special]
        while True:
            size, found = self._find([*markers, *others, *self._wrappers])
            self._put_text(self._cut(size))
            self._at += len(found)
            if found in self._wrappers:
                self._drops_space, self._space = True, ""
            if found in markers:
                return found
            if not found and not (yield from self._more()):
                return None

    def _read_until(self, *markers: str, limit: int = MAX_HEAD) -> Steps[tuple[str, str]]:
        """The text up to a marker, and the marker, which is read too; "" if there is none."""
        while True:
            size, found = self._find(markers)
            if found:
                text = self._cut(size)
                self._at += len(found)
                return text, found
            if len(self._text) - self._at > limit or not (yield from self._more()):
                return "", ""

    def _peek(self) -> Steps[str]:
        """The next character that is no space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not (yield from self._more()):
                return ""

    def _skip(self, text: str) -> Steps[bool]:
        """Read spaces and then this text; False, and nothing is read, if there is other text."""
        while True:
            rest = self._text[self._at :].lstrip()
            if rest.startswith(text):
                self._at = len(self._text) - len(rest) + len(text)
                return True
            if not text.startswith(rest) or not (yield from self._more()):
                return False

    # ---- JSON ----

    def _read_json(self) -> Steps[str]:
        """The text of a JSON value; "" if there is none."""
        first = yield from self._peek()
        if first in ("", ",", "}", "]", ":"):
            return ""
        pieces: list[str] = []
        if first in '{["':
            scanner = JsonScanner()
            while True:
                piece, self._at = scanner.read(self._text, self._at)
                pieces.append(piece)
                if scanner.is_done:
                    return "".join(pieces)
                if not (yield from self._more()):
                    return ""
        while True:
            end = SCALAR_END.search(self._text, self._at)
            pieces.append(self._cut((end.start() if end else len(self._text)) - self._at))
            if end is not None or not (yield from self._more()):
                return "".join(pieces)

    def _read_json_string(self) -> Steps[str | None]:
        if (yield from self._peek()) != '"':
            return None
        text = yield from self._read_json()
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def _stream_json(self) -> Steps[None]:
        """Emit a JSON object as arguments while it is read."""
        scanner = JsonScanner()
        yield from self._peek()
        while True:
            piece, self._at = scanner.read(self._text, self._at)
            self._put_arguments(piece)
            if scanner.is_done or not (yield from self._more()):
                return

    def _stream_call(self, name: str) -> Steps[bool]:
        """Emit a call whose arguments follow: an object, an object within a string, or null."""
        first = yield from self._peek()
        if not NAME.fullmatch(name) or first not in ("{", '"', "n"):
            return False
        if first == "{":
            self._begin_call(name)
            yield from self._stream_json()
            return True
        text = (yield from self._read_json_string()) if first == '"' else (yield from self._read_json())
        return self._put_whole_call(name, text or "")

    def _put_whole_call(self, name: str, arguments: str) -> bool:
        """Emit a call if its arguments are a whole object."""
        try:
            value = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return False
        if not NAME.fullmatch(name) or not isinstance(value, dict | None):
            return False
        self._begin_call(name)
        self._put_arguments(arguments.strip() if value else "{}")
        return True

    def _stream_text(self, close: str, *, trims_lines: bool = False) -> Steps[None]:
        """Emit text up to a marker as a JSON string; without the line breaks next to the markers, if asked."""
        self._put_arguments('"')
        is_first, held = trims_lines, ""
        while True:
            size, found = self._find((close,))
            text = held + self._cut(size)
            if is_first and text:
                text, is_first = text.removeprefix("\n"), False
            held = "\n" if trims_lines and text.endswith("\n") else ""
            self._put_arguments(escape_text(text.removesuffix(held) if held else text))
            if found:
                self._at += len(found)
                self._put_arguments('"')
                return
            if not (yield from self._more()):
                return


def is_json(text: str) -> bool:
    """Whether this is a JSON value, or nothing."""
    try:
        json.loads(text or "{}", strict=False)
    except ValueError:
        return False
    except RecursionError:  # too deep to tell
        pass
    return True


@functools.lru_cache(maxsize=256)
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def partial_size(text: str, markers: Sequence[str]) -> int:
    """The size of an incomplete marker at the end of a text."""
    sizes = (size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size]))
    return max(sizes, default=0)
