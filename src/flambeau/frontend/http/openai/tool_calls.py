"""Calls of tools in what a model writes, in the two forms that most models have (pure).

Hermes and Qwen write `<tool_call>{"name": …, "arguments": …}</tool_call>`, among other text; Llama 3 writes
`{"name": …, "parameters": …}`, and nothing beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BARE = ('{"name"', '{"type"', '{"parameters"', '{"arguments"')  # how an object that is a call begins, without spaces
_NAME = re.compile(r"[\w.:/-]{1,256}")
_BETWEEN = re.compile(r"[\s;,]*")  # calls
_decode = json.JSONDecoder(strict=False).raw_decode  # models write line breaks into strings as they are


@dataclass(frozen=True, slots=True)
class Call:
    """One call; its arguments are JSON in text, as OpenAI's API has them."""

    name: str
    arguments: str


Read = tuple[str, list[Call]]  # what is said, and calls


def read_calls(text: str, names: Collection[str]) -> Read:
    """What a whole text says beside its calls, and these; `names` are those of the tools."""
    reader = CallReader(names)
    said, calls = reader.take(text)
    last_said, last_calls = reader.finish()
    return said + last_said, calls + last_calls


class CallReader:
    """Takes a text piece by piece: what is no call is given on at once, and a call when it is complete."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names  # a bare object is a call only of one of these
        self._held = ""  # what may be a call
        self._is_bare: bool | None = None  # None: too little is known of the text's beginning
        self._open_at: int | None = None  # where in `_held` a call has begun
        self._looked = 0  # up to where in `_held` there is no end of it
        self.has_called = False

    def take(self, text: str) -> Read:
        """What has become certain."""
        self._held += text
        if self._is_bare is None:
            self._is_bare = begins_bare(self._held)
        return self._advance() if self._is_bare is False else ("", [])

    def finish(self) -> Read:
        """The rest; a call that was never closed counts if it is whole."""
        if self._is_bare and (calls := bare_calls(self._held, self._names)):
            self._held, self.has_called = "", True
            return "", calls
        said, calls = self._advance()
        while self._open_at is not None:
            if found := calls_of(self._held[self._open_at + len(OPEN) :]):
                self._held, self.has_called = "", True
                return said, calls + found
            inner = self._held.rfind(OPEN, self._open_at + len(OPEN))
            if inner < 0:
                break
            said += self._begin(inner)
            more_said, more_calls = self._advance()
            said, calls = said + more_said, calls + more_calls
        rest, self._held = self._held, ""
        is_gap = self.has_called and not rest.strip()
        return said if is_gap else said + rest, calls

    def _advance(self) -> Read:
        said = ""
        calls: list[Call] = []
        while True:
            if self._open_at is None:
                said += self._say()
                if self._open_at is None:
                    return said, calls
            end = self._held.find(CLOSE, self._looked)
            if end < 0:
                self._looked = max(self._looked, len(self._held) - len(CLOSE) + 1)
                return said, calls
            found = calls_of(self._held[self._open_at + len(OPEN) : end])
            if found is None:  # the tag is within a string: the call goes on
                self._looked = end + len(CLOSE)
                continue
            inner = -1 if found else self._held.rfind(OPEN, self._open_at + len(OPEN), end)
            if inner >= 0:  # a call may have begun anew
                said += self._begin(inner)
                continue
            whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            if found:
                calls += found
                self.has_called = True
            else:
                said += whole
            self._open_at, self._looked = None, 0

    def _say(self) -> str:
        """Give on what is before the next call."""
        at = self._held.find(OPEN)
        return self._begin(at) if at >= 0 else self._give(without_beginning(self._held))

    def _begin(self, at: int) -> str:
        """Give on what is before a call that begins there."""
        said = self._give(self._held[:at])
        self._open_at = at - len(said)
        self._looked = self._open_at + len(OPEN)
        return said

    def _give(self, text: str) -> str:
        """Let go of a text but for the space after it, which belongs to the form of a call that may follow."""
        said = text.rstrip()
        self._held = self._held[len(said) :]
        return said


def without_beginning(text: str) -> str:
    """A text without the beginning of a tag at its end."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            return text[:-size]
    return text


def begins_bare(text: str) -> bool | None:
    """Whether a text begins like a bare call; None: it is too short to tell."""
    compact = "".join(text.split())
    if compact.startswith(BARE):
        return True
    return None if any(form.startswith(compact) for form in BARE) else False


def bare_calls(text: str, names: Collection[str]) -> list[Call]:
    """The calls of a text that has nothing else; none where it is anything but calls of these tools."""
    calls = calls_of(text) or []
    return calls if all(call.name in names for call in calls) else []


def calls_of(text: str) -> list[Call] | None:
    """The calls of a text, in lists or not; none where it has anything else, None where it ends within a string."""
    text, at = text.strip(), 0
    calls: list[Call] = []
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
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
    return calls


def to_call(value: Any) -> Call | None:
    """A call, from what the model wrote; None where that is no call."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):  # some write JSON within JSON
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        if not isinstance(arguments, dict | None):
            return None
        return Call(name, to_json(arguments or {}))
    except (ValueError, RecursionError):
        return None


def to_json(arguments: dict[str, Any]) -> str:
    """JSON that can be sent: half a surrogate pair stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    return text
