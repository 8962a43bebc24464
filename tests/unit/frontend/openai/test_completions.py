"""Completions → generation requests."""

from __future__ import annotations

import json
import math

import pytest

from flambeau.frontend.openai.completions import CompletionWriter
from flambeau.frontend.openai.responses import ResponseHead
from flambeau.wire.generation import Piece, Token, given_options
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
        ({"best_of": 1, "n": 2}, "best_of", "must be at least n (2)"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of", "leave stream out"),
        ({"best_of": 129}, "best_of", "<= 128"),
        ({"best_of": 128, "prompt": ["a"] * 9}, "prompt", "more than 1024"),
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


# ---- the best of several choices ----


def test_more_choices_are_generated_than_returned():
    plain, best = completion_of(n=2), completion_of(n=2, best_of=5)
    assert given_options(best.sampling) == {**given_options(plain.sampling), "n": 5, "logprobs": 0}
    assert completion_of(n=2, best_of=2) == plain
    assert given_options(completion_of(best_of=3, logprobs=2).sampling)["logprobs"] == 2


def choice_piece(index, *logprobs):
    tokens = [Token(1, "a", logprob, b"a") for logprob in (None, -90.0, *logprobs)]  # behind those of an echoed prompt
    return Piece(index, f"choice {index}", "stop", tokens, 7, len(logprobs))


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_the_likeliest_choices_of_each_prompt_are_returned(has_logprobs):
    pieces = [
        choice_piece(0, -3.0),
        choice_piece(1, -1.0, -1.0, -1.0, -1.0),  # the mean counts, not the sum
        choice_piece(2, -2.0),
        choice_piece(3, -0.5),
        choice_piece(4),
        choice_piece(5, -math.inf, -0.1),
    ]
    head = ResponseHead("x", 1, "m", "f")
    writer = CompletionWriter(head, 3, num_kept=2, has_logprobs=has_logprobs, has_usage=False)
    found = json.loads(writer.whole(pieces))
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [
        (0, "choice 1"),
        (1, "choice 2"),
        (2, "choice 3"),
        (3, "choice 5"),
    ]
    assert (found["choices"][0]["logprobs"] is not None) == has_logprobs
    assert found["usage"]["completion_tokens"] == 9
    assert found["usage"]["prompt_tokens"] == 14
