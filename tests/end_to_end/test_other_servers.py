"""Fields that people send to vLLM, SGLang and llama.cpp's server, by OpenAI's own client."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("torch")
pytest.importorskip("sentencepiece")
pytest.importorskip("safetensors")

from support.language_models import CONTEXT, write_language_model  # noqa: E402
from support.network_server import serving_networks  # noqa: E402

NUM_TOKENS = 16
PROMPT = "To be, or not to be"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fields")
    model = write_language_model(folder / "model")
    with (
        serving_networks(folder, {"tiny": model}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def complete(client, prompt=PROMPT, *, stream=False, logprobs=None, n=1, **fields):
    extra = {"ignore_eos": True, **fields}
    return client.completions.create(prompt=prompt, stream=stream, logprobs=logprobs, n=n, **GREEDY, extra_body=extra)


def chat(client, *, stream=False, messages=MESSAGES, **fields):
    extra = {"ignore_eos": True, **fields}
    return client.chat.completions.create(messages=messages, stream=stream, **GREEDY, extra_body=extra)


def ids_of(client, text, **options):
    reply = client._client.post(
        f"{str(client.base_url).removesuffix('/v1/')}/tokenize", json={"model": "tiny", "prompt": text, **options}
    )
    return reply.json()["tokens"]


def test_ids_of_prompt_and_text_are_returned(client):
    prompt_ids = ids_of(client, PROMPT)
    [choice] = complete(client, return_token_ids=True).choices
    assert choice.prompt_token_ids == prompt_ids
    assert len(choice.token_ids) == NUM_TOKENS
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True, return_token_ids=True)]
    assert [token for chunk in chunks for token in chunk.token_ids] == choice.token_ids
    assert [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")] == [prompt_ids]
    assert not hasattr(complete(client).choices[0], "token_ids")
    # Their text is the same again, as a prompt of ids.
    again = complete(client, [*prompt_ids, *choice.token_ids[:4]], return_token_ids=True).choices[0]
    assert again.token_ids[: NUM_TOKENS - 4] == choice.token_ids[4:]


def test_ids_of_a_chat_are_returned(client):
    whole = chat(client, return_token_ids=True)
    chunks = [*chat(client, stream=True, return_token_ids=True)]
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", ())]
    assert ids == whole.choices[0].token_ids
    assert len(ids) == NUM_TOKENS
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_rules_for_tokens_hold_in_whole_replies_and_streams(client, stream):
    def ids(**fields):
        found = complete(client, stream=stream, return_token_ids=True, **fields)
        choices = [chunk.choices[0] for chunk in found] if stream else found.choices
        return [token for choice in choices for token in choice.token_ids]

    free = ids()
    allowed = [40, 41, 42, 43]
    assert {*ids(allowed_token_ids=allowed)} <= {*allowed}
    pairs = [*zip(made := ids(allowed_token_ids=allowed, no_repeat_ngram_size=2), made[1:], strict=False)]
    assert len(pairs) == len({*pairs}) == NUM_TOKENS - 1
    banned = ids(logit_bias={str(free[0]): -100})
    assert banned[0] != free[0]


def test_bad_words_are_not_written(client):
    """Also where a vocabulary has the beginning of a word and a part of it as two tokens."""
    for i in range(5):
        prompt = f"{PROMPT} {i}"
        [plain] = complete(client, prompt, logprobs=0).choices
        # A single letter may also be spelled by a token of its byte.
        words = [token for token in plain.logprobs.tokens if len(token) > 1 and token.isalpha()]
        assert words
        [choice] = complete(client, prompt, logprobs=0, bad_words=words).choices
        assert not {*choice.logprobs.tokens} & {*words}
        assert not {token.removeprefix(" ") for token in choice.logprobs.tokens} & {*words}


def test_the_prompt_is_scored_as_an_echo_of_it(client):
    found = complete(client, n=2, prompt_logprobs=2)
    echo = complete(client, logprobs=2, echo=True).choices[0].logprobs
    ids = ids_of(client, PROMPT)
    for choice in found.choices:
        first, *others = choice.prompt_logprobs
        assert first is None
        assert len(others) == len(ids) - 1
        for place, entries in enumerate(others, 1):
            own = entries[str(ids[place])]
            assert own["logprob"] == pytest.approx(echo.token_logprobs[place], abs=1e-5)
            assert own["decoded_token"] == echo.tokens[place]
            assert {entry["rank"] for entry in entries.values()} == {1, 2, own["rank"]}
    scored = chat(client, prompt_logprobs=0)
    assert len(scored.prompt_logprobs) == scored.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        complete(client, stream=True, prompt_logprobs=2)


def test_tokens_are_named_by_their_ids(client):
    [choice] = complete(client, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True).choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]


def test_the_name_of_the_end_token_is_shown(client):
    end = {"allowed_token_ids": [2], "ignore_eos": True}
    assert complete(client, **end).choices[0].text == ""
    shown = complete(client, **end, skip_special_tokens=False, spaces_between_special_tokens=False).choices[0].text
    assert shown == "</s>" * NUM_TOKENS
    pieces = complete(client, **end, skip_special_tokens=False, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == shown
    assert chat(client, **end, skip_special_tokens=False).choices[0].message.content == shown
    one = {"allowed_token_ids": [2], "ignore_eos": False, "skip_special_tokens": False}
    assert complete(client, **one).choices[0].text == ""
    assert complete(client, **one, include_stop_str_in_output=True).choices[0].text == "</s>"


def test_prompts_are_cut_and_begun_as_asked(client):
    ids = ids_of(client, PROMPT)
    cut = complete(client, truncate_prompt_tokens=4, return_token_ids=True)
    assert cut.choices[0].prompt_token_ids == [ids[0], *ids[-3:]]
    assert cut.usage.prompt_tokens == 4
    bare = complete(client, add_special_tokens=False, return_token_ids=True).choices[0]
    assert bare.prompt_token_ids == ids[1:]
    long = complete(client, "to be " * 300, truncate_prompt_tokens=-1)
    assert long.usage.prompt_tokens == CONTEXT - NUM_TOKENS
    assert long.usage.completion_tokens == NUM_TOKENS
    assert chat(client, truncate_prompt_tokens=3).usage.prompt_tokens == 3


def test_a_salt_keeps_a_prefix_apart(client):
    prompt = "the slings and arrows of outrageous fortune " * 4

    def cached(**fields):
        return complete(client, prompt, **fields).usage.prompt_tokens_details.cached_tokens

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 0, 0]
    again = [cached(cache_salt="a"), cached(cache_salt="b"), cached()]
    assert min(again) >= 16
    assert complete(client, prompt).choices[0].text == complete(client, prompt, cache_salt="a").choices[0].text


def test_the_best_of_several_choices_is_the_likeliest(client):
    options = {"model": "tiny", "prompt": PROMPT, "seed": 3, "max_tokens": 8, "logprobs": 0}
    many = client.completions.create(**options, n=6).choices
    best = client.completions.create(**options, n=2, best_of=6)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = sorted(many, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in many)
    hidden = client.completions.create(**{**options, "logprobs": None}, best_of=6).choices
    assert [(choice.text, choice.logprobs) for choice in hidden] == [(expected[0].text, None)]


def test_filters_of_llama_cpp_are_known(client):
    fields = {"typical_p": 0.5, "top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 5}
    fields |= {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2, "dry_sequence_breakers": ["\n", ":"]}
    texts = [
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, extra_body=fields).choices[0].text
        for _ in range(2)
    ]
    assert texts[0] == texts[1] != ""
    with pytest.raises(openai.BadRequestError, match="xtc_probability must be 0 with temperature 0"):
        complete(client, xtc_probability=0.5)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"use_beam_search": True}, "use_beam_search is not supported; this server samples"),
        ({"mirostat": 2}, "mirostat is not supported; send temperature"),
        ({"n_predict": 5}, "n_predict is not supported; send max_tokens"),
        ({"documents": [{"text": "a"}]}, "does not show documents"),
        ({"chat_template": "{{ messages }}"}, "write the prompt yourself"),
        ({"thinking_token_budget": 3}, "thinking_token_budget is 3, but the model does not reason"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids has token ids outside"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_remedy(client, fields, told):
    with pytest.raises(openai.BadRequestError, match=told) as found:
        chat(client, **fields)
    assert found.value.param in fields
    defaults = {"use_beam_search": False, "length_penalty": 1.0, "dry_multiplier": 0, "priority": 0, "best_of": None}
    assert complete(client, **defaults).choices[0].text == complete(client).choices[0].text


def test_rules_that_exclude_each_other_are_a_bad_request(client):
    contradiction = {"allowed_token_ids": [40, 41], "structured_outputs": {"regex": "[0-9]+x"}}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids and the form of the text leave no token"):
        chat(client, **contradiction)
    with pytest.raises(openai.APIError, match="no_repeat_ngram_size leave no token"):
        for _ in complete(client, stream=True, allowed_token_ids=[40, 41], no_repeat_ngram_size=1):
            pass


def test_predictions_know_the_fields_too(client):
    url = f"{str(client.base_url).removesuffix('/v1/')}/predictions/tiny"
    ask = {"prompt": PROMPT, "temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "prompt_logprobs": 1}
    found = client._client.post(url, json={**ask, "allowed_token_ids": [40, 41], "no_repeat_ngram_size": 3}).json()
    prompt = ids_of(client, PROMPT)
    assert [entry["id"] for entry in found["details"]["prompt_logprobs"]] == prompt[1:]
    refused = client._client.post(url, json={**ask, "allowed_token_ids": "a"})
    assert refused.status_code == 400
    assert "allowed_token_ids must be a list" in refused.text
