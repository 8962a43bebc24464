"""Completions → generation requests."""

from __future__ import annotations

import pytest

from flambeau.wire.generation import given_options
from support.openai_requests import HELLO, completion_of, refusal


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
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [[]]}, "prompt", "must not be empty"),
        ({"prompt": ["a", 1]}, "prompt", "mix texts and token ids"),
        ({"prompt": [-1]}, "prompt[0]", ">= 0"),
        ({"prompt": None}, "prompt", "text or a list"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt", "send fewer"),
        ({"suffix": "b", "echo": True}, "echo", "not supported with a suffix"),
        ({"best_of": 3, "n": 2}, "best_of", "may only be n (2)"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"logprobs": True}, "logprobs", "a whole number"),
        ({"messages": HELLO}, "messages", "/v1/chat/completions takes it; send a prompt here"),
        ({"input": "a"}, "input", "/v1/embeddings takes it"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens", "at most max_tokens (5)"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields, field, told):
    found, message = refusal(completion_of, **fields)
    assert found == field
    assert told in message


def test_suffix_goes_to_the_model():
    assert completion_of(suffix=" end").suffix == " end"
    assert completion_of().suffix == ""


def test_both_names_of_the_limit_count():
    assert given_options(completion_of(max_completion_tokens=5).sampling)["max_tokens"] == 5
    assert given_options(completion_of(max_completion_tokens=5, max_tokens=5).sampling)["max_tokens"] == 5
    assert given_options(completion_of(max_tokens=7).sampling)["max_tokens"] == 7


def test_fields_without_effect_are_accepted_whatever_they_hold():
    ignored = {"prediction": {"type": "content"}, "parallel_tool_calls": "yes", "verbosity": "low", "store": True}
    assert given_options(completion_of(**ignored).sampling) == {"max_tokens": 16}
