"""The table of families: how each writes tool calls and reasoning, and how its chat template shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flambeau.llm.chat import harmony, json_calls, pythonic_calls, tagged_calls
from flambeau.llm.chat.stream_parser import StreamParser, ThoughtMarkers

OFF = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family writes tool calls."""

    name: str
    parser: type[StreamParser]
    signs: Sequence[str] = ()  # a chat template with all of these texts is of this family
    markers: Sequence[str] = ()  # texts that are special tokens in some vocabularies
    has_channels: bool = False  # its reasoning is in a channel of its own
    has_short_ids: bool = False  # its chat template accepts only ids of nine letters and digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family writes what it thinks."""

    name: str
    markers: ThoughtMarkers
    signs: Sequence[str]


_HARMONY = (
    harmony.START,
    harmony.CHANNEL,
    harmony.MESSAGE,
    harmony.CONSTRAIN,
    harmony.END,
    harmony.CALL,
    harmony.RETURN,
)
_DEEPSEEK = (
    json_calls.CALLS,
    json_calls.CALL,
    json_calls.CALL_SEPARATOR,
    json_calls.CALL_END,
    json_calls.CALLS_END,
)
_MISTRAL = (json_calls.TOOL_CALLS, json_calls.CALL_ID, json_calls.ARGS)
_TOOL_CALL = (json_calls.TOOL_CALL, json_calls.TOOL_CALL_END)
_GLM = (*_TOOL_CALL, tagged_calls.KEY, tagged_calls.KEY_END, tagged_calls.VALUE, tagged_calls.VALUE_END)
_LLAMA = (json_calls.PYTHON_TAG, pythonic_calls.PYTHON_START, pythonic_calls.PYTHON_END)


def _gemma_markers(parser: type[tagged_calls.GemmaParser]) -> Sequence[str]:
    return (parser.open, parser.close, parser.quote)


# In this order: the first family whose signs a chat template has.
_TOOL_ROWS = (
    ToolFormat(
        name="harmony", parser=harmony.HarmonyParser, signs=(harmony.CHANNEL,), markers=_HARMONY, has_channels=True
    ),
    ToolFormat(
        name="deepseek_v3", parser=json_calls.DeepSeekParser, signs=(json_calls.CALL, "```json"), markers=_DEEPSEEK
    ),
    ToolFormat(name="deepseek_v31", parser=json_calls.DeepSeekParser, signs=(json_calls.CALL,), markers=_DEEPSEEK),
    ToolFormat(
        name="mistral_args",
        parser=json_calls.MistralParser,
        signs=(json_calls.TOOL_CALLS, json_calls.ARGS),
        markers=_MISTRAL,
        has_short_ids=True,
    ),
    ToolFormat(
        name="mistral",
        parser=json_calls.MistralParser,
        signs=(json_calls.TOOL_CALLS,),
        markers=_MISTRAL,
        has_short_ids=True,
    ),
    ToolFormat(
        name="qwen3_coder",
        parser=tagged_calls.QwenCoderParser,
        signs=(tagged_calls.FUNCTION, tagged_calls.PARAMETER),
        markers=_TOOL_CALL,
    ),
    ToolFormat(name="glm", parser=tagged_calls.GlmParser, signs=(tagged_calls.KEY,), markers=_GLM),
    ToolFormat(
        name="gemma4",
        parser=tagged_calls.Gemma4Parser,
        signs=(tagged_calls.Gemma4Parser.open,),
        markers=_gemma_markers(tagged_calls.Gemma4Parser),
    ),
    ToolFormat(
        name="functiongemma",
        parser=tagged_calls.GemmaParser,
        signs=(tagged_calls.GemmaParser.open,),
        markers=_gemma_markers(tagged_calls.GemmaParser),
    ),
    ToolFormat(name="hermes", parser=json_calls.HermesParser, signs=(json_calls.TOOL_CALL,), markers=_TOOL_CALL),
    ToolFormat(
        name="llama4_pythonic",
        parser=json_calls.LlamaParser,
        signs=("<|header_start|>", "func_name1("),
        markers=_LLAMA,
    ),
    ToolFormat(name="pythonic", parser=pythonic_calls.PythonicParser, signs=("func_name1(",), markers=_LLAMA[1:]),
    ToolFormat(name="llama3_json", parser=json_calls.LlamaParser, signs=(json_calls.PYTHON_TAG,), markers=_LLAMA),
    ToolFormat(name="llama4_json", parser=json_calls.LlamaParser, signs=("<|header_start|>",), markers=_LLAMA),
    ToolFormat(name="llama3", parser=json_calls.LlamaParser, signs=("<|start_header_id|>",), markers=_LLAMA),
    ToolFormat(name="json", parser=json_calls.JsonParser, markers=_TOOL_CALL),  # any other
)
_REASONING_ROWS = (
    ReasoningFormat(
        name="gemma4",
        markers=ThoughtMarkers(open="<|channel>", close="<channel|>", label="thought"),
        signs=("<|channel>",),
    ),
    ReasoningFormat(name="mistral", markers=ThoughtMarkers(open="[THINK]", close="[/THINK]"), signs=("[THINK]",)),
    ReasoningFormat(
        name="seed_oss", markers=ThoughtMarkers(open="<seed:think>", close="</seed:think>"), signs=("<seed:think>",)
    ),
    ReasoningFormat(name="think", markers=ThoughtMarkers(open="<think>", close="</think>"), signs=("think>",)),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {row.name: row for row in _TOOL_ROWS}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {row.name: row for row in _REASONING_ROWS}
REASONING_NAMES = (*REASONING_FORMATS, OFF)


def find_tool_format(template: str) -> ToolFormat:
    """The family of a chat template; a model of no known family is read as JSON."""
    return next(row for row in _TOOL_ROWS if all(sign in template for sign in row.signs))


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    return next((row for row in _REASONING_ROWS if all(sign in template for sign in row.signs)), None)
