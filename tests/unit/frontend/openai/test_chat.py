"""Chats → generation requests."""

from __future__ import annotations

import pytest

from flambeau.wire.generation import given_options
from support.openai_requests import HELLO, chat_of, completion_of, refusal


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
    assert asked.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
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


def test_tools_are_shown_to_the_model_unless_it_is_to_use_none():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat_of(tools=tools).tools == tools
    assert chat_of(tools=tools, tool_choice="auto").tools == tools
    assert chat_of(tools=tools, tool_choice="none").tools is None
    assert chat_of(tools=[]).tools is None


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"max_token": 1}, "max_token", "did you mean max_tokens"),
        ({"guided_json": {}}, "guided_json", "unknown field guided_json; leave it out"),
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
        ({"response_format": {"type": "json_object"}}, "response_format", "not 'json_object'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "check the answer"),
        ({"tool_choice": "required"}, "tool_choice", "auto or none"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "auto or none"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "a function with a name"),
        ({"tools": [{"type": "function", "function": {"name": [1]}}]}, "tools[0]", "a function with a name"),
        ({"tool_choice": "required"}, "tool_choice", "no model can be made to call a tool"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "may be auto or none"),
        ({"functions": []}, "functions", "tools instead"),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "audio"),
        ({"messages": []}, "messages", "1 to 10000 messages, not 0"),
        ({"messages": "hello"}, "messages", "expected a list, got text"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "not nothing"),
        ({"messages": [*HELLO, {"role": "robot", "content": "a"}]}, "messages[1].role", "not 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "text only",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls", "a list of calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "that has a name"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields, field, told):
    found, message = refusal(chat_of, **fields)
    assert found == field
    assert told in message
