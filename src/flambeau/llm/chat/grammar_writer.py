"""GrammarWriter: rules of a grammar for tool calls, in llguidance's dialect of Lark; `<[7]>` is a special token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flambeau.llm.chat import tagged_calls
from flambeau.llm.errors import InvalidRequest

ANY_TEXT = "/(?s:.*)/"
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
        """A marker: a special token, or text, in which there may be one."""
        before, token, after = self._parts(marker)
        return " ".join(filter(None, (literal(before), token, literal(after))))

    def _parts(self, marker: str) -> tuple[str, str, str]:
        """The text before the special token of a marker, the token, and the text behind it."""
        name = marker if marker in self.special else next((one for one in self.special if one in marker), "")
        before, _, after = marker.partition(name) if name else (marker, "", "")
        return before, f"<[{self.special[name]}]>" if name else "", after

    def json(self, schema: Any) -> str:
        return self.rule(self.json_rule(schema))

    def until(self, text: str, marker: str) -> str:
        """Text of a form, a regular expression, up to a marker and with it."""
        before, token, after = self._parts(marker)
        if token:
            ahead = f"/{text[1:-1]}{regex(before)}/" if before else text
            return " ".join(filter(None, (self.rule(ahead), token, literal(after))))
        return self.rule(f"/{text[1:-1]}{regex(marker)}/", "[lazy]")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return META.sub(r"\\\g<0>", text).replace("\n", r"\n")


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
