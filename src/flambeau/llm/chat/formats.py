"""The table of families: how each writes tool calls and reasoning, and how its chat template shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flambeau.llm.chat import harmony, json_calls, marked_calls, pythonic_calls, tagged_calls
from flambeau.llm.chat.stream_parser import StreamParser, ThoughtMarkers

OFF = "none"
ANY_TOOLS = "json"  # the format of models of no known family
CallIds = Literal["any", "short", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family writes tool calls."""

    name: str
    parser: type[StreamParser]
    signs: Sequence[str] = ()  # a chat template with all of these texts is of this family
    markers: Sequence[str] = ()  # texts that are special tokens in some vocabularies
    has_channels: bool = False  # its reasoning is in a channel of its own
    ids: CallIds = "any"  # what its chat template accepts: nine letters and digits, or functions.name:0


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
_KIMI = (
    marked_calls.CALLS,
    marked_calls.CALL,
    marked_calls.CALL_ARGUMENT,
    marked_calls.CALL_END,
    marked_calls.CALLS_END,
)
_LLAMA = (json_calls.PYTHON_TAG, pythonic_calls.PYTHON_START, pythonic_calls.PYTHON_END)


def _gemma_markers(parser: type[tagged_calls.GemmaParser]) -> Sequence[str]:
    return (parser.open, parser.close, parser.quote)


def _between(name: str, parser: type[StreamParser]) -> ToolFormat:
    """A family that is known by the marker that begins its calls."""
    return ToolFormat(
        name=name, parser=parser, signs=(parser.open,), markers=tuple(filter(None, (parser.open, parser.close)))
    )


def _hy(name: str, parser: type[tagged_calls.Hy3PreviewParser], *signs: str) -> ToolFormat:
    return ToolFormat(name=name, parser=parser, signs=signs, markers=(parser.open, parser.close, *parser.tags()))


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
        ids="short",
    ),
    ToolFormat(
        name="mistral",
        parser=json_calls.MistralParser,
        signs=(json_calls.TOOL_CALLS,),
        markers=_MISTRAL,
        ids="short",
    ),
    ToolFormat(name="kimi_k2", parser=marked_calls.KimiParser, signs=("<|im_middle|>",), markers=_KIMI, ids="named"),
    _between("minimax_m2", tagged_calls.MiniMaxParser),
    ToolFormat(
        name="deepseek_v4",
        parser=tagged_calls.DeepSeek4Parser,
        signs=(tagged_calls.DSML, "tool_calls>"),
        markers=(tagged_calls.DSML,),
    ),
    ToolFormat(
        name="deepseek_v32",
        parser=tagged_calls.DeepSeekTagParser,
        signs=(tagged_calls.DSML,),
        markers=(tagged_calls.DSML,),
    ),
    _between("seed_oss", tagged_calls.SeedParser),
    ToolFormat(
        name="qwen3_coder",
        parser=tagged_calls.QwenCoderParser,
        signs=(tagged_calls.FUNCTION, tagged_calls.PARAMETER),
        markers=_TOOL_CALL,
    ),
    _hy("hy_v3", tagged_calls.Hy3Parser, tagged_calls.Hy3Parser.suffix, "tool_sep"),
    _hy("hy_v4", tagged_calls.Hy4Parser, tagged_calls.Hy4Parser.suffix, "arg_key"),
    _hy("hy_v3_preview", tagged_calls.Hy3PreviewParser, "<tool_sep>"),
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
    _between("command", marked_calls.CommandParser),
    ToolFormat(name="command_r", parser=marked_calls.ActionParser, signs=(marked_calls.ACTION, '"tool_name"')),
    _between("nemotron", marked_calls.MarkedCallParser),
    _between("tool_calls", marked_calls.ToolCallsParser),
    _between("longcat", marked_calls.LongcatParser),
    _between("lfm2", marked_calls.LfmParser),
    _between("olmo3", marked_calls.OlmoParser),
    _between("apertus", marked_calls.ApertusParser),
    ToolFormat(
        name="internlm",
        parser=marked_calls.InternLmParser,
        signs=(marked_calls.PLUGIN,),
        markers=(marked_calls.InternLmParser.open, marked_calls.PLUGIN, marked_calls.InternLmParser.close),
    ),
    _between("granite", marked_calls.GraniteParser),
    ToolFormat(name="phi4_mini", parser=marked_calls.FunctoolsParser, signs=("functools",)),
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
    ToolFormat(name="glm4", parser=marked_calls.Glm4Parser, signs=("<|observation|>",)),
    ToolFormat(name=ANY_TOOLS, parser=json_calls.JsonParser, markers=_TOOL_CALL),  # any other
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
    ReasoningFormat(
        name="command",
        markers=ThoughtMarkers(open="<|START_THINKING|>", close="<|END_THINKING|>"),
        signs=("<|START_THINKING|>",),
    ),
    ReasoningFormat(
        name="apertus",
        markers=ThoughtMarkers(open="<|inner_prefix|>", close="<|inner_suffix|>"),
        signs=("<|inner_prefix|>",),
    ),
    ReasoningFormat(
        name="apriel",
        markers=ThoughtMarkers(
            open="Here are my reasoning steps:", close="[BEGIN FINAL RESPONSE]", wrappers=("[END FINAL RESPONSE]",)
        ),
        signs=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ),
    ReasoningFormat(
        name="hy",
        markers=ThoughtMarkers(open="<think:opensource>", close="</think:opensource>"),
        signs=("think", tagged_calls.Hy3Parser.suffix),
    ),
    ReasoningFormat(
        name="longcat",
        markers=ThoughtMarkers(open="<longcat_think>", close="</longcat_think>"),
        signs=("<longcat_think>",),
    ),
    ReasoningFormat(
        name="answer",
        markers=ThoughtMarkers(open="<think>", close="</think>", wrappers=("<answer>", "</answer>")),
        signs=("think>", "<answer>"),
    ),
    ReasoningFormat(
        name="response",
        markers=ThoughtMarkers(open="<think>", close="</think>", wrappers=("<response>", "</response>")),
        signs=("think>", "<response></response>"),
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
