"""Pieces of a generation → what OpenAI's clients read."""

from __future__ import annotations

import json
import math

import pytest

from flambeau.frontend.openai.chat_responses import ChatWriter
from flambeau.frontend.openai.completions import CompletionWriter
from flambeau.frontend.openai.responses import ResponseHead
from flambeau.wire.generation import Piece, Token

HEAD = ResponseHead("x-1", 5, "m", "fp_0")


def writer_of(kind, *, num_choices=1, has_logprobs=False, has_usage=False):
    return kind(HEAD, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)


def streamed(writer, pieces):
    """The documents of a stream's events."""
    text = b"".join([*map(writer.events, pieces), writer.last_events()]).decode()
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def token(text, logprob=-0.5, *top, data=b""):
    return Token(1, text, logprob, data or text.encode(), [(2, other, lp, other.encode()) for other, lp in top])


def test_stream_of_a_chat_begins_with_the_role_and_ends_with_the_reason():
    pieces = [Piece(0, "Hell"), Piece(0, "o"), Piece(0, "", "stop")]
    chunks = streamed(writer_of(ChatWriter), pieces)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hell"},
        {"content": "o"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks} == {
        ("x-1", "chat.completion.chunk", 5, "m", "fp_0")
    }
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
def test_usage_comes_last_without_choices_and_is_null_before(kind):
    pieces = [
        Piece(0, "a", "stop", None, 7, 3, 4, 6, 2),
        Piece(1, "b", "length", None, 7, 5, 7, 1, 1),
        Piece(2, "c", "stop", None, 2, 1, 0, 0, 0),
        Piece(3, "d", "stop", None, 2, 1, 2, 0, 0),
    ]
    *chunks, last = streamed(writer_of(kind, num_choices=2, has_usage=True), pieces)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 10,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 4,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }
    whole = json.loads(writer_of(kind, num_choices=2).whole(pieces))
    assert whole["usage"] == last["usage"]


def test_choices_of_a_stream_come_as_they_are_made_each_with_its_role():
    pieces = [Piece(1, "b"), Piece(0, "a"), Piece(1, "", "length"), Piece(0, "", "stop")]
    chunks = streamed(writer_of(ChatWriter, num_choices=2), pieces)
    told = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("content")) for c in chunks]
    assert told == [(1, ""), (1, "b"), (0, ""), (0, "a"), (1, None), (0, None)]


def test_whole_reply_has_the_choices_in_their_order_whatever_order_they_ended_in():
    pieces = [Piece(1, "b", "stop"), Piece(0, "a1"), Piece(0, "a2", "length")]
    found = json.loads(writer_of(ChatWriter, num_choices=2).whole(pieces))
    assert found["object"] == "chat.completion"
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "a1a2", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    found = json.loads(writer_of(CompletionWriter, num_choices=2).whole(pieces))
    assert found["choices"][0] == {"index": 0, "text": "a1a2", "logprobs": None, "finish_reason": "length"}
    assert found["object"] == "text_completion"


def test_piece_that_says_nothing_makes_no_event():
    assert writer_of(CompletionWriter).events(Piece(0, "")) == b""
    writer = writer_of(ChatWriter)
    writer.events(Piece(0, "a"))
    assert writer.events(Piece(0, "")) == b""


@pytest.mark.parametrize("text", ['"\\\n\0', "ÄÖ 🦊", "\u2028", "</script>", "a" * 5000])
@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
def test_any_text_survives_the_stream(kind, text):
    chunks = streamed(writer_of(kind), [Piece(0, text), Piece(0, "", "stop")])
    choices = [chunk["choices"][0] for chunk in chunks]
    assert text in [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]


def test_logprobs_of_a_chat_without_alternatives():
    piece = Piece(0, "Hi", "stop", [token("Hi", -0.25)])
    choice = json.loads(writer_of(ChatWriter, has_logprobs=True).whole([piece]))["choices"][0]
    entry = {"token": "Hi", "logprob": -0.25, "bytes": [72, 105], "top_logprobs": []}
    assert choice["logprobs"] == {"content": [entry], "refusal": None}
    chunks = streamed(writer_of(ChatWriter, has_logprobs=True), [piece])
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, choice["logprobs"], None]


def test_character_split_across_tokens_has_the_bytes_of_each():
    halves = [token("\ufffd", data=b"\xc3"), token("\ufffd", data=b"\xa4")]
    pieces = [Piece(0, "", None, halves[:1]), Piece(0, "ä", "stop", halves[1:])]
    chunks = streamed(writer_of(ChatWriter, has_logprobs=True), pieces)
    told = [c["choices"][0] for c in chunks if c["choices"][0]["logprobs"]]
    assert [choice["delta"]["content"] for choice in told] == ["", "ä"]
    assert [choice["logprobs"]["content"][0]["bytes"] for choice in told] == [[0xC3], [0xA4]]


def test_logprobs_of_a_completion_tell_where_each_token_begins():
    tokens = [token("On", -0.5, ("On", -0.5), ("In", -1)), token("ce", -3, ("to", -0.1)), token("!", -math.inf)]
    pieces = [Piece(0, "Once", None, tokens[:2]), Piece(0, "!", "length", tokens[2:])]
    found = json.loads(writer_of(CompletionWriter, has_logprobs=True).whole(pieces))["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["On", "ce", "!"],
        "text_offset": [0, 2, 4],
        "token_logprobs": [-0.5, -3, -9999.0],
        "top_logprobs": [{"On": -0.5, "In": -1}, {"to": -0.1, "ce": -3}, {"!": -9999.0}],
    }
    chunks = streamed(writer_of(CompletionWriter, has_logprobs=True), pieces)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 2], [4]]


def test_of_alternatives_with_one_text_the_likeliest_counts():
    piece = Piece(0, "a", "stop", [token("a", -2, ("\ufffd", -0.5), ("\ufffd", -1.5))])
    found = json.loads(writer_of(CompletionWriter, has_logprobs=True).whole([piece]))
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "a": -2}]
