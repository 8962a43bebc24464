"""The notations of calls: for each family, the grammar of a call, and what stands around calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flambeau.llm.chat import harmony, json_calls, marked_calls, pythonic_calls, tagged_calls
from flambeau.llm.chat.grammar_writer import (
    CallNotation,
    GrammarWriter,
    ToolRule,
    is_text,
    literal,
    members_of,
    part_of,
    regex,
    tagged_value,
)
from flambeau.llm.chat.stream_parser import StreamParser


def named_object(
    key: str, before: str = "", after: str = "", close: str = "", name_key: str = "name"
) -> Callable[[GrammarWriter, ToolRule], str]:
    """`{"name": "…", "arguments": {…}}` with text around it."""

    def body(writer: GrammarWriter, tool: ToolRule) -> str:
        head = f'{before}{{"{name_key}": {json.dumps(tool.name)}, "{key}": '
        end = f" {writer.mark(close)}" if close else ""
        return f"{literal(head)} {writer.json(tool.schema)} {literal('}' + after)}{end}"

    return body


def mistral_args(writer: GrammarWriter, tool: ToolRule) -> str:
    return f"{literal(tool.name)} {writer.mark(json_calls.ARGS)} {writer.json(tool.schema)}"


def deepseek_v3(writer: GrammarWriter, tool: ToolRule) -> str:
    call, separator, end = map(writer.mark, (json_calls.CALL, json_calls.CALL_SEPARATOR, json_calls.CALL_END))
    head = literal(f"{tool.name}\n```json\n")
    return f'{call} "function" {separator} {head} {writer.json(tool.schema)} {literal(chr(10) + "```")} {end}'


def deepseek_v31(writer: GrammarWriter, tool: ToolRule) -> str:
    call, separator, end = map(writer.mark, (json_calls.CALL, json_calls.CALL_SEPARATOR, json_calls.CALL_END))
    return f"{call} {literal(tool.name)} {separator} {writer.json(tool.schema)} {end}"


def kimi(writer: GrammarWriter, tool: ToolRule) -> str:
    call, argument, end = map(writer.mark, (marked_calls.CALL, marked_calls.CALL_ARGUMENT, marked_calls.CALL_END))
    number = writer.rule("/[0-9]{1,3}/")
    return f"{call} {literal(f'functions.{tool.name}:')} {number} {argument} {writer.json(tool.schema)} {end}"


def apertus(writer: GrammarWriter, tool: ToolRule) -> str:
    return f"{literal('{' + json.dumps(tool.name) + ': ')} {writer.json(tool.schema)} {literal('}')}"


def glm_4(writer: GrammarWriter, tool: ToolRule) -> str:
    head = writer.terminal(rf"/[ \n]{{0,2}}{regex(tool.name)}\n/")  # free text may begin with the same spaces
    return f"{head} {writer.json(tool.schema)}"


def harmony_call(writer: GrammarWriter, tool: ToolRule) -> str:
    head, constrain = literal(f"commentary to=functions.{tool.name} "), writer.mark(harmony.CONSTRAIN)
    return f'{head} {constrain} "json" {writer.mark(harmony.MESSAGE)} {writer.json(tool.schema)}'


def pythonic(writer: GrammarWriter, tool: ToolRule) -> str:
    def value(key: str, schema: Any) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "boolean" and not {"enum", "const"} & schema.keys():
            return '("True" | "False")'
        return writer.json(part_of(tool, schema))

    members = members_of(writer, tool, lambda key, schema: f"{literal(key + '=')} {value(key, schema)}", ", ")
    return f"{literal(tool.name + '(')} {members} {literal(')')}"


def qwen_coder(writer: GrammarWriter, tool: ToolRule) -> str:
    def member(key: str, schema: Any) -> str:
        value = tagged_value(writer, tool, key, schema, tagged_calls.PARAMETER_END, "\n")
        return f"{literal(f'{tagged_calls.PARAMETER}{key}>' + chr(10))} {value} {literal(chr(10))}"

    head = literal(f"\n{tagged_calls.FUNCTION}{tool.name}>\n")
    end = f"{literal(tagged_calls.FUNCTION_END + chr(10))} {writer.mark(tagged_calls.TOOL_CALL_END)}"
    return f"{head} {members_of(writer, tool, member, '')} {end}"


def with_parameters(head: str, parameter: str, tail: str, close: str = "") -> Callable[[GrammarWriter, ToolRule], str]:
    """Parameters in lines of their own; `{}` is the place of a name."""

    def body(writer: GrammarWriter, tool: ToolRule) -> str:
        def member(key: str, schema: Any) -> str:
            value = tagged_value(writer, tool, key, schema, tagged_calls.PARAMETER_END)
            return f"{literal(parameter.format(key))} {value} {literal(chr(10))}"

        end = writer.mark(close) if close else ""
        return f"{literal(head.format(tool.name))} {members_of(writer, tool, member, '')} {literal(tail)} {end}"

    return body


def deepseek_tags(writer: GrammarWriter, tool: ToolRule) -> str:
    parser = tagged_calls.DeepSeekTagParser

    def member(key: str, schema: Any) -> str:
        head = f'{parser.parameter}"{key}" string="{"true" if is_text(schema) else "false"}">'
        value = tagged_value(writer, tool, key, schema, parser.parameter_end)
        return f"{writer.mark(head)} {value} {literal(chr(10))}"

    head, tail = f'{parser.invoke}"{tool.name}">\n', f"{parser.invoke_end}\n"
    return f"{writer.mark(head)} {members_of(writer, tool, member, '')} {writer.mark(tail)}"


def glm(writer: GrammarWriter, tool: ToolRule) -> str:
    key_open, key_end, value_open = map(writer.mark, (tagged_calls.KEY, tagged_calls.KEY_END, tagged_calls.VALUE))

    def member(key: str, schema: Any) -> str:
        value = tagged_value(writer, tool, key, schema, tagged_calls.VALUE_END)
        return f'{key_open} {literal(key)} {key_end} "\\n" {value_open} {value} "\\n"'

    members = members_of(writer, tool, member, "")
    return f"{literal(tool.name + chr(10))} {members} {writer.mark(tagged_calls.TOOL_CALL_END)}"


def hy(
    parser: type[tagged_calls.Hy3PreviewParser], line_break: str, *, has_separator: bool
) -> Callable[[GrammarWriter, ToolRule], str]:
    def body(writer: GrammarWriter, tool: ToolRule) -> str:
        call, end, separator, key_open, key_end, value_open, _ = map(writer.mark, parser.tags())
        between = f"{literal(line_break)} " if line_break else ""

        def member(key: str, schema: Any) -> str:
            value = tagged_value(writer, tool, key, schema, parser.tags()[-1])
            return f"{key_open} {literal(key)} {key_end} {between}{value_open} {value} {between}"

        head = f"{call} {literal(tool.name)} {f'{separator} {between}' if has_separator else ''}"
        return f"{head}{members_of(writer, tool, member, '')} {end}"

    return body


def _hy_notation(
    parser: type[tagged_calls.Hy3PreviewParser], line_break: str = "\n", *, has_separator: bool = True
) -> CallNotation:
    return CallNotation(
        hy(parser, line_break, has_separator=has_separator),
        trigger=parser.open,
        start=literal("\n"),
        separator=literal("\n"),
        end=literal("\n"),
        close=parser.close,
    )


def gemma(parser: type[tagged_calls.GemmaParser]) -> Callable[[GrammarWriter, ToolRule], str]:
    def body(writer: GrammarWriter, tool: ToolRule) -> str:
        def member(key: str, schema: Any) -> str:
            if not is_text(schema):
                return f"{literal(key + ':')} {writer.json(part_of(tool, schema))}"
            value = tagged_value(writer, tool, key, schema, parser.quote)
            return f"{literal(key + ':')} {writer.mark(parser.quote)} {value}"

        members = members_of(writer, tool, member, ",")
        return f"{literal(f'call:{tool.name}{{')} {members} {literal('}')} {writer.mark(parser.close)}"

    return body


TOOL_CALL = json_calls.TOOL_CALL
_HERMES = CallNotation(
    named_object("arguments", "\n", "\n", json_calls.TOOL_CALL_END), trigger=TOOL_CALL, between=literal("\n")
)
_LLAMA = CallNotation(named_object("parameters"), separator=literal("; "), bare="{[")


def listed(parser: type[StreamParser], key: str = "arguments", name_key: str = "name") -> CallNotation:
    """A list of objects after a marker, and up to another if there is one."""
    return CallNotation(
        named_object(key, name_key=name_key),
        trigger=parser.open,
        start=literal("[") if parser.open != marked_calls.FUNCTOOLS else "",
        separator=literal(", "),
        end=literal("]"),
        close=parser.close,
    )


def _deepseek_notation(parser: type[tagged_calls.DeepSeekTagParser]) -> CallNotation:
    return CallNotation(deepseek_tags, trigger=parser.open, start=literal("\n"), separator="", close=parser.close)


_PYTHON = CallNotation(pythonic, start=literal("["), separator=literal(", "), end=literal("]"), bare="{[")

# By the names of TOOL_FORMATS.
NOTATIONS: Mapping[str, CallNotation] = {
    "harmony": CallNotation(harmony_call, trigger=harmony.CHANNEL),
    "deepseek_v3": CallNotation(
        deepseek_v3, trigger=json_calls.CALLS, separator=literal("\n"), end=json_calls.CALLS_END
    ),
    "deepseek_v31": CallNotation(deepseek_v31, trigger=json_calls.CALLS, separator="", end=json_calls.CALLS_END),
    "mistral_args": CallNotation(mistral_args, trigger=json_calls.TOOL_CALLS, between=""),
    "mistral": CallNotation(
        named_object("arguments"),
        trigger=json_calls.TOOL_CALLS,
        start=literal("["),
        separator=literal(", "),
        end=literal("]"),
    ),
    "kimi_k2": CallNotation(kimi, trigger=marked_calls.CALLS, separator="", end=marked_calls.CALLS_END),
    "minimax_m2": CallNotation(
        with_parameters(
            f'{tagged_calls.INVOKE}"{{}}">\n', f'{tagged_calls.INVOKE_PARAMETER}"{{}}">', f"{tagged_calls.INVOKE_END}\n"
        ),
        trigger=tagged_calls.MiniMaxParser.open,
        start=literal("\n"),
        separator="",
        close=tagged_calls.MiniMaxParser.close,
    ),
    "deepseek_v4": _deepseek_notation(tagged_calls.DeepSeek4Parser),
    "deepseek_v32": _deepseek_notation(tagged_calls.DeepSeekTagParser),
    "seed_oss": CallNotation(
        with_parameters(
            f"\n{tagged_calls.FUNCTION}{{}}>\n",
            f"{tagged_calls.PARAMETER}{{}}>",
            f"{tagged_calls.FUNCTION_END}\n",
            tagged_calls.SeedParser.close,
        ),
        trigger=tagged_calls.SeedParser.open,
        between=literal("\n"),
    ),
    "command": listed(marked_calls.CommandParser, "parameters", "tool_name"),
    "command_r": CallNotation(
        named_object("parameters", name_key="tool_name"),
        trigger=marked_calls.ACTION,
        start=literal(f" {marked_calls.JSON_FENCE}\n["),
        separator=literal(", "),
        end=literal(f"]\n{pythonic_calls.FENCE_END}"),
    ),
    "nemotron": listed(marked_calls.MarkedCallParser),
    "tool_calls": listed(marked_calls.ToolCallsParser),
    "granite": listed(marked_calls.GraniteParser),
    "phi4_mini": listed(marked_calls.FunctoolsParser),
    "internlm": CallNotation(
        named_object("parameters"),
        trigger=marked_calls.InternLmParser.open,
        start=marked_calls.PLUGIN,
        close=marked_calls.InternLmParser.close,
        between="",
    ),
    "longcat": replace(
        _HERMES,
        body=named_object("arguments", "\n", "\n", marked_calls.LongcatParser.close),
        trigger=marked_calls.LongcatParser.open,
    ),
    "lfm2": replace(_PYTHON, trigger=marked_calls.LfmParser.open, close=marked_calls.LfmParser.close, bare=""),
    "olmo3": CallNotation(
        pythonic,
        trigger=marked_calls.OlmoParser.open,
        start=literal("\n"),
        separator=literal("\n"),
        end=literal("\n"),
        close=marked_calls.OlmoParser.close,
    ),
    "apertus": CallNotation(
        apertus,
        trigger=marked_calls.ApertusParser.open,
        start=literal("["),
        separator=literal(", "),
        end=literal("]"),
        close=marked_calls.ApertusParser.close,
    ),
    "glm4": CallNotation(glm_4, bare_names=True),
    "qwen3_coder": CallNotation(qwen_coder, trigger=TOOL_CALL, between=literal("\n")),
    "hy_v3": _hy_notation(tagged_calls.Hy3Parser),
    "hy_v4": _hy_notation(tagged_calls.Hy4Parser, "", has_separator=False),
    "hy_v3_preview": _hy_notation(tagged_calls.Hy3PreviewParser),
    "glm": CallNotation(glm, trigger=TOOL_CALL, between=literal("\n")),
    "gemma4": CallNotation(gemma(tagged_calls.Gemma4Parser), trigger=tagged_calls.Gemma4Parser.open, between=""),
    "functiongemma": CallNotation(gemma(tagged_calls.GemmaParser), trigger=tagged_calls.GemmaParser.open, between=""),
    "hermes": _HERMES,
    "llama4_pythonic": _PYTHON,
    "pythonic": _PYTHON,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama3": _LLAMA,
    "json": _HERMES,
}
