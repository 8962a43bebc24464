"""OpenAI's own client talks to a model that really generates."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("sentencepiece")
pytest.importorskip("safetensors")

from support.language_models import CONTEXT, write_language_model  # noqa: E402
from support.network_server import serving_networks  # noqa: E402

MARKERS = "\u2581<PRE>,\u2581<SUF>,\u2581<MID>,\u2581<EOT>"  # of CodeLlama, which fills in
NUM_TOKENS = 12
PROMPT = "To be, or not to be"
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation")
    model = write_language_model(folder / "model", user_defined_symbols=MARKERS)
    with (
        serving_networks(folder, {"tiny": model}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(prompt=prompt, **{**GREEDY, **options})


def streamed(client, **options):
    """The text of a stream's only choice, and its last chunk."""
    chunks = [*complete(client, stream=True, **options)]
    return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1]


def test_stream_says_what_the_whole_reply_does(client):
    whole = complete(client)
    text, last = streamed(client)
    assert text == whole.choices[0].text
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == NUM_TOKENS
    ids = client.completions.create(prompt=[3, 4, 5], **GREEDY)
    assert ids.usage.prompt_tokens == 3


def test_text_before_a_suffix(client):
    plain, found = complete(client, "To be,"), complete(client, "To be,", suffix=" to be")
    assert found.usage.prompt_tokens > plain.usage.prompt_tokens + len(MARKERS.split(",")) - 1
    text, last = streamed(client, prompt="To be,", suffix=" to be")
    assert text == found.choices[0].text != plain.choices[0].text
    assert last.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="token ids"):
        complete(client, [3, 4], suffix="a")
    with pytest.raises(openai.BadRequestError, match="echo"):
        complete(client, suffix="a", echo=True)


def test_chat_and_its_stream(client):
    messages = [{"role": "system", "content": "Speak."}, {"role": "user", "content": PROMPT}]
    found = client.chat.completions.create(messages=messages, **GREEDY)
    assert found.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(messages=messages, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == found.choices[0].message.content
    assert found.choices[0].message.content


def test_tokens_of_logprobs_make_up_the_text(client):
    [choice] = complete(client, logprobs=0).choices
    logprobs, text = choice.logprobs, choice.text
    assert "".join(logprobs.tokens) == text
    assert [text[:i] for i in logprobs.text_offset] == ["".join(logprobs.tokens[:k]) for k in range(NUM_TOKENS)]
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]
    tops = complete(client, logprobs=3).choices[0].logprobs
    assert tops.tokens == logprobs.tokens
    # Of tokens that are parts of a character, several have the same text.
    assert all(len(top) <= 3 for top in tops.top_logprobs)
    assert [max(top.values()) for top in tops.top_logprobs] == tops.token_logprobs


def test_logprobs_of_a_chat_without_alternatives_and_with(client):
    asked = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, **GREEDY}
    plain = client.chat.completions.create(**asked).choices[0]
    assert len(plain.logprobs.content) == NUM_TOKENS
    assert all(entry.top_logprobs == [] for entry in plain.logprobs.content)
    told = b"".join(bytes(entry.bytes) for entry in plain.logprobs.content)
    assert told.decode("utf-8", "replace") == plain.message.content
    found = client.chat.completions.create(top_logprobs=2, **asked).choices[0]
    assert [entry.top_logprobs[0].token for entry in found.logprobs.content] == [
        t.token for t in plain.logprobs.content
    ]


def test_stop_string_that_spans_tokens_ends_the_text_before_it(client):
    [choice] = complete(client, logprobs=0).choices
    tokens, text = choice.logprobs.tokens, choice.text
    pairs = [a[-1] + b[0] for a, b in pairwise(tokens[3:]) if a and b]
    stop = next(pair for pair in pairs if not any(pair in token for token in tokens))
    before = text[: text.index(stop)]
    assert complete(client, stop=[stop, "never"]).choices[0].text == before
    told, last = streamed(client, stop=stop)
    assert (told, last.choices[0].finish_reason) == (before, "stop")
    kept = complete(client, stop=stop, extra_body={"ignore_eos": True, "include_stop_str_in_output": True})
    assert kept.choices[0].text == before + stop


def test_choices_differ_and_a_seed_makes_them_again(client):
    options = {"n": 3, "temperature": 1, "seed": 7}
    first, again = (complete(client, **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len({*texts}) == 3
    assert [choice.text for choice in again.choices] == texts
    assert first.usage.completion_tokens == 3 * NUM_TOKENS
    found = ["", "", ""]
    for chunk in complete(client, stream=True, **options):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == texts


def test_several_prompts_are_each_completed(client):
    prompts = [PROMPT, "the sea of troubles"]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    found = complete(client, prompts, n=2)
    assert [choice.text for choice in found.choices] == [alone[0], alone[0], alone[1], alone[1]]


def test_echo_and_bias(client):
    assert complete(client, echo=True).choices[0].text == PROMPT + complete(client).choices[0].text
    found = complete(client, logit_bias={"40": 100}, logprobs=0).choices[0].logprobs.tokens
    assert len({*found}) == 1


def test_echo_with_logprobs_scores_the_prompt(client):
    whole = complete(client, echo=True, logprobs=1, n=2)
    alone = complete(client, logprobs=1)
    for choice in whole.choices:
        logprobs = choice.logprobs
        num_prompt = whole.usage.prompt_tokens
        assert len(logprobs.tokens) == num_prompt + NUM_TOKENS
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        assert logprobs.token_logprobs[num_prompt:] == pytest.approx(alone.choices[0].logprobs.token_logprobs, abs=1e-4)
        assert "".join(logprobs.tokens[1:num_prompt]).strip() == PROMPT  # behind the token that begins every prompt
    chunks = [*complete(client, echo=True, logprobs=1, stream=True)]
    values = [
        value for chunk in chunks if chunk.choices[0].logprobs for value in chunk.choices[0].logprobs.token_logprobs
    ]
    assert values[1:] == pytest.approx(whole.choices[0].logprobs.token_logprobs[1:], abs=1e-4)


def test_prompt_that_was_read_before_is_cached(client):
    prompt = "the slings and arrows " * 6
    complete(client, prompt)
    assert complete(client, prompt).usage.prompt_tokens_details.cached_tokens >= 16


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prompt_that_cannot_be_answered(client, is_streamed):
    with pytest.raises(openai.BadRequestError, match=f"the model's context {CONTEXT}") as found:
        complete(client, prompt=[5] * CONTEXT, stream=is_streamed)
    assert (found.value.code, found.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="is empty"):
        complete(client, prompt="", stream=is_streamed)
    with pytest.raises(openai.BadRequestError, match="token ids outside"):
        complete(client, prompt=[10**6], stream=is_streamed)


def test_tokens_of_a_prompt_and_a_chat_are_those_of_a_generation(client):
    base = str(client.base_url).removesuffix("/v1/")

    def post(path, **body):
        with client._client.stream("POST", f"{base}/{path}", json={"model": "tiny", **body}) as reply:
            return json.loads(reply.read())

    found = post("tokenize", prompt=PROMPT, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["count"] == complete(client).usage.prompt_tokens
    assert found["max_model_len"] == CONTEXT
    assert post("detokenize", tokens=found["tokens"]) == {"prompt": PROMPT}
    bare = post("tokenize", prompt=PROMPT, add_special_tokens=False)
    assert (bare["tokens"], bare["token_strs"]) == (found["tokens"][1:], None)
    messages = [{"role": "user", "content": PROMPT}]
    asked = client.chat.completions.create(messages=messages, **GREEDY)
    assert post("tokenize", messages=messages)["count"] == asked.usage.prompt_tokens
    assert "outside" in post("detokenize", tokens=[10**6])["error"]["message"]
    long = "to be " * 5000  # read beside the steps
    assert post("tokenize", prompt=long)["count"] > 5000
    with pytest.raises(openai.BadRequestError, match="context") as found:
        complete(client, long)
    assert found.value.code == "context_length_exceeded"


def test_message_names_the_stop_sequence_that_ended_it(client):
    base = str(client.base_url).removesuffix("/v1/")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS}

    def post(**body):
        with client._client.stream("POST", f"{base}/v1/messages", json={**chat, "temperature": 0, **body}) as reply:
            return json.loads(reply.read())

    whole = post()
    text = whole["content"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    found = post(stop_sequences=["never", stop])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.index(stop)]
    assert whole["stop_reason"] in ("max_tokens", "end_turn")


def test_model_is_listed(client):
    assert [(model.id, model.max_model_len) for model in client.models.list()] == [("tiny", CONTEXT)]


# ---- structured output ----

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "temperature": 1, "max_tokens": 200}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


def check_thing(text):
    found = json.loads(text)
    assert [*found] == ["size", "kind"]
    assert 0 <= found["size"] <= 99
    assert found["kind"] in ("a", "b")


def test_a_random_model_answers_by_the_schema(client):
    compact = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    for choice in client.chat.completions.create(n=8, extra_body=compact, **ASKED).choices:
        assert choice.finish_reason == "stop"
        check_thing(choice.message.content)
    bias = {str(i): -100 for i in (12, 13, 16, 35)}  # the model likes tabs and line breaks as much as all else
    reply = client.chat.completions.create(response_format=JSON_SCHEMA, logit_bias=bias, seed=1, **ASKED).choices[0]
    check_thing(reply.message.content)
    chunks = client.chat.completions.create(response_format=JSON_SCHEMA, logit_bias=bias, seed=1, stream=True, **ASKED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.message.content


def test_vllms_spellings_of_structured_output(client):
    def ask(**form):
        options = {"model": "tiny", "prompt": PROMPT, "temperature": 1, "max_tokens": 60}
        return client.completions.create(extra_body=form, logprobs=0, **options).choices[0].text

    assert ask(guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", ask(guided_regex="[0-9]{2}:[0-9]{2}"))
    assert ask(guided_grammar='root ::= "a" "b"') == "ab"
    assert ask(guided_json={"const": 7}) == "7"
    assert ask(structured_outputs={"choice": ["or"]}) == "or"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_pointer(client, is_streamed):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="/properties/a/uniqueItems") as found:
        client.chat.completions.create(response_format=form, stream=is_streamed, **ASKED)
    assert found.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(extra_body={"guided_json": schema}, stream=is_streamed, **ASKED)
    assert found.value.param == "guided_json"
