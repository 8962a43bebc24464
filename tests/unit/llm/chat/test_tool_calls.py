"""Calls of tools: found in what models write, whole or as it is made."""

from __future__ import annotations

import json
import time

import pytest

from flambeau.llm.chat.deltas import ParsedCall
from flambeau.llm.chat.tool_calls import ToolCallParser, parse_tool_calls

NAMES = ("weather", "time")
WEATHER = '{"name": "weather", "arguments": {"city": "Ulm"}}'
CALL = ParsedCall("weather", '{"city": "Ulm"}')
TAGGED = f"<tool_call>\n{WEATHER}\n</tool_call>"
CLOSING = '<tool_call>{"name": "time", "arguments": {"a": "x</tool_call>y"}}</tool_call>'
CLOSED, OPENING = ParsedCall("time", '{"a": "x</tool_call>y"}'), '{"a": "<tool_call>"}'
LLAMA = '{"name": "weather", "parameters": {"city": "Ulm"}}'

CASES = [
    ("Hello.", "Hello.", []),
    ("", "", []),
    ("  \n", "  \n", []),
    # thoughts
    (f"<think>Maybe {TAGGED}?</think>No.", f"<think>Maybe {TAGGED}?</think>No.", []),
    (f"<think>Maybe {TAGGED}?</think>\n{TAGGED}", f"<think>Maybe {TAGGED}?</think>", [CALL]),
    (f"<think>{TAGGED}", f"<think>{TAGGED}", []),  # it never came to an end
    (f"{TAGGED}<think>again?</think>", "<think>again?</think>", [CALL]),
    # Hermes and Qwen
    (TAGGED, "", [CALL]),
    (f"Let me see.\n{TAGGED}", "Let me see.", [CALL]),
    (f"{TAGGED}\n{TAGGED}\n", "", [CALL, CALL]),
    (f"a {TAGGED} b", "a b", [CALL]),
    (f"<tool_call>{WEATHER}", "", [CALL]),  # the model stopped instead of closing it
    ('<tool_call>{"name": "time"}</tool_call>', "", [ParsedCall("time", "{}")]),
    (
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "",
        [ParsedCall("unknown", "{}")],
    ),  # it is said plainly
    ('<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ParsedCall("time", '{"a": 1}')]),
    ('<tool_call>{"name": "time", "arguments": ""}</tool_call>', "", [ParsedCall("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": {"a": "x\ny"}}</tool_call>', "", [ParsedCall("time", '{"a": "x\\ny"}')]),
    (f"<tool_call>\n{WEATHER}\n{WEATHER}\n</tool_call>", "", [CALL, CALL]),
    (f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>.", ".", [CALL, CALL]),
    # tags within strings, and calls within what is none
    (f"a {CLOSING} b", "a b", [CLOSED]),
    (f"{CLOSING}\n{CLOSING}", "", [CLOSED, CLOSED]),
    (CLOSING.removesuffix("</tool_call>"), "", [CLOSED]),
    ('<tool_call>{"name": "time", "arguments": {"a": "<tool_call>"}}</tool_call>', "", [ParsedCall("time", OPENING)]),
    (f"<tool_call>oops {TAGGED} b", "<tool_call>oops b", [CALL]),
    (f"<tool_call>oops <tool_call>{WEATHER}", "<tool_call>oops", [CALL]),
    (f"<tool_call>oops {CLOSING}", "<tool_call>oops", [CLOSED]),
    (f'<tool_call>{{"no}}</tool_call> {TAGGED} b', '<tool_call>{"no}</tool_call> b', [CALL]),
    (f'<tool_call>{{"no}}</tool_call> <tool_call>{WEATHER}', '<tool_call>{"no}</tool_call>', [CALL]),
    ('<tool_call>{"no}</tool_call> b ', '<tool_call>{"no}</tool_call> b ', []),
    (f"<tool_call>{WEATHER} or so</tool_call>", f"<tool_call>{WEATHER} or so</tool_call>", []),
    (f"<tool_call>[{WEATHER}, 1]</tool_call>", f"<tool_call>[{WEATHER}, 1]</tool_call>", []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    # what only looks like a call
    ("a < b, <tool", "a < b, <tool", []),
    ("x\n<tool_call>{no}</tool_call> y", "x\n<tool_call>{no}</tool_call> y", []),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ('<tool_call>{"name": "a b"}</tool_call>', '<tool_call>{"name": "a b"}</tool_call>', []),
    ('<tool_call>{"name": "time", "arguments": [1]}', '<tool_call>{"name": "time", "arguments": [1]}', []),
    (f"<tool_call>{{no}}</tool_call>{TAGGED}", "<tool_call>{no}</tool_call>", [CALL]),
    # Llama 3
    (LLAMA, "", [CALL]),
    (f"\n{LLAMA}\n", "", [CALL]),
    (f'{LLAMA}; {{"type": "function", "name": "time", "parameters": {{}}}}', "", [CALL, ParsedCall("time", "{}")]),
    ('{ "name" : "time" , "parameters" : null }', "", [ParsedCall("time", "{}")]),
    ('{"name": "time", "parameters": {"a": "x\ny"}}', "", [ParsedCall("time", '{"a": "x\\ny"}')]),
    ('{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', []),
    (f"{LLAMA} is how.", f"{LLAMA} is how.", []),
    (f"Try {LLAMA}", f"Try {LLAMA}", []),
    ('{"na', '{"na', []),
    ('{"answer": 1}', '{"answer": 1}', []),
    (f'{{"name": "Ann"}} {TAGGED}', '{"name": "Ann"}', [CALL]),
]


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_calls_are_found_in_a_whole_text(text, said, calls):
    assert parse_tool_calls(text, NAMES) == (said, calls)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_pieces_say_what_the_whole_text_does(text, said, calls, size):
    reader = ToolCallParser(NAMES)
    found = [reader.take(text[i : i + size]) for i in range(0, len(text), size)] + [reader.finish()]
    assert "".join(part for part, _ in found) == said
    assert [call for _, of_piece in found for call in of_piece] == calls
    assert reader.has_called == bool(calls)


def test_text_is_given_on_at_once_and_a_call_when_it_is_closed():
    reader = ToolCallParser(NAMES)
    assert reader.take("Let me ") == ("Let me", [])
    assert reader.take("see <b>") == (" see <b>", [])
    assert reader.take(" <tool_") == ("", [])
    assert reader.take(f"call>{WEATHER}</tool_call") == ("", [])
    assert reader.take(">") == ("", [CALL])
    assert reader.take('{"name": ') == ('{"name":', [])  # bare calls stand alone


def test_text_after_what_is_no_call_is_given_on_at_once():
    reader = ToolCallParser(NAMES)
    assert reader.take("<tool_call>{no}</tool_call> b") == ("<tool_call>{no}</tool_call> b", [])


def test_json_that_is_no_call_is_not_held_back():
    reader = ToolCallParser(NAMES)
    assert reader.take('{"') == ("", [])
    assert reader.take('a": 1') == ('{"a": 1', [])


def test_arguments_can_always_be_sent():
    [call] = parse_tool_calls('<tool_call>{"name": "time", "arguments": {"a": "\\ud800", "b": "ä"}}', NAMES)[1]
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"a": "\ud800", "b": "ä"}
    assert parse_tool_calls('<tool_call>{"name": "time", "arguments": {"a": "ä"}}', NAMES)[1] == [
        ParsedCall("time", '{"a": "ä"}')
    ]
    assert parse_tool_calls('<tool_call>{"name": "time", "arguments": {"a": 1e999}}', NAMES)[1] == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name": ' * 100_000, "<tool_call>" + '{"a":' * 100_000])
def test_text_nested_without_end_is_text(text):
    assert parse_tool_calls(text, NAMES) == (text, [])


@pytest.mark.perf
def test_long_call_is_not_looked_through_again_and_again():
    reader, began = ToolCallParser(NAMES), time.process_time()
    reader.take('<tool_call>{"name": "time", "arguments": {"a": "')
    for _ in range(20_000):
        reader.take("0123456789")
    assert reader.take('"}}</tool_call>')[1][0].arguments == json.dumps({"a": "0123456789" * 20_000})
    assert time.process_time() - began < 5


def test_call_in_a_thought_that_the_template_opened_is_none():
    thought = f"I could call {TAGGED}.\n</think>\n\nHello."
    assert parse_tool_calls(thought, NAMES) == (thought, [])
    assert parse_tool_calls(f"I could.</think>{TAGGED}", NAMES) == ("I could.</think>", [CALL])
