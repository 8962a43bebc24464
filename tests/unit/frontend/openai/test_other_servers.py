"""Fields of other servers: which are taken, in what form their replies are, and what those that are refused suggest."""

from __future__ import annotations

import json
import re

import pytest

from flambeau.frontend.openai.chat import ChatWriter
from flambeau.frontend.openai.completions import CompletionWriter
from flambeau.frontend.openai.other_servers import OTHER_FIELDS
from flambeau.frontend.openai.requests import FIELDS, ChatRequest, CompletionRequest, read_request, request_schema
from flambeau.frontend.openai.responses import ResponseHead
from flambeau.wire.generation import Piece, Token, given_options
from support.openai_requests import chat_of, completion_of, refusal

WRITERS = {ChatWriter: "chat", CompletionWriter: "completion"}


@pytest.mark.parametrize("ask", [chat_of, completion_of])
def test_sampling_fields_of_other_servers_are_taken(ask):
    sampling = {
        "bad_words": ["a", "b c"],
        "allowed_token_ids": [1, 2],
        "no_repeat_ngram_size": 3,
        "typical_p": 0.5,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 2,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 100,
        "dry_sequence_breakers": ["#"],
        "skip_special_tokens": False,
        "prompt_logprobs": 4,
    }
    found = given_options(ask(**sampling).sampling)
    assert {name: found[name] for name in sampling} == sampling


@pytest.mark.parametrize("ask", [chat_of, completion_of])
def test_fields_about_prompts_are_taken(ask):
    plain = ask()
    assert (plain.truncate, plain.add_special, plain.cache_salt, plain.returns_ids) == (None, True, "", False)
    found = ask(truncate_prompt_tokens=-1, add_special_tokens=False, cache_salt="mine", return_token_ids=True)
    assert (found.truncate, found.add_special, found.cache_salt, found.returns_ids) == (-1, False, "mine", True)


def test_fields_of_templates_are_taken():
    documents = [{"title": "a", "text": "b"}]
    found = chat_of(add_generation_prompt=False, continue_final_message=True, documents=documents)
    assert found.template_options == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "documents": documents,
    }
    assert chat_of(chat_template_kwargs={"a": 1}, documents=documents).template_options == {
        "a": 1,
        "documents": documents,
    }


def test_the_limit_of_reasoning_has_two_names():
    assert chat_of(thinking_token_budget=7).max_reasoning_tokens == 7
    assert chat_of(thinking_token_budget=0, max_reasoning_tokens=0).max_reasoning_tokens == 0
    assert refusal(chat_of, thinking_token_budget=7, max_reasoning_tokens=8)[0] == "thinking_token_budget"
    names = {"max_reasoning_tokens": "thinking_token_budget"}
    for fields, expected in (({"thinking_token_budget": 7}, names), ({"max_reasoning_tokens": 7}, {})):
        body = json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
        assert read_request(body, ChatRequest).names == expected


@pytest.mark.parametrize(
    ("ask", "fields", "told"),
    [
        (chat_of, {"add_special_tokens": True}, "the template writes them"),
        (chat_of, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (chat_of, {"echo": True}, "put the text before the answer yourself"),
        (chat_of, {"cache_salt": ""}, "length >= 1"),
        (completion_of, {"truncate_prompt_tokens": 0}, "from 1, or -1"),
        (completion_of, {"truncate_prompt_tokens": 5, "suffix": "a"}, "not supported with a suffix"),
        (completion_of, {"truncate_prompt_tokens": -2}, ">= -1"),
        (completion_of, {"prompt_logprobs": 1, "stream": True}, "leave stream out"),
        (completion_of, {"prompt_logprobs": 21}, "<= 20"),
        (completion_of, {"allowed_token_ids": []}, "at least one token id"),
        (completion_of, {"allowed_token_ids": [-1]}, ">= 0"),
        (completion_of, {"bad_words": ["a", ""]}, "length >= 1"),
        (completion_of, {"spaces_between_special_tokens": True, "skip_special_tokens": False}, "must be false"),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_name(ask, fields, told):
    name, message = refusal(ask, **fields)
    assert name.partition("[")[0] in fields
    assert re.search(told, message)


def test_a_truncated_prompt_has_no_files():
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    name, _ = refusal(chat_of, truncate_prompt_tokens=5, messages=[{"role": "user", "content": content}])
    assert name == "truncate_prompt_tokens"


@pytest.mark.parametrize("name", OTHER_FIELDS)
@pytest.mark.parametrize("ask", [chat_of, completion_of])
def test_other_fields_are_refused_with_a_remedy_unless_they_change_nothing(ask, name):
    plain = ask()
    field, message = refusal(ask, **{name: "something"})
    assert field == name
    assert message == f"{name} is not supported; {OTHER_FIELDS[name].remedy}"
    for value in (None, *OTHER_FIELDS[name].neutral):
        assert ask(**{name: value}) == plain


def test_remedies_name_fields_that_there_are():
    known = FIELDS[ChatRequest].keys() | FIELDS[CompletionRequest].keys()
    fields = known - OTHER_FIELDS.keys() | {"model"}
    for other in OTHER_FIELDS.values():
        for word in re.findall(r"\b[a-z]+_[a-z_]+\b", other.remedy):
            assert word in fields or word == "enable_thinking", word


def test_names_that_are_refused_are_neither_suggested_nor_listed():
    _, message = refusal(chat_of, n_predictt=3)
    assert "n_predict;" not in message
    assert "did you mean n_predict" not in message
    listed = request_schema(ChatRequest)["properties"].keys()
    assert not listed & OTHER_FIELDS.keys()
    assert {"bad_words", "cache_salt", "documents", "prompt_logprobs", "return_token_ids"} <= listed


# ---- replies ----


def writer_of(kind, **options):
    return kind(ResponseHead("x-1", 5, "m", "fp"), 2, has_logprobs=True, has_usage=False, **options)


def token(number, logprob, *top, rank=0):
    others = [(i, chr(96 + i), each, b"") for i, each in top]
    return Token(number, chr(96 + number), logprob, b"", others, rank)


def events_of(writer, pieces):
    events = b"".join(map(writer.events, pieces)).decode().split("\n\n")[:-1]
    return [json.loads(event.removeprefix("data: ")) for event in events]


SCORED = [token(1, None), token(2, -3.0, (3, -0.5), (1, -0.7), rank=7), token(3, -0.1, (3, -0.1), rank=1)]


@pytest.mark.parametrize("kind", WRITERS)
def test_prompts_are_scored_in_the_form_of_vllm(kind):
    pieces = [Piece(0, "a", "stop", prompt_tokens=SCORED), Piece(1, "b", "stop", prompt_tokens=SCORED)]
    document = json.loads(writer_of(kind).whole(pieces))
    expected = [
        None,
        {
            "2": {"logprob": -3.0, "rank": 7, "decoded_token": "b"},
            "3": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "1": {"logprob": -0.7, "rank": 2, "decoded_token": "a"},
        },
        {"3": {"logprob": -0.1, "rank": 1, "decoded_token": "c"}},
    ]
    places = [document] if kind is ChatWriter else document["choices"]
    assert [place["prompt_logprobs"] for place in places] == [expected] * len(places)


def test_ids_of_a_chat_and_of_its_stream():
    pieces = [Piece(0, "a", None, token_ids=[5, 6], prompt_ids=[1, 2]), Piece(0, "", "stop", token_ids=[7])]
    whole = json.loads(writer_of(ChatWriter).whole(pieces))
    assert whole["prompt_token_ids"] == [1, 2]
    assert whole["choices"][0]["token_ids"] == [5, 6, 7]
    chunks = events_of(writer_of(ChatWriter), pieces)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2], None, None, None]
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [5, 6], [7], None]
    assert events_of(writer_of(ChatWriter), [Piece(0, "a", "stop")])[0].keys() == chunks[1].keys()


def test_ids_of_a_completion_and_of_its_stream():
    pieces = [Piece(1, "", None, token_ids=[5], prompt_ids=[1, 2]), Piece(1, "a", "stop", token_ids=[7])]
    [choice] = json.loads(writer_of(CompletionWriter).whole(pieces))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], [5, 7])
    choices = [chunk["choices"][0] for chunk in events_of(writer_of(CompletionWriter), pieces)]
    assert [choice.get("token_ids") for choice in choices] == [[5], [7]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 2], None]


@pytest.mark.parametrize("kind", WRITERS)
def test_tokens_are_named_by_their_ids_if_that_is_asked_for(kind):
    piece = Piece(0, "a", "stop", [token(1, -0.5, (1, -0.5), (2, -1.0))])
    writer = writer_of(kind, shows_ids=True)
    whole, *chunks = json.loads(writer.whole([piece])), *events_of(writer, [piece])
    for document in (whole, next(chunk for chunk in chunks if chunk["choices"][0]["logprobs"])):
        logprobs = document["choices"][0]["logprobs"]
        if kind is ChatWriter:
            [entry] = logprobs["content"]
            assert [entry["token"], *(each["token"] for each in entry["top_logprobs"])] == [
                "token_id:1",
                "token_id:1",
                "token_id:2",
            ]
            assert entry["bytes"] == [97]
        else:
            assert logprobs["tokens"] == ["token_id:1"]
            assert logprobs["top_logprobs"] == [{"token_id:1": -0.5, "token_id:2": -1.0}]
