"""The grammar of a reply: calls in the notation of a family, and an answer of a given form, after free reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flambeau.llm.chat import harmony
from flambeau.llm.chat.call_notations import NOTATIONS
from flambeau.llm.chat.grammar_writer import ANY_TEXT, CallNotation, GrammarWriter, JsonRule, ToolRule, regex
from flambeau.llm.chat.stream_parser import ThoughtMarkers

SPACES = r"/[ \n]{1,2}/"


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
