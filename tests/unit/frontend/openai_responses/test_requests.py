"""Requests of the Responses API → chats."""

from __future__ import annotations

import json

import pytest

from flambeau.errors import InvalidField
from flambeau.frontend.openai.chat import generation_of
from flambeau.frontend.openai.requests import read_request
from flambeau.frontend.openai_responses.requests import ResponsesRequest, items_of, messages_of, to_chat
from flambeau.wire.generation import MediaInput, given_options

TOOL = {"type": "function", "name": "weather", "description": "…", "parameters": {"type": "object"}, "strict": True}


PNG = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


def asked(**fields):
    request = read_request(json.dumps({"model": "m", "input": "Hello", **fields}).encode(), ResponsesRequest)
    return generation_of(to_chat(request, messages_of(items_of(request))))


def test_every_setting_reaches_the_model():
    found = asked(
        instructions="Speak.",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "verbosity": "low"},
        tools=[TOOL],
        tool_choice="auto",
        parallel_tool_calls=True,
        store=False,
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
    )
    sampling = given_options(found.sampling)
    assert json.loads(sampling.pop("structured_outputs")["json"]) == {"type": "object"}
    assert sampling == {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    assert found.messages == [{"role": "system", "content": "Speak."}, {"role": "user", "content": "Hello"}]
    assert found.tools == [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    assert (found.template_options, found.reasoning_effort) == ({}, "low")
    assert found.stream


def test_images_have_the_names_of_the_client():
    text = {"type": "input_text", "text": "a"}
    found = asked(
        instructions="Look.", input=[{"role": "user", "content": "b"}, {"role": "user", "content": [text, PNG]}]
    )
    assert found.messages is not None
    assert found.messages[-1] == {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    assert found.files == [MediaInput("input[1].content[1]", "data:image/png;base64,AAAA")]


def test_items_of_one_turn_are_one_message():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert asked(input=items).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", **call}, {"id": "c2", **call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
    ]


def test_call_without_a_text_is_a_turn():
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    assert asked(input=items).messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{**PNG, "detail": "best"}]}]},
            "input[0].content[0].detail",
        ),
        ({"input": [{"role": "user", "content": [PNG, {"type": "input_file"}]}]}, "input[0].content[1]"),
        ({"input": [{"role": "assistant", "content": [PNG]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "a"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"max_tokens": 1}, "max_tokens"),
    ],
)
def test_invalid_field_is_named_as_the_client_names_it(fields, name):
    with pytest.raises(InvalidField) as found:
        asked(**fields)
    assert found.value.field == name


@pytest.mark.parametrize(
    ("fields", "place", "told"),
    [
        ({"text": {"formatt": {"type": "json_object"}}}, "text.formatt", "did you mean format?"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "leave it out"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strct": True}}}, "text.format.strct", "strict?"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort", "did you mean effort?"),
        ({"tools": [{**TOOL, "paramaters": {}}]}, "tools[0].paramaters", "did you mean parameters?"),
    ],
)
def test_fields_within_fields_are_not_ignored(fields, place, told):
    with pytest.raises(InvalidField, match="unknown field") as error:
        asked(**fields)
    assert error.value.field == place
    assert told in str(error.value)
