"""Families that write the arguments of calls as JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek."""

from __future__ import annotations

from collections.abc import Collection

from flambeau.llm.chat.pythonic_calls import PYTHON_END, PYTHON_START, PythonicParser
from flambeau.llm.chat.stream_parser import MAX_HEAD, NAME, Steps, StreamParser

ARGUMENTS = ("arguments", "parameters")
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class JsonCallParser(StreamParser):
    """Calls that are objects with a name and arguments."""

    name_key = "name"

    def _read_call_objects(self, names: Collection[str] | None = None) -> Steps[bool]:
        """Read objects, in a list or not, up to other text; False if there is none. `names`: only of these tools."""
        num_calls = self.num_calls
        while (character := (yield from self._peek())) and character in "[{,;]":
            if character == "{":
                if not (yield from self._read_call_object(names)):
                    break
            elif character in "],;" and self.num_calls == num_calls:
                break
            else:
                self._at += 1
        return self.num_calls > num_calls

    def _read_call_object(self, names: Collection[str] | None) -> Steps[bool]:
        """Read one object. Its arguments are emitted as they come if its name is before them, as usual."""
        name, arguments, has_begun = "", "", False
        self._at += 1
        while (character := (yield from self._peek())) and character != "}":
            if character == ",":
                self._at += 1
                continue
            key = yield from self._read_json_string()
            if key is None or (yield from self._peek()) != ":":
                return has_begun
            self._at += 1
            if key == self.name_key:
                name = (yield from self._read_json_string()) or ""
                if not NAME.fullmatch(name) or (names is not None and name not in names):
                    return False
            elif key in ARGUMENTS and name and not has_begun:
                has_begun = yield from self._stream_call(name)
                if not has_begun:
                    return False
            else:
                value = yield from self._read_json()
                arguments = value if key in ARGUMENTS else arguments
        if character:
            self._at += 1
        elif not has_begun:
            return False
        return has_begun or (bool(name) and self._put_whole_call(name, arguments))

    def _skip_to(self, close: str) -> Steps[None]:
        """Leave out what stands between the last call and its closing marker; it may be missing."""
        if not (yield from self._skip(close)):
            _, found = yield from self._read_until(close, *map(self.spell, self.markers))
            if found and found != close:
                self._at -= len(found)


class HermesParser(JsonCallParser):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` within other text."""

    markers = (TOOL_CALL,)

    def _read_call(self, marker: str) -> Steps[None]:
        if (yield from self._read_call_objects()):
            yield from self._skip_to(self.spell(TOOL_CALL_END))


class JsonParser(HermesParser):
    """For models of no known family: Hermes's notation, or bare calls of the request's tools."""

    def _read_bare_call(self) -> Steps[None]:
        if not self.has_called and (yield from self._peek()) in ("{", "["):
            yield from self._read_call_objects(self.options.tools)


class LlamaParser(JsonCallParser, PythonicParser):
    """Bare calls, as objects `{"name": …, "parameters": …}` or as Python; after the Python tag also `tool.call(…)`."""

    markers: tuple[str, ...] = (PYTHON_TAG, PYTHON_START)

    def _read_call(self, marker: str) -> Steps[None]:
        yield from self._read_either(None)
        if self.has_called and marker == self.spell(PYTHON_START):
            yield from self._skip(self.spell(PYTHON_END))

    def _read_bare_call(self) -> Steps[None]:
        if not self.has_called and (yield from self._peek()) in ("{", "["):
            yield from self._read_either(self.options.tools)

    def _read_either(self, names: Collection[str] | None) -> Steps[None]:
        is_list = yield from self._skip("[")
        if (yield from self._peek()) == "{":
            yield from self._read_call_objects(names)
        else:
            yield from self._read_python_calls(names)
            if is_list and self.has_called:
                yield from self._skip("]")


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    markers = (TOOL_CALLS,)

    def _read_call(self, marker: str) -> Steps[None]:
        if (yield from self._peek()) in ("{", "["):
            yield from self._read_call_objects()
            return
        name, found = yield from self._read_until(self.spell(CALL_ID), self.spell(ARGS), "{")
        if found == self.spell(CALL_ID):
            _, found = yield from self._read_until(self.spell(ARGS), "{")
        if found == "{":
            self._at -= 1
        if found:
            yield from self._stream_call(name.strip())


class DeepSeekParser(StreamParser):
    """V3 and R1: `function<sep>name` and fenced JSON; V3.1: `name<sep>{…}`."""

    markers: tuple[str, str] = (CALLS, CALL)
    call_end, calls_end = CALL_END, CALLS_END

    def _read_call(self, marker: str) -> Steps[None]:
        calls, call = map(self.spell, self.markers)
        if marker == calls and not (yield from self._skip(call)):
            return
        while True:
            if not (yield from self._read_one()):
                return
            yield from self._read_until(self.spell(self.call_end), limit=MAX_HEAD)
            if not (yield from self._skip(call)):
                break
        yield from self._skip(self.spell(self.calls_end))

    def _read_one(self) -> Steps[bool]:
        name, found = yield from self._read_until(self.spell(CALL_SEPARATOR))
        if not found:
            return False
        if (yield from self._peek()) != "{":
            name, found = yield from self._read_until("\n")
            if not found:
                return False
            yield from self._skip("```json")
        return (yield from self._stream_call(name.strip()))
