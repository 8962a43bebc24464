"""Chats → Anthropic's messages and events."""

from __future__ import annotations

import json

from flambeau.errors import JobFailed
from flambeau.frontend.anthropic.messages import MessageWriter, content_of, tool_block
from flambeau.frontend.openai.chat import ChatWriter
from flambeau.frontend.openai.responses import ResponseHead
from flambeau.wire.generation import CallPiece, Piece

HEAD = ResponseHead("chatcmpl-1", 1, "m", "fp_1")
CALLS = [CallPiece(0, "weather", '{"city": "Oslo"}'), CallPiece(1, "weather", '{"city": "Oslo"}')]


def new_writer():
    return MessageWriter(ChatWriter(HEAD, 1, has_logprobs=False, has_usage=True))


def last_piece(text="", reason="stop", stop="", calls=()):
    return Piece(0, text, reason, None, 11, 7, 4, calls=[*calls], stop=stop)


def events_of(writer, *pieces):
    raw = b"".join([*map(writer.events, pieces), writer.last_events(), writer.end]).decode()
    found = []
    for event in raw.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_whole_message():
    found = json.loads(new_writer().whole([Piece(0, "Hel"), last_piece("lo")]))
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
        },
    }


def test_reasons_to_stop():
    assert json.loads(new_writer().whole([last_piece("a", "length")]))["stop_reason"] == "max_tokens"
    found = json.loads(new_writer().whole([last_piece("a", "stop", "END")]))
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")


def test_stream_begins_and_ends_each_block():
    found = events_of(new_writer(), Piece(0, "Hel"), last_piece("lo", "stop", "END"))
    assert [event["type"] for event in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["stop_reason"] is None
    assert "".join(event["delta"]["text"] for event in found[2:4]) == "Hello"
    assert found[5]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert (found[5]["usage"]["input_tokens"], found[5]["usage"]["output_tokens"]) == (7, 7)


def test_call_of_a_tool_is_a_block_of_its_own():
    whole = new_writer().whole([last_piece("Wait.", "tool_calls", calls=CALLS[:1])])
    [text, call] = json.loads(whole)["content"]
    assert text == {"type": "text", "text": "Wait."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    pieces = [Piece(0, "", calls=[call]) for call in CALLS]
    found = events_of(new_writer(), Piece(0, "Wait."), *pieces, last_piece(reason="tool_calls"))
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert len({start["content_block"].get("id") for start in starts}) == 3
    parts = [event["delta"]["partial_json"] for event in found if event.get("delta", {}).get("partial_json")]
    assert [json.loads(part) for part in parts] == [{"city": "Oslo"}] * 2
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_thoughts_come_first():
    message = {"reasoning_content": "Hm.", "content": "Yes.", "tool_calls": None}
    assert [block["type"] for block in content_of(message)] == ["thinking", "text"]
    writer = new_writer()
    chunk = {"choices": [{"delta": {"reasoning_content": "Hm."}, "finish_reason": None}]}
    after = {"choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]}
    kinds = [event["type"] for event in [*writer.on_chunk(chunk), *writer.on_chunk(after), *writer.on_end({})]]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_call_that_was_cut_short_stays_text():
    cut = {"id": "1", "function": {"name": "f", "arguments": '{"a": '}}
    assert tool_block(cut) == {"type": "text", "text": '{"a": '}


def test_stream_that_fails_ends_with_an_error():
    event = new_writer().error(503, "busy", JobFailed("busy", status=503), "").decode()
    assert event.startswith("event: error\n")
    error = {"type": "overloaded_error", "message": "busy"}
    assert json.loads(event.partition("data: ")[2]) == {"type": "error", "error": error}
