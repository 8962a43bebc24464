"""What a client may ask of a language model, and in which forms."""

from __future__ import annotations

import pytest

from flambeau.errors import BadRequest
from flambeau.handlers.generation.generate_request import read_generate_request
from flambeau.llm.sampling_params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5, top_k=3)


def ask(row, **options):
    return read_generate_request(row, DEFAULTS, **options)


@pytest.mark.parametrize(
    "row",
    [
        {"body": {"data": "Once", "max_new_tokens": 5}},
        {"body": {"prompt": "Once", "max_tokens": 5}},
        {"body": {"body": "Once", "max_new_tokens": 5.0}},
        {"body": bytearray(b'{"prompt": "Once", "max_new_tokens": 5}')},  # curl -T request.json
        {"data": bytearray(b'{"prompt": "Once", "max_new_tokens": 5}')},
        {"data": bytearray(b"Once"), "max_new_tokens": bytearray(b"5")},  # a form
        {"prompt": "Once", "max_new_tokens": 5},
    ],
)
def test_prompt_and_settings_are_found_in_every_form(row):
    found = ask(row)
    assert (found.prompt, found.params.max_tokens) == ("Once", 5)
    assert (found.params.temperature, found.params.top_k) == (0.5, 3)


@pytest.mark.parametrize("row", [{"body": "Once"}, {"body": bytearray(b"Once")}, "Once", {"data": bytearray(b"Once")}])
def test_plain_text_is_a_prompt(row):
    assert ask(row).prompt == "Once"


def test_text_that_only_begins_like_json_is_a_prompt_unless_it_says_it_is_json():
    row = {"body": bytearray(b"{ to be")}
    assert ask(row).prompt == "{ to be"
    with pytest.raises(BadRequest, match="the body is not valid JSON"):
        ask(row, content_type="application/json")


@pytest.mark.parametrize(
    ("fields", "both"),
    [
        ({"data": "Once", "prompt": "Twice"}, "data and prompt"),
        ({"data": bytearray(b"Once"), "prompt": bytearray(b"Twice")}, "data and prompt"),
        ({"prompt": "Once", "body": [1, 2]}, "prompt and body"),
        ({"prompt": "Once", "messages": [{"role": "user", "content": "Once"}]}, "prompt and messages"),
    ],
)
def test_two_prompts_that_differ_are_refused_by_their_names(fields, both):
    with pytest.raises(BadRequest, match=f"^{both} are both a prompt, and they differ; send one of them"):
        ask({"body": fields} if "body" not in fields else fields)


def test_the_same_prompt_twice_is_one():
    assert ask({"body": {"data": "Once", "prompt": "Once", "messages": None}}).prompt == "Once"


@pytest.mark.parametrize("fields", [{"data": "Once", "prompt": ""}, {"data": "", "prompt": "Once"}])
def test_an_empty_prompt_beside_another_is_none(fields):
    assert ask({"body": fields}).prompt == "Once"


def test_every_sampling_parameter_is_read():
    found = ask(
        {
            "body": {
                "prompt": [5, 6],
                "temperature": 0,
                "top_k": 0,
                "top_p": 0.9,
                "min_p": 0.1,
                "seed": 4,
                "stop": "END",
                "stop_token_ids": [2],
                "n": 2,
                "repetition_penalty": 1.1,
                "presence_penalty": 0.5,
                "frequency_penalty": -0.5,
                "logit_bias": {"5": -100},
                "logprobs": 2,
                "min_new_tokens": 1,
                "ignore_eos": True,
                "include_stop": True,
                "speculate": False,
                "unheard_of": "ignored",
            }
        }
    )
    expected = SamplingParams(
        max_tokens=7,
        temperature=0,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        seed=4,
        stop=("END",),
        stop_token_ids=(2,),
        n=2,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={5: -100},
        logprobs=2,
        min_tokens=1,
        ignore_eos=True,
        include_stop=True,
        speculate=False,
    )
    assert (found.prompt, found.params) == ([5, 6], expected)


def test_form_of_the_reply_follows_request_header_and_settings():
    assert not ask({"prompt": "x"}).stream
    assert ask({"prompt": "x"}, streams=True).stream
    assert not ask({"prompt": "x", "stream": False}, streams=True, accept="text/event-stream").stream
    events = ask({"prompt": "x"}, accept="application/json, text/event-stream")
    assert (events.stream, events.has_events) == (True, True)
    assert ask({"prompt": "x", "stream": bytearray(b"true")}).stream
    assert (ask({"prompt": "x"}).full_text, ask({"prompt": "x", "return_full_text": False}).full_text) == (None, False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "the request has no prompt"),
        ({"data": ""}, "data is empty"),
        ({"data": None, "temperature": 1}, "the request has no prompt"),
        ({"data": 5}, "data must be text or a list of token ids, not 5"),
        ({"data": ["a"]}, "data must be text or a list of token ids, not a list"),
        ({"data": []}, "data must be text or a list of token ids, not a list"),
        ({"prompt": "x", "max_new_tokens": 0}, r"^max_new_tokens must be a whole number from 1, not 0"),
        ({"prompt": "x", "max_tokens": -1}, r"^max_tokens must be a whole number from 1, not -1"),
        ({"prompt": "x", "max_new_tokens": "many"}, "max_new_tokens must be a whole number, not 'many'"),
        ({"prompt": "x", "max_new_tokens": True}, "max_new_tokens must be a whole number, not True"),
        ({"prompt": "x", "max_new_tokens": 1.5}, "max_new_tokens must be a whole number, not 1.5"),
        ({"prompt": "x", "temperature": 1e9}, "temperature must be a number from 0 to 100"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature must be a number from 0 to 100"),
        ({"prompt": "x", "temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"prompt": "x", "top_k": -2}, "top_k must be a whole number from 0"),
        ({"prompt": "x", "top_p": 0}, "top_p must be a number above 0, up to 1"),
        ({"prompt": "x", "n": 1000}, "n must be a whole number from 1 to 128"),
        ({"prompt": "x", "seed": 2**70}, "seed must be a 64-bit number"),
        ({"prompt": "x", "stop": 5}, "stop must be a list, not 5"),
        ({"prompt": "x", "stop": [""]}, "stop must be texts that are not empty"),
        ({"prompt": "x", "logit_bias": [1]}, "logit_bias must be an object"),
        ({"prompt": "x", "logit_bias": {"the": 1}}, "logit_bias must be an object"),
        ({"prompt": "x", "stream": "yes"}, "stream must be true or false, not 'yes'"),
        ({"prompt": "x", "ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"prompt": "x", "temprature": 1}, "'temprature' is not a field of this request; did you mean 'temperature'?"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["hi"]}, "messages must be a list"),
        (bytearray(b"\xff\xfe"), "the prompt is not UTF-8: invalid start byte at byte 0"),
        (None, "the request has no prompt"),
        ([1.5], "data must be text or a list of token ids"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_field_and_limit(body, reason):
    with pytest.raises(BadRequest, match=reason):
        ask({"body": body})


def test_a_hint_on_forms_is_given_only_to_those_who_sent_one():
    with pytest.raises(BadRequest, match="add -H 'content-type: application/json'"):
        ask({"ROMEO:": bytearray(b"")}, content_type="application/x-www-form-urlencoded")
    with pytest.raises(BadRequest, match=r"it has 'temperature'$"):
        ask({"body": {"temperature": 1}}, content_type="application/json")
    with pytest.raises(BadRequest, match=r"it has nothing$"):
        ask({"body": None}, content_type="application/json")


def test_log_probabilities_are_told_without_asking_for_details_too():
    assert ask({"prompt": "x", "logprobs": 0}).details
    assert not ask({"prompt": "x", "logprobs": None}).details


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", [{"type": "function"}]), ("tool_choice", "auto")],
)
def test_fields_of_chats_that_have_no_effect_are_refused_by_name(name, value):
    with pytest.raises(BadRequest, match=f"{name} has no effect on predictions"):
        ask({"prompt": "Once", name: value})


def test_fields_of_chats_that_ask_for_nothing_are_taken():
    assert ask({"prompt": "Once", "response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}).prompt
