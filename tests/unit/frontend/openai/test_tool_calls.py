"""Calls of tools: found in what models write, whole or as it is made."""

from __future__ import annotations

import json
import time

import pytest

from flambeau.frontend.openai.chat import ToolChatWriter
from flambeau.frontend.openai.responses import ResponseHead
from flambeau.frontend.openai.tool_calls import ToolCall, ToolCallParser, parse_tool_calls
from flambeau.wire.generation import Piece, Token

NAMES = ("weather", "time")
WEATHER = '{"name": "weather", "arguments": {"city": "Ulm"}}'
CALL = ToolCall("weather", '{"city": "Ulm"}')
TAGGED = f"<tool_call>\n{WEATHER}\n</tool_call>"
CLOSING = '<tool_call>{"name": "time", "arguments": {"a": "x</tool_call>y"}}</tool_call>'
CLOSED, OPENING = ToolCall("time", '{"a": "x</tool_call>y"}'), '{"a": "<tool_call>"}'
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
    ('<tool_call>{"name": "time"}</tool_call>', "", [ToolCall("time", "{}")]),
    (
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "",
        [ToolCall("unknown", "{}")],
    ),  # it is said plainly
    ('<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ToolCall("time", '{"a": 1}')]),
    ('<tool_call>{"name": "time", "arguments": ""}</tool_call>', "", [ToolCall("time", "{}")]),
    ('<tool_call>{"name": "time", "arguments": {"a": "x\ny"}}</tool_call>', "", [ToolCall("time", '{"a": "x\\ny"}')]),
    (f"<tool_call>\n{WEATHER}\n{WEATHER}\n</tool_call>", "", [CALL, CALL]),
    (f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>.", ".", [CALL, CALL]),
    # tags within strings, and calls within what is none
    (f"a {CLOSING} b", "a b", [CLOSED]),
    (f"{CLOSING}\n{CLOSING}", "", [CLOSED, CLOSED]),
    (CLOSING.removesuffix("</tool_call>"), "", [CLOSED]),
    ('<tool_call>{"name": "time", "arguments": {"a": "<tool_call>"}}</tool_call>', "", [ToolCall("time", OPENING)]),
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
    (f'{LLAMA}; {{"type": "function", "name": "time", "parameters": {{}}}}', "", [CALL, ToolCall("time", "{}")]),
    ('{ "name" : "time" , "parameters" : null }', "", [ToolCall("time", "{}")]),
    ('{"name": "time", "parameters": {"a": "x\ny"}}', "", [ToolCall("time", '{"a": "x\\ny"}')]),
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
        ToolCall("time", '{"a": "ä"}')
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


# ---- replies ----


def new_writer(**options):
    head = ResponseHead("x-1", 5, "m", "fp_0")
    return ToolChatWriter(head, 1, NAMES, **{"has_logprobs": False, "has_usage": False, **options})


def events_of(writer, *pieces):
    events = b"".join(map(writer.events, pieces)).decode().split("\n\n")[:-1]
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


def test_message_has_the_calls_and_the_reason():
    document = json.loads(new_writer().whole([Piece(0, f"So.\n{TAGGED}\n{TAGGED}", "stop")]))
    [choice] = document["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So."
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Ulm"}'})
    assert first["id"] != second["id"]
    [choice] = json.loads(new_writer().whole([Piece(0, TAGGED, "stop")]))["choices"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(("text", "reason"), [("no call", "stop"), (TAGGED, "length")])
def test_reason_is_the_model_s_own_where_it_called_nothing_or_was_cut_short(text, reason):
    assert json.loads(new_writer().whole([Piece(0, text, reason)]))["choices"][0]["finish_reason"] == reason
    assert events_of(new_writer(), Piece(0, text), Piece(0, "", reason))[-1]["finish_reason"] == reason


def test_message_without_calls_is_as_any_other():
    [choice] = json.loads(new_writer().whole([Piece(0, "Hello.", "stop")]))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}


def test_stream_has_each_call_in_one_piece():
    text = f"So.\n{TAGGED}\n{TAGGED}"
    pieces = [*(Piece(0, text[i : i + 5]) for i in range(0, len(text), 5)), Piece(0, "", "stop")]
    events = events_of(new_writer(), *pieces)
    deltas = [event["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "So."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "weather")]
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("text", [TAGGED, "Hello.", "a <tool_ca", " "])
def test_every_token_of_a_stream_is_told_once(text):
    pieces = [Piece(0, c, None, [Token(1, c, -0.5, c.encode())]) for c in text]
    events = events_of(new_writer(has_logprobs=True), *pieces, Piece(0, "", "stop"))
    told = [entry["token"] for event in events if event["logprobs"] for entry in event["logprobs"]["content"]]
    assert "".join(told) == text


def test_call_in_a_thought_that_the_template_opened_is_none():
    thought = f"I could call {TAGGED}.\n</think>\n\nHello."
    assert parse_tool_calls(thought, NAMES) == (thought, [])
    assert parse_tool_calls(f"I could.</think>{TAGGED}", NAMES) == ("I could.</think>", [CALL])
