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
from flambeau.frontend.openai.requests import (
    FIELDS,
    ChatRequest,
    CompletionRequest,
    read_request,
    request_schema,
)
from flambeau.frontend.openai.responses import encoded
from flambeau.frontend.openai.sampling_fields import NOT_OFFERED
from flambeau.llm.sampling_params import SAMPLING_FIELDS
from flambeau.wire.generation import decode_request
from support.openai_requests import HELLO, chat_of, completion_of, refusal


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


def test_an_unknown_field_with_a_long_name_is_rejected_with_a_short_one():
    body = json.dumps({"messages": HELLO, "x" * 6_000_000: 1}).encode()
    with pytest.raises(InvalidField, match=r"unknown field x+; leave it out") as found:
        read_request(body, ChatRequest)
    assert len(found.value.field) == 100


@pytest.mark.perf
def test_an_unknown_field_with_a_long_name_is_rejected_quickly():
    body = json.dumps({"messages": HELLO, "x" * 6_000_000: 1}).encode()
    began = time.process_time()
    with pytest.raises(InvalidField):
        read_request(body, ChatRequest)
    assert time.process_time() - began < 0.5


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
