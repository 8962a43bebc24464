"""Requests of OpenAI's API, as the server reads them."""

from __future__ import annotations

import json

import pytest

from flambeau.errors import InvalidField
from flambeau.frontend.openai import chat, completions
from flambeau.frontend.openai.requests import ChatRequest, CompletionRequest, read_request

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
