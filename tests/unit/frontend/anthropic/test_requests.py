"""Anthropic's requests → chats."""

from __future__ import annotations

import json

import pytest

from flambeau.errors import InvalidField
from flambeau.frontend.anthropic.messages import checked_generation
from flambeau.frontend.anthropic.requests import CountTokensRequest, MessagesRequest, to_chat
from flambeau.frontend.openai.requests import read_request
from flambeau.wire.generation import MediaInput, given_options

HELLO = [{"role": "user", "content": "Hello"}]
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}


def asked(**fields):
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, **fields}
    return checked_generation(to_chat(read_request(json.dumps(body).encode(), MessagesRequest)))


def refusal(**fields):
    with pytest.raises(InvalidField) as found:
        asked(**fields)
    return found.value.field


def test_every_setting_reaches_the_model():
    found = asked(
        system="Speak.",
        stop_sequences=["END"],
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        metadata={"user_id": "me"},
    )
    assert given_options(found.sampling) == {
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
    }
    assert found.stream
    assert found.messages == [{"role": "system", "content": "Speak."}, *HELLO]
    assert (found.template_options, found.reasoning_effort) == ({"enable_thinking": False}, "low")


def test_system_and_contents_may_be_blocks():
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    found = asked(system=blocks, messages=[{"role": "user", "content": blocks}])
    assert found.messages == [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "a\nb"}]


def test_images_become_data_urls_with_the_names_of_the_client():
    remote = {"type": "url", "url": "https://images.example/a.png"}
    blocks = [{"type": "image", "source": PNG}, {"type": "text", "text": "a"}, {"type": "image", "source": remote}]
    found = asked(system="Look.", messages=[{"role": "user", "content": blocks}])
    assert found.messages is not None
    image, text = {"type": "image"}, {"type": "text", "text": "a"}
    assert found.messages[1] == {"role": "user", "content": [image, text, image]}
    assert found.files == [
        MediaInput("messages[0].content[0]", "data:image/png;base64,AAAA"),
        MediaInput("messages[0].content[2]", "https://images.example/a.png"),
    ]


def test_conversation_with_thoughts_calls_and_results():
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Łódź"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "none", "is_error": True}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Wait."}, call]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "So?"}]},
    ]
    found = asked(messages=messages, tools=[TOOL])
    assert found.messages == [
        *HELLO,
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Łódź"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: none"},
        {"role": "user", "content": "So?"},
    ]
    function = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
    assert found.tools == [{"type": "function", "function": function}]


def test_last_message_of_the_assistant_is_continued():
    found = asked(messages=[*HELLO, {"role": "assistant", "content": "I am"}])
    assert found.template_options == {"continue_final_message": True}
    assert asked().template_options == {}


def test_answer_by_a_schema():
    schema = {"type": "object", "properties": {}}
    found = asked(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(given_options(found.sampling)["structured_outputs"]["json"]) == schema


def test_tool_choice_none_shows_no_tools():
    assert asked(tools=[TOOL], tool_choice={"type": "none"}).tools is None
    assert asked(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tools


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {**PNG, "media_type": "a/b"}}]}]},
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "ftp:x"}}]}]},
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"max_token": 1}, "max_token"),
    ],
)
def test_invalid_field_is_named_as_the_client_names_it(fields, name):
    assert refusal(**fields) == name


def test_counting_needs_no_limit():
    request = read_request(json.dumps({"messages": HELLO}).encode(), CountTokensRequest)
    assert checked_generation(to_chat(request)).messages == HELLO
    with pytest.raises(InvalidField, match="max_tokens is required"):
        read_request(json.dumps({"messages": HELLO}).encode(), MessagesRequest)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"output_config": {"formatt": {}}}, "output_config.formatt"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "output_config.format.x"),
        ({"thinking": {"type": "enabled", "budget_token": 5}}, "thinking.budget_token"),
        ({"tools": [{"name": "f", "input_schema": {}, "strct": True}]}, "tools[0].strct"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any", "disable_parallel": True}},
            "tool_choice.disable_parallel",
        ),
    ],
)
def test_fields_within_fields_are_not_ignored(fields, place):
    with pytest.raises(InvalidField, match="unknown field") as error:
        asked(**fields)
    assert error.value.field == place
