"""Chats → generation requests."""

from __future__ import annotations

import json
import math

import pytest

from flambeau.frontend.openai.chat import ChatWriter
from flambeau.frontend.openai.completions import CompletionWriter
from flambeau.frontend.openai.responses import ResponseHead, estimated_tokens
from flambeau.wire.generation import CallPiece, MediaInput, Piece, Token, decode_request, encode_request, given_options
from support.openai_requests import HELLO, chat_of, completion_of, refusal

DATA = "data:image/png;base64,AAAA"
PNG = {"type": "image_url", "image_url": {"url": DATA}}
IMAGE = {"type": "image"}


def image_message(image):
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": image}]
    return [{"role": "user", "content": parts}]


def sound_message(sound, kind="input_audio"):
    return [{"role": "user", "content": [{"type": kind, kind: sound}]}]


def test_sounds_of_both_forms_are_taken_out_of_the_messages():
    first, second = (
        sound_message({"data": "AAAA", "format": "mp3"}),
        sound_message("https://a.example/b.wav", "audio_url"),
    )
    parts = [*first[0]["content"], PNG, *second[0]["content"]]
    asked = chat_of(messages=[{"role": "user", "content": parts}])
    assert asked.messages == [{"role": "user", "content": [{"type": "audio"}, IMAGE, {"type": "audio"}]}]
    assert asked.files == [
        MediaInput("messages[0].content[0]", "data:audio/mp3;base64,AAAA", kind="sound"),
        MediaInput("messages[0].content[1]", DATA),
        MediaInput("messages[0].content[2]", "https://a.example/b.wav", kind="sound"),
    ]
    assert decode_request(encode_request(asked)) == asked


def test_images_are_taken_out_of_the_messages():
    more = {"type": "image_url", "image_url": {"url": "https://images.example/a.png", "detail": "high"}}
    text = {"type": "text", "text": "And?"}
    asked = chat_of(messages=[*HELLO, {"role": "user", "content": [PNG, text, more]}])
    assert asked.messages == [*HELLO, {"role": "user", "content": [IMAGE, text, IMAGE]}]
    assert asked.files == [
        MediaInput("messages[1].content[0]", DATA),
        MediaInput("messages[1].content[2]", "https://images.example/a.png"),
    ]
    assert decode_request(encode_request(asked)) == asked


def test_bytes_of_images_are_not_counted_as_text():
    image = {"type": "image_url", "image_url": {"url": DATA + "A" * 100_000}}
    asked = chat_of(messages=[{"role": "user", "content": [image]}], max_tokens=5)
    assert 256 < estimated_tokens(asked, len(encode_request(asked))) < 400


def test_every_setting_of_a_chat_reaches_the_model():
    asked = chat_of(
        max_completion_tokens=9,
        temperature=0,
        top_p=0.5,
        n=3,
        stop="END",
        seed=-5,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=4,
        logit_bias={"12": -100, "7": 1.5},
        presence_penalty=-2,
        frequency_penalty=2,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    )
    assert given_options(asked.sampling) == {
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "n": 3,
        "stop": ["END"],
        "seed": -5,
        "logprobs": 4,
        "logit_bias": {12: -100.0, 7: 1.5},
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "top_k": 0,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "include_stop": True,
    }
    assert asked.stream
    assert asked.template_options == {"enable_thinking": False}
    assert asked.reasoning_effort == "low"
    assert asked.messages == HELLO


def test_what_is_not_said_is_left_to_the_model():
    nothing = {"temperature": None, "stop": None, "logit_bias": None, "stream": None, "user": None}
    assert given_options(chat_of(**nothing, tools=None).sampling) == {}
    assert given_options(completion_of(**nothing).sampling) == {"max_tokens": 16}
    assert not chat_of(**nothing).stream
    ignored = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me", "prediction": {}}
    assert given_options(chat_of(**ignored, parallel_tool_calls=False, response_format={"type": "text"}).sampling) == {}


def test_logprobs_of_a_chat_need_no_number_of_alternatives():
    assert given_options(chat_of(logprobs=True).sampling) == {"logprobs": 0}
    assert given_options(chat_of(logprobs=False, top_logprobs=0).sampling) == {}
    assert refusal(chat_of, top_logprobs=2)[0] == "top_logprobs"


def test_messages_reach_the_template_and_a_developer_is_a_system():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    found = chat_of(messages=messages).messages
    assert found[0] == {"role": "system", "content": "Be brief."}
    assert found[1:] == messages[1:]


NAMED = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]


@pytest.mark.parametrize(
    ("choice", "found"),
    [(None, ("auto", "")), ("auto", ("auto", "")), ("required", ("required", "")), (NAMED, ("required", "f"))],
)
def test_choice_of_tools_reaches_the_model(choice, found):
    asked = decode_request(encode_request(chat_of(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)))
    assert (asked.tool_choice, asked.tool_name) == found
    assert asked.tools == TOOLS
    assert not asked.parallel_tool_calls
    assert chat_of(tools=TOOLS).parallel_tool_calls


def test_tools_are_shown_to_the_model_unless_it_is_to_use_none():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat_of(tools=tools).tools == tools
    assert chat_of(tools=tools, tool_choice="auto").tools == tools
    assert chat_of(tools=tools, tool_choice="none").tools is None
    assert chat_of(tools=[]).tools is None


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}}},
            {"json": "{}"},
        ),
        ({"guided_json": {"b": 1, "a": 10**30}}, {"json": f'{{"b": 1, "a": {10**30}}}'}),
        ({"guided_json": '{"b": 1, "a": 2}'}, {"json": '{"b": 1, "a": 2}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"json": '{"type": "null"}'}),
    ],
)
def test_every_spelling_of_a_form_reaches_the_model(fields, structure):
    for asked in (chat_of(**fields), completion_of(**fields)):
        assert given_options(decode_request(encode_request(asked)).sampling).get("structured_outputs") == structure


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"prompt": "a"}, "prompt", "/v1/completions takes it; send messages here"),
        ({"input": "a"}, "input", "/v1/embeddings takes it; send messages here"),
        ({"max_token": 1}, "max_token", "did you mean max_tokens"),
        ({"guided_yaml": {}}, "guided_yaml", "unknown field guided_yaml"),
        ({"temperature": "hot"}, "temperature", "expected a number, got text"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "a whole number"),
        ({"max_tokens": 10**30}, "max_tokens", "<= 2147483647"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": True}, "n", "a whole number, got true or false"),
        ({"n": 129}, "n", "<= 128"),
        ({"stop": ["a"] * 17}, "stop", "<= 16"),
        ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
        ({"stop": 5}, "stop", "text or a list"),
        ({"seed": 2**63}, "seed", "9223372036854775807"),
        ({"seed": "x"}, "seed", "a whole number"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids, not 'a'"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream to be true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "<= 20"),
        ({"logprobs": 5}, "logprobs", "true or false"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object or json_schema, not 'xml'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema is required"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "send the type json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": True}}},
            "response_format",
            "unknown field response_format.json_schema.strct",
        ),
        (
            {"tools": [{"type": "function", "strict": True, "function": {"name": "f"}}]},
            "tools[0].strict",
            "belongs into tools[0].function",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramaters": {}}}]},
            "tools[0].function.paramaters",
            "did you mean parameters?",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "send one of them"),
        ({"guided_choice": []}, "guided_choice", "guided_choice must be 1 to 1000 texts"),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "one of json"),
        ({"guided_json": {"enum": ["x" * 140_000]}}, "guided_json", "at most 131072 characters"),
        ({"tool_choice": "always"}, "tool_choice", "auto, none, required"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "auto, none, required"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "a function with a name"),
        ({"tools": [{"type": "function", "function": {"name": [1]}}]}, "tools[0]", "a function with a name"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED, "tools": TOOLS[1:]}, "tool_choice", "'f', which is not among the tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2]", "two tools have the name 'f'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "letters, digits"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
            "not 1",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
            "a JSON schema",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens", ">= 0"),
        ({"functions": []}, "functions", "tools instead"),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "audio"),
        ({"messages": []}, "messages", "1 to 10000 messages, not 0"),
        ({"messages": "hello"}, "messages", "expected a list, got text"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "not nothing"),
        ({"messages": [*HELLO, {"role": "robot", "content": "a"}]}, "messages[1].role", "not 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
            "messages[0].content[0]",
            "text, image_url, video_url, audio_url or input_audio",
        ),
        ({"messages": sound_message(None)}, "messages[0].content[0].input_audio", "an object with data and format"),
        ({"messages": sound_message({"format": "wav"})}, "messages[0].content[0].input_audio.data", "file in base64"),
        (
            {"messages": sound_message({"data": "AAAA", "format": "exe"})},
            "messages[0].content[0].input_audio.format",
            "one of wav, mp3, flac, ogg, opus, not 'exe'",
        ),
        (
            {"messages": sound_message({"data": "AAAA", "format": "wav", "rate": 1})},
            "messages[0].content[0].rate",
            "leave it out",
        ),
        (
            {"messages": sound_message({"url": "file:///etc/passwd"}, "audio_url")},
            "messages[0].content[0].audio_url.url",
            "must be a data URL (data:audio/wav;base64,…) or begin with https://",
        ),
        (
            {"messages": sound_message({"url": "data:audio/wav,a"}, "audio_url")},
            "messages[0].content[0].audio_url.url",
            "base64",
        ),
        ({"messages": [{"role": "system", "content": [PNG]}]}, "messages[0].content[0]", "only messages of the user"),
        ({"messages": image_message(None)}, "messages[0].content[1].image_url", "an object with a url"),
        ({"messages": image_message({})}, "messages[0].content[1].image_url.url", "must be a data URL"),
        (
            {"messages": image_message({"url": "file:///etc/passwd"})},
            "messages[0].content[1].image_url.url",
            "https://",
        ),
        ({"messages": image_message({"url": "data:image/png,abc"})}, "messages[0].content[1].image_url.url", "base64"),
        (
            {"messages": image_message({"url": DATA, "detail": "best"})},
            "messages[0].content[1].image_url.detail",
            "auto, low or high",
        ),
        ({"messages": image_message({"url": DATA, "size": 5})}, "messages[0].content[1].size", "unknown field 'size'"),
        ({"messages": [{"role": "user", "content": [PNG] * 129}]}, "messages[0].content[128]", "at most 128"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls", "a list of calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "that has a name"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields, field, told):
    found, message = refusal(chat_of, **fields)
    assert found == field
    assert told in message


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


# ---- reasoning and tool calls ----

THOUGHT = Piece(0, "", reasoning="Hm, ", tokens=[token("Hm, ")])
CALLS = [
    THOUGHT,
    Piece(0, "So.", reasoning="Ulm."),
    Piece(0, "", calls=[CallPiece(0, "weather", '{"city": ')]),
    Piece(0, "", calls=[CallPiece(0, "", '"Ulm"}'), CallPiece(1, "time", "{}")]),
    Piece(0, "", "tool_calls", num_tokens=9, num_reasoning_tokens=4),
]


def test_message_has_reasoning_answer_and_calls_apart():
    document = json.loads(writer_of(ChatWriter).whole(CALLS))
    [choice] = document["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm, Ulm.", "Hm, Ulm.", "So.")
    first, second = message["tool_calls"]
    assert (first["type"], first["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Ulm"}'})
    assert second["function"] == {"name": "time", "arguments": "{}"}
    assert first["id"] != second["id"]
    assert document["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_message_of_calls_alone_has_no_content_and_one_without_has_no_calls():
    [choice] = json.loads(writer_of(ChatWriter).whole([Piece(0, "", "stop", calls=[CallPiece(0, "f", "{}")])]))[
        "choices"
    ]
    assert choice["message"]["content"] is None
    [choice] = json.loads(writer_of(ChatWriter).whole([Piece(0, "Hello.", "stop")]))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}


def test_stream_has_the_same_as_the_message():
    events = [document["choices"][0] for document in streamed(writer_of(ChatWriter, has_logprobs=True), CALLS)]
    deltas = [event["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, Ulm."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm, Ulm."
    assert "".join(delta.get("content", "") for delta in deltas) == "So."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [(call["index"], call["function"]["arguments"]) for call in calls] == [
        (0, '{"city": '),
        (0, '"Ulm"}'),
        (1, "{}"),
    ]
    assert ["id" in call for call in calls] == [True, False, True]
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["tool_calls"]
    told = [entry["token"] for event in events if event["logprobs"] for entry in event["logprobs"]["content"]]
    assert told == ["Hm, "]
