"""Families that write each argument between markers: Qwen3-Coder, MiniMax, GLM, Gemma. Texts come as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flambeau.llm.chat.json_text import json_or_text
from flambeau.llm.chat.stream_parser import MARK, NAME, ParserOptions, Steps, StreamParser

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
INVOKE, INVOKE_PARAMETER, INVOKE_END = "<invoke name=", "<parameter name=", "</invoke>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
DSML = "｜DSML｜"  # a token within each tag of DeepSeek V3.2
TYPED = re.compile(r"""["'](?P<key>.*)["']\s+string=["'](?P<is_text>true|false)["']""", re.DOTALL)
MAX_DEPTH = 32  # of values within values
MAX_VALUE = 10**7  # characters
LITERAL_END = re.compile(r"[,\]}]")


class TaggedCallParser(StreamParser):
    """Arguments one by one."""

    _num_arguments = 0

    def _begin_arguments(self, name: str) -> None:
        self._begin_call(name)
        self._num_arguments = 0

    def _put_key(self, key: str) -> None:
        self._put_arguments(("{" if not self._num_arguments else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_arguments += 1

    def _end_arguments(self) -> None:
        self._put_arguments("}" if self._num_arguments else "{}")

    def _stream_value(self, name: str, key: str, close: str, *, trims_lines: bool) -> Steps[None]:
        """Emit a value: as text if its schema says so, else as the JSON that it is."""
        self._put_key(key)
        if is_text(self.options.tools.get(name, {}), key):
            yield from self._stream_text(close, trims_lines=trims_lines)
            return
        value, found = yield from self._read_until(close, limit=MAX_VALUE)
        if found:
            value = value.removeprefix("\n").removesuffix("\n") if trims_lines else value
            self._put_arguments(json_or_text(value))


class QwenCoderParser(TaggedCallParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

    open, close = TOOL_CALL, TOOL_CALL_END
    markers = (open, FUNCTION)  # some replies lack the first

    def _read_call(self, marker: str) -> Steps[None]:
        if marker == self.spell(self.open) and not (yield from self._skip(FUNCTION)):
            return
        name, found = yield from self._read_until(">")
        name = name.strip().strip("\"'")
        if not found or not NAME.fullmatch(name):
            return
        self._begin_arguments(name)
        while (yield from self._skip(PARAMETER)):
            key, found = yield from self._read_until(">")
            if not found:
                return
            yield from self._stream_value(name, key.strip(), PARAMETER_END, trims_lines=True)
        if (yield from self._skip(FUNCTION_END)) or not self._is_over:
            self._end_arguments()
        yield from self._skip(self.spell(self.close))


class SeedParser(QwenCoderParser):
    """The same between markers of Seed-OSS."""

    open, close = "<seed:tool_call>", "</seed:tool_call>"
    markers = (open, FUNCTION)


class MiniMaxParser(TaggedCallParser):
    """`<invoke name="name"><parameter name="key">value</parameter></invoke>`, once for each call."""

    open, close = "<minimax:tool_call>", "</minimax:tool_call>"
    markers: tuple[str, ...] = (open,)
    invoke, invoke_end = INVOKE, INVOKE_END
    parameter, parameter_end = INVOKE_PARAMETER, PARAMETER_END

    def _read_call(self, marker: str) -> Steps[None]:
        num_calls, invoke = self.num_calls, self.spell(self.invoke)
        while (yield from self._skip(invoke)):
            name, found = yield from self._read_until(">")
            name = name.strip().strip("\"'")
            if not found or not NAME.fullmatch(name):
                return
            self._begin_arguments(name)
            while (yield from self._skip(self.spell(self.parameter))):
                head, found = yield from self._read_until(">")
                if not found:
                    return
                yield from self._stream_parameter(name, head)
            if (yield from self._skip(self.spell(self.invoke_end))) or not self._is_over:
                self._end_arguments()
        if self.num_calls > num_calls and not (yield from self._skip(self.spell(self.closing(marker)))):
            rest = self._text[self._at :].strip()
            if self._is_over and invoke.startswith(rest):  # the reply was cut short within a marker
                self._at = len(self._text)

    def closing(self, marker: str) -> str:
        """The marker that ends the calls which this one begins."""
        return self.close

    def _stream_parameter(self, name: str, head: str) -> Steps[None]:
        key = head.strip().strip("\"'")
        yield from self._stream_value(name, key, self.spell(self.parameter_end), trims_lines=True)


class DeepSeekTagParser(MiniMaxParser):
    """DeepSeek V3.2: the same tags with a token in each; a parameter says whether it is text or JSON."""

    open, close = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
    later_open, later_close = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"  # of V4
    markers = (open, later_open)
    invoke, invoke_end = f"<{DSML}invoke name=", f"</{DSML}invoke>"
    parameter, parameter_end = f"<{DSML}parameter name=", f"</{DSML}parameter>"

    def __init__(self, options: ParserOptions) -> None:
        self._is_special = DSML in options.special
        # A tag is one marker, so the token within is no marker of its own.
        super().__init__(replace(options, special=options.special - {DSML}))

    def spell(self, marker: str) -> str:
        return super().spell(marker.replace(DSML, MARK + DSML) if self._is_special else marker)

    def _put_text(self, text: str) -> None:
        super()._put_text(text.replace(MARK, ""))

    def closing(self, marker: str) -> str:
        return self.later_close if "tool_calls" in marker else self.close

    def _stream_parameter(self, name: str, head: str) -> Steps[None]:
        if (parts := TYPED.fullmatch(head.strip())) is None:
            yield from super()._stream_parameter(name, head)
            return
        self._put_key(parts["key"])
        close = self.spell(self.parameter_end)
        if parts["is_text"] == "true":
            yield from self._stream_text(close)
            return
        value, found = yield from self._read_until(close, limit=MAX_VALUE)
        if found:
            self._put_arguments(json_or_text(value))


class DeepSeek4Parser(DeepSeekTagParser):
    """DeepSeek V4: another name of the tag around calls."""

    open, close = DeepSeekTagParser.later_open, DeepSeekTagParser.later_close


class GlmParser(TaggedCallParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    markers = (TOOL_CALL,)

    def _read_call(self, marker: str) -> Steps[None]:
        key, close = self.spell(KEY), self.spell(TOOL_CALL_END)
        name, found = yield from self._read_until(key, close)
        name = name.strip()
        if not found or not NAME.fullmatch(name):
            return
        self._begin_arguments(name)
        while found == key:
            argument, found = yield from self._read_until(self.spell(KEY_END))
            if not found or not (yield from self._skip(self.spell(VALUE))):
                return
            yield from self._stream_value(name, argument.strip(), self.spell(VALUE_END), trims_lines=False)
            _, found = yield from self._read_until(key, close)
        if found:
            self._end_arguments()


def suffixed(tag: str, suffix: str) -> str:
    """A tag with a suffix after its name."""
    return f"{tag.removesuffix('>')}{suffix}>"


class Hy3PreviewParser(TaggedCallParser):
    """GLM's calls within `<tool_calls>`, with `<tool_sep>` after names; in later models, each tag has a suffix."""

    suffix = ""
    open, close = "<tool_calls>", "</tool_calls>"
    markers: tuple[str, ...] = (open,)

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """Begin and end of a call, what may follow its name, begin and end of a key, and of a value."""
        plain = TOOL_CALL, TOOL_CALL_END, "<tool_sep>", KEY, KEY_END, VALUE, VALUE_END
        return tuple(suffixed(tag, cls.suffix) for tag in plain)

    def _read_call(self, marker: str) -> Steps[None]:
        call, call_end, separator, key, key_end, value, value_end = map(self.spell, self.tags())
        while (yield from self._skip(call)):
            name, found = yield from self._read_until(separator, key, call_end)
            name = name.strip()
            if not found or not NAME.fullmatch(name):
                return
            self._begin_arguments(name)
            if found == separator:
                _, found = yield from self._read_until(key, call_end)
            while found == key:
                argument, found = yield from self._read_until(key_end)
                if not found or not (yield from self._skip(value)):
                    return
                yield from self._stream_value(name, argument.strip(), value_end, trims_lines=False)
                _, found = yield from self._read_until(key, call_end)
            if not found:
                return
            self._end_arguments()
        yield from self._skip(self.spell(self.close))


class Hy3Parser(Hy3PreviewParser):
    """The same with the suffix of published models."""

    suffix = ":opensource"
    open, close = suffixed(Hy3PreviewParser.open, suffix), suffixed(Hy3PreviewParser.close, suffix)
    markers = (open,)


class Hy4Parser(Hy3Parser):
    """Hy 4 writes nothing after names, and no line breaks within calls."""


class GemmaParser(TaggedCallParser):
    """`call:name{key:value}` between markers, with names and texts that are not quoted as in JSON."""

    open, close, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    markers = (open,)

    def _read_call(self, marker: str) -> Steps[None]:
        if not (yield from self._skip("call:")):
            return
        name, found = yield from self._read_until("{")
        if not found or not NAME.fullmatch(name.strip()):
            return
        self._begin_call(name.strip())
        if (yield from self._stream_members(0)):
            yield from self._skip(self.spell(self.close))

    def _stream_members(self, depth: int) -> Steps[bool]:
        """Emit `{"key": value, …}`; its opening bracket is read."""
        self._put_arguments("{")
        is_first = True
        while (character := (yield from self._peek())) != "}":
            if not character:
                return False
            if character == ",":
                self._at += 1
                continue
            quoted = (yield from self._read_json_string()) if character == '"' else None
            key, found = yield from self._read_until(":")
            if not found:
                return False
            key = key.strip().removeprefix(self.spell(self.quote)).removesuffix(self.spell(self.quote))
            key = key if quoted is None else quoted
            self._put_arguments(("" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            is_first = False
            if not (yield from self._stream_gemma_value(depth + 1)):
                return False
        self._at += 1
        self._put_arguments("}")
        return True

    def _stream_items(self, depth: int) -> Steps[bool]:
        self._put_arguments("[")
        is_first = True
        while (character := (yield from self._peek())) != "]":
            if character in ("", "}"):  # no value begins with a brace that closes: nothing would be read, for ever
                return False
            if character == ",":
                self._at += 1
                continue
            self._put_arguments("" if is_first else ", ")
            is_first = False
            if not (yield from self._stream_gemma_value(depth + 1)):
                return False
        self._at += 1
        self._put_arguments("]")
        return True

    def _stream_gemma_value(self, depth: int) -> Steps[bool]:
        """Emit one value; False if it does not come to an end."""
        if depth > MAX_DEPTH:
            return False
        quote = self.spell(self.quote)
        if (yield from self._skip(quote)):
            yield from self._stream_text(quote)
            return True
        character = yield from self._peek()
        if character in ("{", "["):
            self._at += 1
            return (yield from self._stream_members(depth) if character == "{" else self._stream_items(depth))
        if character == '"':
            self._put_arguments(json_or_text((yield from self._read_json())))
            return True
        while (end := LITERAL_END.search(self._text, self._at)) is None:
            if len(self._text) - self._at > MAX_VALUE or not (yield from self._more()):
                return False
        self._put_arguments(json_or_text(self._cut(end.start() - self._at).strip()))
        return True


class Gemma4Parser(GemmaParser):
    open, close, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (open,)


def is_text(schema: Mapping[str, Any], key: str) -> bool:
    """Whether a parameter is a text by its schema."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(found, Mapping):
        return False
    if found.get("type") in ("string", ["string"]):
        return True
    values = found.get("enum")
    return "type" not in found and isinstance(values, list) and all(isinstance(value, str) for value in values)
