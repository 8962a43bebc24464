"""ToolCallParser: finds tool calls in generated text (pure).

Two formats are known. Hermes and Qwen write `<tool_call>{"name": …, "arguments": …}</tool_call>` within other text.
Llama 3 writes a bare `{"name": …, "parameters": …}` and no other text. What a model only considers,
between `<think>` and `</think>`, is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from flambeau.llm.chat.deltas import CallDelta, ChatDelta, ParsedCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
BARE = ('{"name"', '{"type"', '{"parameters"', '{"arguments"')  # the start of a bare call, without spaces
_NAME = re.compile(r"[\w.:/-]{1,256}")
_SEPARATOR = re.compile(r"[\s;,]*")  # between calls
_decode = json.JSONDecoder(strict=False).raw_decode  # models write unescaped line breaks in strings


Parsed = tuple[str, list[ParsedCall]]  # text for the user, and calls


def parse_tool_calls(text: str, names: Collection[str]) -> Parsed:
    """Separate a whole text into text for the user and calls; `names` are the names of the tools."""
    parser = ToolCallParser(names)
    # Some templates open the thought, so that the text has its end alone.
    before, ended, _ = text.partition(THOUGHT)
    parser.is_thinking = bool(ended) and THINK not in before
    plain, calls = parser.take(text)
    last_plain, last_calls = parser.finish()
    return plain + last_plain, calls + last_calls


class ToolCallParser:
    """Takes a text piece by piece; returns other text at once, and a call when it is complete."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names  # a bare object is a call only if it names one of these
        self._held = ""  # text that may be part of a call
        self._is_bare: bool | None = None  # None: the text is too short to decide
        self._open_at: int | None = None  # where in `_held` a call starts
        self._searched = 0  # `_held` has no closing tag before this
        self.is_thinking = False  # `_held` starts within a thought
        self.has_called = False

    def take(self, text: str) -> Parsed:
        """Add a piece; returns what is decided."""
        self._held += text
        if self._is_bare is None:
            self._is_bare = False if self.is_thinking else begins_bare(self._held)
        return self._advance() if self._is_bare is False else ("", [])

    def finish(self) -> Parsed:
        """The rest of the text; an unclosed call counts if its JSON is complete."""
        if self._is_bare and (calls := bare_calls(self._held, self._names)):
            self._held, self.has_called = "", True
            return "", calls
        plain, calls = self._advance()
        while self._open_at is not None:
            if found := calls_of(self._held[self._open_at + len(OPEN) :]):
                self._held, self.has_called = "", True
                return plain, calls + found
            inner = self._held.rfind(OPEN, self._open_at + len(OPEN))
            if inner < 0:
                break
            plain += self._begin(inner)
            more_plain, more_calls = self._advance()
            plain, calls = plain + more_plain, calls + more_calls
        rest, self._held = self._held, ""
        is_gap = self.has_called and not rest.strip()
        return plain if is_gap else plain + rest, calls

    def _advance(self) -> Parsed:
        plain = ""
        calls: list[ParsedCall] = []
        while True:
            if self._open_at is None:
                plain += self._release_text()
                if self._open_at is None:
                    return plain, calls
            end = self._held.find(CLOSE, self._searched)
            if end < 0:
                self._searched = max(self._searched, len(self._held) - len(CLOSE) + 1)
                return plain, calls
            found = calls_of(self._held[self._open_at + len(OPEN) : end])
            if found is None:  # the tag is inside a JSON string: the call continues
                self._searched = end + len(CLOSE)
                continue
            inner = -1 if found else self._held.rfind(OPEN, self._open_at + len(OPEN), end)
            if inner >= 0:  # a later tag may start the real call
                plain += self._begin(inner)
                continue
            whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            if found:
                calls += found
                self.has_called = True
            else:
                plain += whole
            self._open_at, self._searched = None, 0

    def _release_text(self) -> str:
        """Release the text before the next call, thoughts and what they mention included."""
        plain = ""
        while True:
            if self.is_thinking:
                end = self._held.find(THOUGHT)
                if end < 0:
                    return plain + self._cut(len(without_partial_tag(self._held, THOUGHT)))
                plain += self._cut(end + len(THOUGHT))
                self.is_thinking = False
            at, thought = self._held.find(OPEN), self._held.find(THINK)
            if thought >= 0 and not 0 <= at < thought:
                plain += self._cut(thought + len(THINK))
                self.is_thinking = True
                continue
            return plain + (self._begin(at) if at >= 0 else self._release(without_partial_tag(self._held, OPEN, THINK)))

    def _cut(self, size: int) -> str:
        """Release so many characters as they are."""
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _begin(self, at: int) -> str:
        """Release the text before a call that starts at `at`."""
        plain = self._release(self._held[:at])
        self._open_at = at - len(plain)
        self._searched = self._open_at + len(OPEN)
        return plain

    def _release(self, text: str) -> str:
        """Release a text without its trailing space, which may belong to a call that follows."""
        plain = text.rstrip()
        self._held = self._held[len(plain) :]
        return plain


def without_partial_tag(text: str, *tags: str) -> str:
    """A text without an incomplete tag at its end."""
    sizes = (size for tag in tags for size in range(1, len(tag)) if text.endswith(tag[:size]))
    return text[: len(text) - max(sizes, default=0)]


def begins_bare(text: str) -> bool | None:
    """Whether a text starts like a bare call; None: it is too short to decide."""
    compact = "".join(text.split())
    if compact.startswith(BARE):
        return True
    return None if any(form.startswith(compact) for form in BARE) else False


def bare_calls(text: str, names: Collection[str]) -> list[ParsedCall]:
    """The calls of a text that consists only of calls of these tools; else none."""
    calls = calls_of(text) or []
    return calls if all(call.name in names for call in calls) else []


def calls_of(text: str) -> list[ParsedCall] | None:
    """The calls of a text, in lists or not; empty if it has other text, None if it ends within a string."""
    text, at = text.strip(), 0
    calls: list[ParsedCall] = []
    while at < len(text):
        try:
            value, at = _decode(text, at)
        except json.JSONDecodeError as error:
            return None if error.msg.startswith("Unterminated string") else []
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            if (call := to_call(item)) is None:
                return []
            calls.append(call)
        between = _SEPARATOR.match(text, at)
        at = between.end() if between else at
    return calls


def to_call(value: Any) -> ParsedCall | None:
    """None if a decoded value is not a call."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):  # some models write JSON within JSON
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        if not isinstance(arguments, dict | None):
            return None
        return ParsedCall(name, to_json(arguments or {}))
    except (ValueError, RecursionError):
        return None


def to_json(arguments: dict[str, Any]) -> str:
    """JSON that can be encoded as UTF-8: an unpaired surrogate stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    return text


class NamedCallParser:
    """A ToolCallParser as a ChatParser."""

    is_reasoning = False

    def __init__(self, names: Collection[str]) -> None:
        self._parser = ToolCallParser(names)
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._parser.has_called

    def take(self, text: str) -> ChatDelta:
        return self._delta(*self._parser.take(text))

    def finish(self) -> ChatDelta:
        return self._delta(*self._parser.finish())

    def _delta(self, text: str, calls: list[ParsedCall]) -> ChatDelta:
        first = self._num_calls
        self._num_calls += len(calls)
        return ChatDelta(text, "", [CallDelta(first + i, call.name, call.arguments) for i, call in enumerate(calls)])
