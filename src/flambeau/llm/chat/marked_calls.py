"""Families that write calls between markers of their own: as lists of JSON objects, by an id, or as Python."""

from __future__ import annotations

from flambeau.llm.chat.json_calls import DeepSeekParser, JsonCallParser, LlamaParser
from flambeau.llm.chat.pythonic_calls import FENCE_END, PythonicParser
from flambeau.llm.chat.stream_parser import NAME, Steps, StreamParser

FUNCTOOLS = "functools["
GRANITE_CALL = "<|tool_call|>"
PYTHON_FENCE, JSON_FENCE = "```python", "```json"
ACTION = "Action:"
PLUGIN = "<|plugin|>"
CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class MarkedCallParser(JsonCallParser):
    """A list of objects between two markers: Nemotron."""

    open, close = "<TOOLCALL>", "</TOOLCALL>"
    markers: tuple[str, ...] = (open,)

    def _read_call(self, marker: str) -> Steps[None]:
        if (yield from self._read_call_objects()) and self.close:
            yield from self._skip_to(self.spell(self.close))


class ToolCallsParser(MarkedCallParser):
    """Hunyuan, Jamba, Apriel."""

    open, close = "<tool_calls>", "</tool_calls>"
    markers = (open,)


class LongcatParser(MarkedCallParser):
    """LongCat: an object for each pair of markers."""

    open, close = "<longcat_tool_call>", "</longcat_tool_call>"
    markers = (open,)


class CommandParser(MarkedCallParser):
    """Command R7B and A: objects with `tool_name` and `parameters`."""

    open, close = "<|START_ACTION|>", "<|END_ACTION|>"
    markers = (open,)
    name_key = "tool_name"


class ActionParser(MarkedCallParser):
    """Command R of the first generation: a fenced list behind a word, of the request's tools.

    A call of `directly_answer`, which its prompt invents, is none of them and stays text.
    """

    open, close = ACTION, FENCE_END
    markers = (open,)
    name_key = "tool_name"

    def _read_call(self, marker: str) -> Steps[None]:
        yield from self._skip(JSON_FENCE)
        if (yield from self._peek()) == "[" and (yield from self._read_call_objects(self.options.tools)):
            yield from self._skip(FENCE_END)


class GraniteParser(MarkedCallParser):
    """Granite 3; nothing ends the list."""

    open, close = GRANITE_CALL, ""
    markers = (open,)


class FunctoolsParser(MarkedCallParser):
    """Phi-4-mini; the marker begins the list."""

    open, close = FUNCTOOLS, ""
    markers = (open,)


class InternLmParser(MarkedCallParser):
    """InternLM 2.5: one object for each pair of markers."""

    open, close = "<|action_start|>", "<|action_end|>"
    markers = (open,)

    def _read_call(self, marker: str) -> Steps[None]:
        if (yield from self._skip(self.spell(PLUGIN))):
            yield from super()._read_call(marker)


class ApertusParser(JsonCallParser):
    """A list of objects with a call each, `{"name": {…}}`."""

    open, close = "<|tools_prefix|>", "<|tools_suffix|>"
    markers = (open,)

    def _read_call(self, marker: str) -> Steps[None]:
        yield from self._skip("[")
        while (yield from self._skip("{")):
            name = yield from self._read_json_string()
            if name is None or not (yield from self._skip(":")) or not (yield from self._stream_call(name)):
                return
            yield from self._skip("}")
            yield from self._skip(",")
        if self.has_called:
            yield from self._skip("]")
            yield from self._skip(self.spell(self.close))


class KimiParser(DeepSeekParser):
    """Calls named by their ids, `functions.name:0`, and their arguments."""

    markers = (CALLS, CALL)
    call_end, calls_end = CALL_END, CALLS_END

    def _read_one(self) -> Steps[bool]:
        head, found = yield from self._read_until(self.spell(CALL_ARGUMENT))
        name, _, number = head.strip().removeprefix("functions.").rpartition(":")
        return bool(found) and (yield from self._stream_call(name if number.isdigit() else head.strip()))


class LfmParser(LlamaParser):
    """LFM2: a list of calls as Python, or as objects. MiniCPM 3: lines of Python within a fence."""

    open, close = "<|tool_call_start|>", "<|tool_call_end|>"
    markers = (open,)

    def _read_call(self, marker: str) -> Steps[None]:
        num_calls = self.num_calls
        if (yield from self._skip(PYTHON_FENCE)):
            while not (yield from self._skip(FENCE_END)):
                if not (yield from self._read_python_call(None)):
                    return
        else:
            yield from self._read_either(None)
        if self.num_calls > num_calls:
            yield from self._skip(self.spell(self.close))

    def _read_bare_call(self) -> Steps[None]:
        return
        yield


class OlmoParser(PythonicParser):
    """OLMo 3: calls as Python, one in each line."""

    open, close = "<function_calls>", "</function_calls>"
    markers = (open,)

    def _read_call(self, marker: str) -> Steps[None]:
        while not (yield from self._skip(self.spell(self.close))):
            if not (yield from self._read_python_call(None)):
                return

    def _read_bare_call(self) -> Steps[None]:
        return
        yield


class Glm4Parser(StreamParser):
    """GLM-4: a reply that begins with the name of a tool in a line of its own, and an object in the next one."""

    def _read_bare_call(self) -> Steps[None]:
        if self.has_called:
            return
        for name in self.options.tools:
            if (yield from self._skip(f"{name}\n")):
                if (yield from self._peek()) == "{" and NAME.fullmatch(name):
                    yield from self._stream_call(name)
                return
