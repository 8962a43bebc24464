"""Families that write calls as Python: `[weather(city="Ulm"), time()]` (Llama 4, Llama 3.2, Gemma 3)."""

from __future__ import annotations

import re
from collections.abc import Collection

from flambeau.llm.chat.json_text import escape_text, python_to_json
from flambeau.llm.chat.stream_parser import Steps, StreamParser

VALUE_PLAIN = re.compile(r"""[^"'()\[\]{},\\]*""")
IDENTIFIER = re.compile(r"[A-Za-z_][\w.-]{0,255}")
FENCE, FENCE_END = "```tool_code", "```"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


class PythonicParser(StreamParser):
    """Lists of calls with keyword arguments, bare or within a fence. Each argument is emitted when it is complete."""

    markers: tuple[str, ...] = (FENCE, PYTHON_START)

    def _read_bare_call(self) -> Steps[None]:
        if not self.has_called and (yield from self._skip("[")):
            yield from self._read_python_calls(self.options.tools)
            if self.num_calls:
                yield from self._skip("]")

    def _read_call(self, marker: str) -> Steps[None]:
        yield from self._skip("[")
        yield from self._read_python_calls(self.options.tools)
        if self.num_calls:
            yield from self._skip("]")
            yield from self._skip(FENCE_END if marker == FENCE else self.spell(PYTHON_END))

    def _read_python_calls(self, names: Collection[str] | None) -> Steps[None]:
        while (yield from self._read_python_call(names)):
            if not (yield from self._skip(",")):
                return

    def _read_python_call(self, names: Collection[str] | None) -> Steps[bool]:
        """Read `name(…)`; False if it is none. Built-in tools are written as `name.call(…)`."""
        name, found = yield from self._read_until("(", limit=256)
        name = name.strip().removeprefix("print(")
        if names is None or name not in names:
            name = name.removesuffix(".call")
        if not found or not IDENTIFIER.fullmatch(name) or (names is not None and name not in names):
            return False
        if (yield from self._peek()) != ")":
            key, found = yield from self._read_until("=", limit=256)
            if not found or not IDENTIFIER.fullmatch(key.strip()):
                return False
            self._begin_call(name)
            yield from self._stream_python_arguments(key.strip())
        else:
            self._at += 1
            self._begin_call(name)
            self._put_arguments("{}")
        return True

    def _stream_python_arguments(self, key: str) -> Steps[None]:
        """Emit arguments up to the closing bracket."""
        start = "{"
        while True:
            value, end = yield from self._read_python_value()
            if not end:
                return
            self._put_arguments(f'{start}"{escape_text(key)}": {value}')
            start = ", "
            if end == ")" or (yield from self._peek()) == ")":
                self._at += end != ")"
                self._put_arguments("}")
                return
            key, found = yield from self._read_until("=", limit=256)
            key = key.strip()
            if not found:
                return

    def _read_python_value(self) -> Steps[tuple[str, str]]:
        """A value as JSON, and the comma or bracket after it; "" at the end of the text."""
        pieces: list[str] = []
        depth, quote = 0, ""
        while True:
            plain = VALUE_PLAIN.match(self._text, self._at)
            assert plain is not None
            pieces.append(self._cut(len(plain[0])))
            if self._at == len(self._text):
                if not (yield from self._more()):
                    return "", ""
                continue
            character = self._cut(1)
            if quote and character == "\\":
                while self._at == len(self._text):
                    if not (yield from self._more()):
                        return "", ""
                character += self._cut(1)
            elif quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in ",)" and depth == 0:
                return python_value("".join(pieces)), character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
            pieces.append(character)


def python_value(text: str) -> str:
    """A Python value as JSON; what is none is a text."""
    try:
        return python_to_json(text)
    except ValueError:
        return f'"{escape_text(text.strip())}"'
