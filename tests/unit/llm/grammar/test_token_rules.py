"""Bad words, allowed tokens and n-grams that may not repeat: the masks of transformers' processors, on every path."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.grammar.token_rules import BadSequences, PromptNgrams, TokenRules, bits_of
from flambeau.llm.sampling_params import SamplingParams
from support.structured_output import PROMPT, SPECULATIONS, structured_engine, tokenizer
from support.tiny_models import tiny_engine

VOCAB = 70
ALL = frozenset(range(VOCAB))


@pytest.fixture(scope="module")
def engine():
    return structured_engine(max_num_seqs=32)


@pytest.fixture(scope="module", params=SPECULATIONS)
def any_engine(request):
    return structured_engine(max_num_seqs=32, **SPECULATIONS[request.param])


def rules(prompt=(), *, allowed=None, bad=(), size=0, inner=None):
    ngrams = PromptNgrams(size, prompt) if size else None
    words = BadSequences(bad)
    return TokenRules(
        allowed=bits_of(allowed, words, VOCAB), bad=words, ngrams=ngrams, names=["bad_words"], inner=inner
    )


def allowed_ids(row):
    return {i for i in range(VOCAB) if int(row.view(np.uint32)[i // 32]) >> i % 32 & 1}


def left_by(processor, ids):
    scores = processor(torch.tensor([ids], dtype=torch.long), torch.zeros(1, VOCAB))[0]
    return {i for i in range(VOCAB) if scores[i] == 0}


def check_places(made, prompt, text, expected):
    """The masks one by one, and several at a time behind any part of the text."""
    for place in range(len(text) + 1):
        [row] = made().masks(text[:place], [], 0, 1)
        assert allowed_ids(row) == expected([*prompt, *text[:place]])
    grown = made()
    for place in range(0, len(text), 3):
        ahead = text[place : place + 4]
        rows = grown.masks(text[:place], ahead, 0, len(ahead) + 1)
        assert [allowed_ids(row) for row in rows] == [
            expected([*prompt, *text[:place], *ahead[:i]]) for i in range(len(ahead) + 1)
        ]
        [later] = grown.masks(text[:place], ahead, len(ahead), 1)  # as a draft asks
        assert allowed_ids(later) == allowed_ids(rows[-1])
        whole = np.empty(3, np.int32)
        grown.fill([*prompt, *text[:place]], len(prompt), whole)
        assert allowed_ids(whole) == allowed_ids(rows[0])


@pytest.mark.parametrize("seed", range(4))
def test_bad_sequences_are_those_of_transformers(seed):
    chance = random.Random(seed)
    text = [chance.randrange(6) for _ in range(30)]
    bad = [[chance.randrange(6) for _ in range(length)] for length in (1, 2, 2, 3, 3, 3, 5)]
    processor = NoBadWordsLogitsProcessor(bad, eos_token_id=VOCAB - 1)
    check_places(lambda: rules(bad=bad), [], text, lambda ids: left_by(processor, ids) if ids else ALL - {bad[0][0]})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_prompt", [0, 1, 20])
def test_repeated_ngrams_are_those_of_transformers(size, num_prompt):
    chance = random.Random(size)
    prompt, text = ([chance.randrange(4) for _ in range(number)] for number in (num_prompt, 40))
    processor = NoRepeatNGramLogitsProcessor(size)
    check_places(lambda: rules(prompt, size=size), prompt, text, lambda ids: left_by(processor, ids) if ids else ALL)


def test_choices_share_the_ngrams_of_their_prompt_and_not_of_their_texts():
    prompt = PromptNgrams(2, [1, 2, 3])
    none = BadSequences([])
    first, second = (TokenRules(allowed=bits_of(None, none, VOCAB), bad=none, ngrams=prompt, names=[]) for _ in "ab")
    first.masks([7, 8, 7], [], 0, 1)
    assert allowed_ids(second.masks([7], [], 0, 1)[0]) == ALL
    assert allowed_ids(second.masks([7, 1], [], 0, 1)[0]) == ALL - {2}
    assert allowed_ids(first.masks([7, 8, 7], [], 0, 1)[0]) == ALL - {8}


class Even:
    """A grammar that allows even tokens, and ends after a 4."""

    error = ""
    has_form = True

    def read_to_end(self, new_ids):
        return new_ids.index(4) + 1 if 4 in new_ids else None

    def masks(self, tokens, ahead, first, num_places):
        return np.full((num_places, 3), 0x55555555, np.int32)


def test_what_the_form_allows_is_allowed_within_the_rules_only():
    made = rules(allowed=[1, 2, 3, 4], bad=[[2]], inner=Even())
    assert [allowed_ids(row) for row in made.masks([6], [4], 0, 2)] == [{4}, {4}]
    assert (made.has_form, made.read_to_end([2, 4, 6]), made.error) == (True, 2, "")
    assert not rules(bad=[[2]]).has_form


def test_rules_that_leave_nothing_say_so():
    made = rules(allowed=[1, 3], inner=Even())
    assert not made.masks([], [], 0, 1).any()
    assert made.error == "bad_words and the form of the text leave no token that may follow; ask for less"


# ---- in an engine ----


def ids_of(completions):
    return [completion.token_ids for completion in completions]


def ngrams_of(ids, size):
    return [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]


LETTERS = {tokenizer().encode(letter, add_special=False)[0] for letter in "abcde"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SEEDED = SamplingParams(seed=7, max_tokens=60, n=3, ignore_eos=True)
RULED = {
    "allowed": {"allowed_token_ids": sorted(LETTERS)},
    "ngrams": {"allowed_token_ids": sorted(LETTERS), "no_repeat_ngram_size": 3},
    "bad words": {"allowed_token_ids": sorted(LETTERS), "bad_words": ["ab", "ba", "cc", "dde", "e"]},
}


@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_rules_hold_and_speculation_changes_no_token(engine, any_engine, name, params):
    found = any_engine.generate(PROMPT, params, **RULED[name])
    assert ids_of(found) == ids_of(engine.generate(PROMPT, params, **RULED[name]))
    for completion in found:
        assert {*completion.token_ids} <= LETTERS
        assert completion.finish_reason == "length"
        if name == "ngrams":
            triples = ngrams_of(completion.token_ids, 3)
            assert len(triples) == len({*triples}) == 58
        if name == "bad words":
            assert not [word for word in RULED[name]["bad_words"] if word in completion.text]
    if name != "allowed":
        assert ids_of(found) != ids_of(engine.generate(PROMPT, params, **RULED["allowed"]))


def test_rules_without_a_seed_and_with_everything_else(any_engine):
    options = {"presence_penalty": 0.5, "top_p": 0.9, "logprobs": 1, "min_tokens": 5, "logit_bias": {}}
    for completion in any_engine.generate(PROMPT, n=8, max_tokens=40, **RULED["bad words"], **options):
        assert {*completion.text} <= set("abcd")
        assert not [word for word in ("ab", "ba", "cc") if word in completion.text]


def test_ngrams_of_the_prompt_do_not_come_again(engine):
    prompt = tokenizer().encode("abcdeabde", add_special=False)
    allowed = {"allowed_token_ids": sorted(LETTERS)}
    for completion in engine.generate([prompt], SEEDED, **allowed, no_repeat_ngram_size=2):
        pairs = ngrams_of([*prompt, *completion.token_ids], 2)
        new = pairs[len(prompt) - 1 :]
        assert not {*new} & {*pairs[: len(prompt) - 1]}
        assert len(new) == len({*new})
        assert completion.finish_reason == "error"  # 25 pairs are all there are
        assert "no_repeat_ngram_size" in completion.error


def test_a_text_goes_on_by_the_same_rules_after_a_crash_or_a_preemption(engine):
    options = SamplingParams(seed=5, max_tokens=60, ignore_eos=True, **RULED["ngrams"])
    whole = engine.generate([PROMPT] * 6, options)
    tight = structured_engine(max_num_seqs=32)
    ids = whole[0].token_ids
    for cut in (1, 30, 59):
        tight.add("r", tokenizer().encode(PROMPT), options, generated=[ids[:cut]], seed=5)
        rest = [token for _ in range(80) for output in tight.step() for token in output.token_ids]
        assert [*ids[:cut], *rest] == ids
    small = tiny_engine(engine.model, tokenizer=tokenizer(), num_blocks=40, prefix_cache=False)
    assert ids_of(small.generate([PROMPT] * 6, options)) == ids_of(whole)
    assert small.state.num_preempted > 0


def test_the_end_token_is_ignored_as_without_rules(engine):
    [end] = tokenizer().eos_ids
    options = {"temperature": 0.0, "max_tokens": 9, "allowed_token_ids": [end]}
    assert engine.generate(PROMPT, **options)[0].finish_reason == "stop"
    assert engine.generate(PROMPT, **options, ignore_eos=True)[0].token_ids == [end] * 9


def test_a_form_and_a_rule_that_contradict_it_end_with_the_reason(engine):
    form = {"choice": ["yes", "no"]}
    [found] = engine.generate(PROMPT, structured_outputs=form, allowed_token_ids=sorted(LETTERS))
    assert found.finish_reason == "error"
    assert "allowed_token_ids and the form of the text leave no token" in found.error
    assert found.is_contradiction
    words = [found.text for found in engine.generate(PROMPT, structured_outputs=form, bad_words=["n", "no"], n=8)]
    assert {*words} == {"yes"}


def test_rules_that_leave_only_the_end_before_min_tokens_are_named_as_a_contradiction(any_engine):
    [end] = tokenizer().eos_ids
    for options in (
        {"allowed_token_ids": [end]},
        {"allowed_token_ids": [end, 40], "no_repeat_ngram_size": 1},
        {"allowed_token_ids": [40], "stop_token_ids": [40]},
    ):
        for temperature in (0.0, 1.0):
            [found] = any_engine.generate(PROMPT, **options, min_tokens=3, max_tokens=9, temperature=temperature)
            assert (found.finish_reason, found.is_contradiction) == ("error", True)
            assert found.error.startswith("allowed_token_ids and ")
            assert "min_tokens leave no token that may follow" in found.error
    digits = {"structured_outputs": {"regex": "[0-9]"}, "stop_token_ids": [*range(3, 300)]}
    [found] = any_engine.generate(PROMPT, **digits, min_tokens=3, max_tokens=9)
    assert found.is_contradiction
    assert found.error.startswith("min_tokens and the form of the text leave no token")
    [found] = any_engine.generate(PROMPT, allowed_token_ids=[end, 40], min_tokens=3, max_tokens=9, seed=1)
    assert found.token_ids[:3] == [40] * 3


def test_many_bad_words_are_tokenized_beside_the_steps(engine):
    params = SamplingParams(temperature=0.0, max_tokens=5, bad_words=[f"word {i}" for i in range(30)])
    assert not engine.has_grammar(params, None)
    engine.compile_grammar(params, None)
    assert engine.has_grammar(params, None)
    assert (
        engine.generate(PROMPT, params)[0].token_ids
        == engine.generate(PROMPT, temperature=0.0, max_tokens=5)[0].token_ids
    )
    for i in range(70):
        engine.compile_grammar(SamplingParams(bad_words=[f"{i}"]), None)
    assert not engine.has_grammar(params, None)
    assert engine.has_grammar(SamplingParams(bad_words=["a", "b"]), None)


def test_what_cannot_be_a_rule_is_refused(engine):
    for options, told in [
        ({"allowed_token_ids": []}, "allowed_token_ids must be at least 1 token id"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids has token ids outside"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be a whole number from 0"),
        ({"bad_words": [""]}, "bad_words must be texts that are not empty"),
    ]:
        with pytest.raises(InvalidRequest, match=told):
            engine.generate(PROMPT, **options)
    with pytest.raises(InvalidRequest, match="bad_words need a tokenizer"):
        tiny_engine().generate([[1, 2]], bad_words=["a"])
