"""Chats → responses and typed events."""

from __future__ import annotations

import json

from flambeau.errors import JobFailed
from flambeau.frontend.openai.chat import ChatWriter
from flambeau.frontend.openai.responses import ResponseHead
from flambeau.frontend.openai_responses.requests import ResponsesRequest
from flambeau.frontend.openai_responses.writer import ResponseObjectWriter, message_of
from flambeau.wire.generation import CallPiece, Piece

HEAD = ResponseHead("chatcmpl-1", 1, "m", "fp_1")
CALLS = [CallPiece(0, "weather", '{"city": "Oslo"}'), CallPiece(1, "weather", '{"city": "Oslo"}')]


def new_writer(*, on_done=None):
    chat = ChatWriter(HEAD, 1, has_logprobs=False, has_usage=True)
    return ResponseObjectWriter(chat, ResponsesRequest(input="a", instructions="Speak."), on_done)


def last_piece(text="", reason="stop", calls=()):
    return Piece(0, text, reason, None, 11, 7, 4, calls=[*calls])


def events_of(writer, *pieces):
    raw = b"".join([*map(writer.events, pieces), writer.last_events(), writer.end]).decode()
    found = [json.loads(event.partition("\ndata: ")[2]) for event in raw.strip().split("\n\n")]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def test_whole_response():
    found = json.loads(new_writer().whole([Piece(0, "Hel"), last_piece("lo")]))
    assert found["id"].startswith("resp_")
    assert (found["object"], found["status"], found["model"]) == ("response", "completed", "m")
    [item] = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert found["instructions"] == "Speak."
    assert found["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


def test_text_that_was_cut_short_is_incomplete():
    found = json.loads(new_writer().whole([last_piece("a", "length")]))
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"
    assert events_of(new_writer(), last_piece("a", "length"))[-1]["type"] == "response.incomplete"


def test_stream_adds_and_ends_each_item():
    found = events_of(new_writer(), Piece(0, "Hel"), last_piece("lo"))
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert found[0]["response"]["output"] == []
    assert found[6]["text"] == "Hello"
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[-1]["response"]["usage"]["total_tokens"] == 18
    assert len({event["response"]["id"] for event in found if "response" in event}) == 1


def test_calls_are_items_of_their_own():
    [text, call] = json.loads(new_writer().whole([last_piece("Wait.", "tool_calls", CALLS[:1])]))["output"]
    assert text["content"][0]["text"] == "Wait."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Oslo"}')
    assert call["call_id"].startswith("call_")
    pieces = [Piece(0, "", calls=[call]) for call in CALLS]
    found = events_of(new_writer(), *pieces, last_piece(reason="tool_calls"))
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["arguments"] for item in done] == ['{"city": "Oslo"}'] * 2
    assert len({item["call_id"] for item in done}) == 2
    arguments = [event for event in found if event["type"].startswith("response.function_call_arguments")]
    assert [event["type"].rpartition(".")[2] for event in arguments] == ["delta", "done"] * 2


def test_thoughts_are_an_item_before_the_answer():
    writer = new_writer()
    chunks = [{"reasoning_content": "Hm."}, {"content": "Yes."}]
    events = [e for c in chunks for e in writer.on_chunk({"choices": [{"delta": c, "finish_reason": None}]})]
    events += writer.on_end({})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message"]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message_of(done) == {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}


def test_finished_response_is_passed_on_with_its_message():
    kept = []
    writer = new_writer(on_done=lambda *done: kept.append(done))
    events = events_of(writer, last_piece("Wait.", "tool_calls", CALLS[:1]))
    [(response, message)] = kept
    assert response == events[-1]["response"]
    assert message["content"] == "Wait."
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


def test_stream_that_fails_ends_with_an_error():
    event = new_writer().error(503, "busy", JobFailed("busy", status=503), "").decode()
    found = json.loads(event.partition("data: ")[2])
    assert (found["type"], found["message"], found["error"]["message"]) == ("error", "busy", "busy")


def test_errors_of_a_worker_name_the_fields_of_this_api():
    assert ResponseObjectWriter.names["messages"] == "input"
    assert ResponseObjectWriter.names["response_format"] == "text.format"
