"""The requests of OpenAI's API: what is read from them, and how invalid ones are rejected."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.errors import BadRequest, InvalidField
from flambeau.frontend.openai import chat, completions
from flambeau.frontend.openai.embeddings import to_handler_request
from flambeau.frontend.openai.requests import (
    FIELDS,
    NOT_OFFERED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    read_request,
    request_schema,
)
from flambeau.frontend.openai.responses import encoded
from flambeau.llm.sampling_params import SAMPLING_FIELDS
from flambeau.wire.generation import decode_request, given_options

HELLO = [{"role": "user", "content": "Hello"}]


def chat_of(**fields):
    body = json.dumps({"model": "m", "messages": HELLO, **fields}).encode()
    return chat.generation_of(read_request(body, ChatRequest))


def completion_of(**fields):
    body = json.dumps({"model": "m", "prompt": "Once", **fields}).encode()
    return completions.generation_of(read_request(body, CompletionRequest))


def refusal(ask, **fields):
    with pytest.raises(InvalidField) as found:
        ask(**fields)
    return found.value.field, str(found.value)


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


def test_zero_logprobs_of_a_completion_are_those_of_the_tokens_themselves():
    assert given_options(completion_of(logprobs=0).sampling)["logprobs"] == 0
    assert "logprobs" not in given_options(completion_of(logprobs=None).sampling)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt, prompts):
    assert completion_of(prompt=prompt).prompts == prompts


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


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [[]]}, "prompt", "must not be empty"),
        ({"prompt": ["a", 1]}, "prompt", "mix texts and token ids"),
        ({"prompt": [-1]}, "prompt[0]", ">= 0"),
        ({"prompt": None}, "prompt", "text or a list"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt", "send fewer"),
        ({"suffix": "b"}, "suffix", "not supported"),
        ({"best_of": 3, "n": 2}, "best_of", "may only be n (2)"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"logprobs": True}, "logprobs", "a whole number"),
        ({"echo": True, "logprobs": 1}, "echo", "not supported"),
        ({"messages": HELLO}, "messages", "unknown field"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields, field, told):
    found, message = refusal(completion_of, **fields)
    assert found == field
    assert told in message


def test_a_missing_field_is_named():
    with pytest.raises(InvalidField, match="messages is required") as found:
        read_request(b'{"model": "m"}', ChatRequest)
    assert found.value.field == "messages"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "not valid JSON"),
        (b'{"model": "m"', "not valid JSON"),
        (b"[1]", "the body is no request: expected object, got a list"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body, told):
    with pytest.raises(BadRequest, match=told):
        read_request(body, CompletionRequest)


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


def test_embeddings_are_made_of_texts():
    def asked(**fields):
        return to_handler_request(read_request(json.dumps({"model": "m", **fields}).encode(), EmbeddingRequest))

    assert asked(input="a") == {"input": ["a"], "usage": True, "encoding_format": "float"}
    assert asked(input=["a", "b"], dimensions=4, encoding_format="base64")["dimensions"] == 4
    assert refusal(asked, input=[1, 2]) == (
        "input",
        "input[0] must be text; token ids are not supported, send the text itself",
    )
    assert refusal(asked, input=[[1]])[0] == refusal(asked, input=[])[0] == "input"
    assert refusal(asked, input="a", encoding_format="int8")[0] == "encoding_format"
    assert refusal(asked, input="a", dimensions=0)[0] == "dimensions"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "type", "a"]), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", [chat, completions])
@given(data=st.data())
def test_whatever_is_sent_is_a_request_or_a_bad_one(kind, data):
    request = ChatRequest if kind is chat else CompletionRequest
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(FIELDS[request])), VALUES, max_size=4))
    body = json.dumps({"messages": HELLO, **fields} if kind is chat else {"prompt": "a", **fields}).encode()
    with contextlib.suppress(BadRequest):
        assert decode_request(encoded(kind.generation_of(read_request(body, request))))


def test_requests_that_would_keep_the_server_from_others_are_refused():
    assert refusal(chat_of, messages=HELLO * 10_001)[0] == "messages"
    assert len(chat_of(messages=HELLO * 10_000).messages) == 10_000
    assert refusal(completion_of, prompt=[1] * 1_000_001)[0] == "prompt"


def test_numbers_too_large_for_the_wire_are_refused():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]
    with pytest.raises(BadRequest, match="64 bits"):
        encoded(chat_of(tools=tools))


def test_an_unknown_field_with_a_long_name_is_rejected_quickly():
    body = json.dumps({"messages": HELLO, "x" * 6_000_000: 1}).encode()
    began = time.process_time()
    with pytest.raises(InvalidField, match=r"unknown field x+; leave it out") as found:
        read_request(body, ChatRequest)
    assert time.process_time() - began < 0.5
    assert len(found.value.field) == 100


def test_every_sampling_parameter_of_the_engine_is_a_field_or_left_out_on_purpose():
    offered = {field.parameter for field in FIELDS[ChatRequest].values()} - {""}
    assert offered | NOT_OFFERED == SAMPLING_FIELDS.keys()


def test_the_api_description_lists_the_fields_with_their_limits():
    schema = request_schema(ChatRequest)
    assert schema["required"] == ["model", "messages"]
    temperature = schema["properties"]["temperature"]
    assert (temperature["type"], temperature["minimum"], temperature["maximum"]) == ("number", 0, 2)
    assert "greedy" in temperature["description"]
    assert "functions" not in schema["properties"]
