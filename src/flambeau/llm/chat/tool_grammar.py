"""The grammar of a reply: calls in the notation of a family, and an answer of a given form, after free reasoning.

Grammars are written in llguidance's dialect of Lark. `<[7]>` is a special token by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flambeau.llm.chat import harmony, json_calls, marked_calls, tagged_calls
from flambeau.llm.chat.stream_parser import StreamParser, ThoughtMarkers
from flambeau.llm.errors import InvalidRequest

ANY_TEXT = "/(?s:.*)/"
SPACES = r"/[ \n]{1,2}/"
SHARED = ("$schema", "$defs", "definitions")
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
TEXT_WORDS = NOTES | {"type", "enum", "const", "minLength", "maxLength"}
OBJECT_WORDS = NOTES | {*SHARED, "type", "properties", "required", "additionalProperties", "$id"}
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
META = re.compile(r"[\\/.^$*+?()\[\]{}|]")
JsonRule = Callable[[Any], str]  # a schema → an expression


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A tool whose calls a grammar describes."""

    name: str
    schema: Mapping[str, Any]
    is_strict: bool

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.schema.get("properties")
        return found if isinstance(found, Mapping) else {}

    def is_required(self, key: str) -> bool:
        required = self.schema.get("required")
        return isinstance(required, list) and key in required


@dataclass(frozen=True, slots=True)
class CallNotation:
    """The parts of a group of calls: trigger start body (separator body)* end, and further groups after `between`."""

    body: Callable[[GrammarWriter, ToolRule], str]
    trigger: str = ""
    start: str = ""
    separator: str | None = None  # None: a group has one call
    end: str = ""
    close: str = ""  # a marker after the end
    between: str | None = None  # None: there is one group
    bare: str = ""  # without a trigger: the first character of a call
    bare_names: bool = False  # without a trigger: a call begins with its name in a line of its own


@dataclass(slots=True)
class GrammarWriter:
    """Collects rules."""

    special: Mapping[str, int]  # markers that are special tokens
    json_rule: JsonRule
    rules: list[str] = field(default_factory=list)

    def rule(self, expression: str, options: str = "") -> str:
        return self._add(f"r{len(self.rules)}", expression, options)

    def terminal(self, expression: str) -> str:
        """A rule of regular expressions only."""
        return self._add(f"T{len(self.rules)}", expression)

    def _add(self, name: str, expression: str, options: str = "") -> str:
        self.rules.append(f"{name}{options}: {expression}")
        return name

    def mark(self, marker: str) -> str:
        return f"<[{self.special[marker]}]>" if marker in self.special else literal(marker)

    def json(self, schema: Any) -> str:
        return self.rule(self.json_rule(schema))

    def until(self, text: str, marker: str) -> str:
        """Text of a form, a regular expression, up to a marker and with it."""
        if marker in self.special:
            return f"{self.rule(text)} {self.mark(marker)}"
        return self.rule(f"/{text[1:-1]}{regex(marker)}/", "[lazy]")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return META.sub(r"\\\g<0>", text).replace("\n", r"\n")


# ---- calls ----


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


def glm(writer: GrammarWriter, tool: ToolRule) -> str:
    key_open, key_end, value_open = map(writer.mark, (tagged_calls.KEY, tagged_calls.KEY_END, tagged_calls.VALUE))

    def member(key: str, schema: Any) -> str:
        value = tagged_value(writer, tool, key, schema, tagged_calls.VALUE_END)
        return f'{key_open} {literal(key)} {key_end} "\\n" {value_open} {value} "\\n"'

    members = members_of(writer, tool, member, "")
    return f"{literal(tool.name + chr(10))} {members} {writer.mark(tagged_calls.TOOL_CALL_END)}"


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


def members_of(writer: GrammarWriter, tool: ToolRule, member: Callable[[str, Any], str], separator: str) -> str:
    """The arguments in the order of their schema; those that are not required may be missing."""
    check_tagged_schema(tool)
    keys = [*tool.properties]
    rules = {key: writer.rule(member(key, tool.properties[key])) for key in keys}
    if not separator:
        return " ".join(rules[key] + ("" if tool.is_required(key) else "?") for key in keys)
    rest = ""  # what may follow an argument
    starts: list[str] = []  # calls that begin with it
    for key in reversed(keys):
        starts.insert(0, f"{rules[key]} {rest}")
        step = f"{literal(separator)} {rules[key]}"
        rest = writer.rule(f"{step if tool.is_required(key) else f'({step})?'} {rest}")
    first = next((i for i, key in enumerate(keys) if tool.is_required(key)), None)
    if first is not None:
        return f"({' | '.join(starts[: first + 1])})"
    return f"({' | '.join(starts)})?" if starts else ""


def tagged_value(
    writer: GrammarWriter, tool: ToolRule, key: str, schema: Any, close: str, before_close: str = ""
) -> str:
    """A value between markers, with the closing one: text as it is, anything else as JSON."""
    end = f"{literal(before_close)} {writer.mark(close)}"
    if not is_text(schema):
        return f"{writer.json(part_of(tool, schema))} {end}"
    if tool.is_strict and (unknown := schema.keys() - TEXT_WORDS):
        word = min(unknown)
        raise refusal(tool, f"/properties/{key}/{word}", f"{word} cannot be enforced in texts of this model's notation")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        return f"({' | '.join(literal(str(choice)) for choice in choices)}) {end}"
    if "minLength" not in schema and "maxLength" not in schema:
        return writer.until(ANY_TEXT, close)
    # A line break or a bracket could belong to the closing marker.
    character = r"(?s:.)" if close in writer.special and not before_close else r"[^<\n]"
    text = f"{character}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return f"{writer.rule(f'/{text}/')} {end}"


def is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and tagged_calls.is_text({"properties": {"key": schema}}, "key")


def check_tagged_schema(tool: ToolRule) -> None:
    """Reject what a notation with one place for each argument cannot hold."""
    if not tool.is_strict:
        return
    if unknown := tool.schema.keys() - OBJECT_WORDS:
        word = min(unknown)
        raise refusal(tool, f"/{word}", f"{word} cannot be enforced in this model's notation")
    for key in tool.schema.get("required", []):
        if key not in tool.properties:
            raise refusal(tool, "/required", f"{key} is required, but not among the properties")


def part_of(tool: ToolRule, schema: Any) -> Any:
    """The schema of one parameter, with the definitions of the whole."""
    if not isinstance(schema, Mapping):
        return schema
    return {**{word: tool.schema[word] for word in SHARED if word in tool.schema}, **schema}


def refusal(tool: ToolRule, pointer: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the parameters of the tool {tool.name!r} cannot be enforced at {pointer}: {reason}; leave it out, or strict",
        "tools",
    )


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


# ---- replies ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """What a reply may be: calls, or an answer, or both."""

    notation: str  # of calls
    tools: Sequence[ToolRule] = ()
    must_call: bool = False
    is_parallel: bool = True
    answer: str | None = None  # the expression of the answer; None: free text
    may_think: bool = False  # before all else
    thought: ThoughtMarkers | None = None
    starts_in_thought: bool = False


def write_grammar(form: ReplyForm, special: Mapping[str, int], json_rule: JsonRule) -> str:
    writer = GrammarWriter(special, json_rule)
    notation = NOTATIONS[form.notation]
    if form.notation == "harmony":
        start = harmony_reply(writer, form, notation)
    else:
        start = f"{thought_of(writer, form)} {plain_reply(writer, form, notation)}"
    return "\n".join([f"start: {start}", *writer.rules])


def thought_of(writer: GrammarWriter, form: ReplyForm) -> str:
    """Reasoning is free up to its closing marker."""
    if form.thought is None or not (form.may_think or form.starts_in_thought):
        return ""
    inner = writer.until(ANY_TEXT, form.thought.close)
    return inner if form.starts_in_thought else f"({writer.mark(form.thought.open)} {inner})?"


def plain_reply(writer: GrammarWriter, form: ReplyForm, notation: CallNotation) -> str:
    space = f"{writer.rule(SPACES)}?" if form.may_think or form.starts_in_thought else ""
    space = "" if notation.bare_names and form.tools else space
    if not form.tools:
        return f"{space} {form.answer or writer.rule(ANY_TEXT)}"
    if form.must_call:
        return f"{space} {groups_of(writer, form, notation)}"
    if form.answer is not None:
        return f"{space} ({groups_of(writer, form, notation)} | {form.answer})"
    text = writer.rule(ANY_TEXT)
    if not notation.trigger:
        return f"({space} {groups_of(writer, form, notation)} | {writer.terminal(free_text(form, notation))})"
    call = f"{writer.until(ANY_TEXT, notation.trigger)} {group_of(writer, form, notation)}"
    if not form.is_parallel:
        return f"({call} | {text})"
    return f"({writer.rule(call)})* {text}"


def free_text(form: ReplyForm, notation: CallNotation) -> str:
    """Text that begins neither like a call nor like a thought."""
    text = rf"/(\s*[^\s{regex(notation.bare)}](?s:.*))?/"
    if notation.bare_names:
        names = "|".join(regex(tool.name) for tool in form.tools)
        text = rf"/(?s:.*)/ & ~/\s*({names})\n(?s:.*)/"
    return text if form.thought is None else rf"{text} & ~/\s*{regex(form.thought.open)}(?s:.*)/"


def harmony_reply(writer: GrammarWriter, form: ReplyForm, notation: CallNotation) -> str:
    channel, message = writer.mark(harmony.CHANNEL), writer.mark(harmony.MESSAGE)
    start = ""
    if form.may_think:
        text = writer.until(ANY_TEXT, harmony.END)
        start = f'({channel} "analysis" {message} {text} {writer.mark(harmony.START)} "assistant")?'
    final = f'{channel} "final" {message} {form.answer or writer.rule(ANY_TEXT)}'
    if not form.tools:
        return f"{start} {final}"
    calls = groups_of(writer, form, notation)
    return f"{start} {calls if form.must_call else f'({calls} | {final})'}"


def groups_of(writer: GrammarWriter, form: ReplyForm, notation: CallNotation) -> str:
    trigger = writer.mark(notation.trigger) if notation.trigger else ""
    group = writer.rule(f"{trigger} {group_of(writer, form, notation)}")
    if notation.between is None or not form.is_parallel:
        return group
    return f"{group} ({notation.between} {group})*"


def group_of(writer: GrammarWriter, form: ReplyForm, notation: CallNotation) -> str:
    """A group of calls without its trigger."""
    body = writer.rule(" | ".join(writer.rule(notation.body(writer, tool)) for tool in form.tools))
    more = ""
    if notation.separator is not None and form.is_parallel:
        more = f"({notation.separator} {body})*"
    end = notation.end
    if end and not end.startswith('"'):
        end = writer.mark(end)
    start = notation.start
    if start and not start.startswith('"'):
        start = writer.mark(start)
    return f"{start} {body} {more} {end} {writer.mark(notation.close) if notation.close else ''}"
