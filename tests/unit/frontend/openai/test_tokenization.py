"""Requests to tokenize, and their documents."""

from __future__ import annotations

import json

import pytest

from flambeau.errors import InvalidField
from flambeau.frontend.openai.requests import DetokenizeRequest, TokenizeRequest, read_request
from flambeau.frontend.openai.tokenization import text_document, token_document, tokenize_of
from flambeau.wire.tokenization import (
    Detokenize,
    Detokenized,
    Tokenize,
    Tokenized,
    decode_tokenize,
    encode_reply,
    encode_tokenize,
)

HELLO = [{"role": "user", "content": "Hello"}]


def asked(**fields):
    return tokenize_of(read_request(json.dumps(fields).encode(), TokenizeRequest))


def test_prompt_begins_with_special_tokens_unless_told_otherwise():
    assert asked(model="m", prompt="a") == Tokenize(prompt="a")
    assert asked(prompt="", add_special_tokens=False) == Tokenize(prompt="", add_special=False)
    assert asked(prompt="a", return_token_strs=True).has_texts


def test_chat_has_tools_and_variables_of_its_template():
    tool = {"type": "function", "function": {"name": "f"}}
    found = asked(
        messages=HELLO,
        tools=[tool],
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert found.messages == HELLO
    assert found.tools == [tool]
    assert found.template_options == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "enable_thinking": False,
    }


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "messages[0].role"),
        ({"prompt": "a", "promt": "b"}, "promt"),
    ],
)
def test_invalid_field_is_named(fields, name):
    with pytest.raises(InvalidField) as found:
        asked(**fields)
    assert found.value.field == name


def test_tokens_must_be_ids():
    assert read_request(b'{"tokens": [1, 2]}', DetokenizeRequest).tokens == [1, 2]
    with pytest.raises(InvalidField, match=r"tokens\[1\]"):
        read_request(b'{"tokens": [1, -2]}', DetokenizeRequest)


def test_requests_and_replies_survive_the_wire():
    for request in (Tokenize(messages=HELLO, has_texts=True), Detokenize(tokens=[1])):
        assert decode_tokenize(encode_tokenize(request)) == request
    with pytest.raises(ValueError, match="not a request to tokenize"):
        decode_tokenize(b"x")
    tokenized = encode_reply(Tokenized(tokens=[3, 4], texts=["a", "b"], max_length=9))
    assert token_document(tokenized) == {"count": 2, "max_model_len": 9, "tokens": [3, 4], "token_strs": ["a", "b"]}
    assert text_document(encode_reply(Detokenized(text="ab"))) == {"prompt": "ab"}
