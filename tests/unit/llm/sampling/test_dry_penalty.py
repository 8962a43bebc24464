"""The penalty for continued repetitions, against the plain loops, place by place, and in an engine."""

from __future__ import annotations

import random
import time

import pytest
import torch

from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.sampling.dry_penalty import DryPenalty, RepeatedEndings, common_beginnings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import AsyncEagerBackend
from support.structured_output import PROMPT, structured_engine, tokenizer
from support.tiny_models import tiny_engine

BREAKERS = frozenset({0, 5})


def plain_penalties(tokens, params, breakers):
    """What each token loses: the longest earlier place that ends like the text, before each token that followed."""
    last_n = params.dry_penalty_last_n
    text = tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]
    found = {}
    for end in range(1, len(text)):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length] not in breakers:
            length += 1
        if length >= params.dry_allowed_length and text[end] not in breakers:
            found[text[end]] = max(found.get(text[end], 0), length)
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in found.items()
    }


def penalties_of(places):
    return [dict(zip(ids.tolist(), values.tolist(), strict=True)) for ids, values in places]


def random_text(seed, length=60, kinds=4):
    chance = random.Random(seed)
    return [chance.randrange(kinds) for _ in range(length)]


@pytest.mark.parametrize("settings", [{}, {"dry_allowed_length": 1}, {"dry_penalty_last_n": 12, "dry_base": 2.5}])
@pytest.mark.parametrize("breakers", [frozenset(), BREAKERS])
@pytest.mark.parametrize("seed", range(3))
def test_penalties_are_those_of_the_plain_loops(settings, breakers, seed):
    params = SamplingParams(dry_multiplier=0.8, **settings)
    text = random_text(seed, kinds=6 if breakers else 3)
    grown = DryPenalty(params, breakers)
    for place in range(1, len(text)):
        expected = plain_penalties(text[:place], params, breakers)
        for penalty in (DryPenalty(params, breakers), grown):
            [found] = penalties_of(penalty.places(text[:place], [], 1))
            assert found == pytest.approx(expected)
        ahead = text[place : place + 3]
        rows = penalties_of(grown.places(text[:place], ahead, len(ahead) + 1))
        for i, row in enumerate(rows):
            assert row == pytest.approx(plain_penalties([*text[:place], *ahead[:i]], params, breakers))
        [later] = penalties_of(grown.places(text[:place], ahead, 1))
        assert later == rows[-1]


@pytest.mark.parametrize("ids", [[], [1], [1, 1, 1, 1], [1, 2, 1, 2, 1, 3, 1, 2], random_text(9, 80, 2)])
def test_common_beginnings_are_those_of_the_plain_loop(ids):
    def common(rest):
        return next((i for i, (a, b) in enumerate(zip(ids, rest, strict=False)) if a != b), len(rest))

    assert common_beginnings(ids).tolist() == [common(ids[i:]) for i in range(len(ids))]


def test_a_long_text_that_repeats_one_token_is_read_in_time():
    began = time.process_time()
    endings = RepeatedEndings([7] * 200_000, frozenset()).after(7)
    tokens, lengths = endings.followers(2, len(endings))
    assert (tokens.tolist(), lengths.tolist()) == ([7], [200_000])
    assert time.process_time() - began < 5


def test_a_very_long_repetition_forbids_its_token_and_breaks_no_logits():
    params = SamplingParams(temperature=0.0, dry_multiplier=1.0)
    state = SamplingState(params, 0, [7] * 5000, 2, repeats=DryPenalty(params, ()))
    logits = torch.zeros(1, 1, 20)
    logits[..., 7] = 50.0
    assert Sampler(20).sample(logits, [state]).item() == 0
    assert Sampler(20).scores(logits, [state])[0, 0, 7] < -1e29


def test_rows_of_a_batch_have_their_own_repetitions():
    params = [SamplingParams(seed=1, dry_multiplier=2.0), SamplingParams(seed=1), SamplingParams(temperature=0.0)]
    states = [SamplingState(each, 1, [1, 2, 3, 9, 1, 2, 3], 2) for each in params]
    states[0].repeats = DryPenalty(params[0], ())
    scores = Sampler(20).scores(torch.zeros(3, 2, 20), states, ahead_SA=torch.tensor([[9], [9], [9]]))
    expected = torch.zeros(3, 2, 20)
    expected[0, 0, 9] = -2.0 * 1.75
    expected[0, 1, 1] = -2.0 * 1.75**2
    assert torch.allclose(scores, expected)


# ---- in an engine ----

KINDS = {
    "ahead": {"kind": AsyncEagerBackend},
    "draft": {"with_draft": True, "speculate_k": 3},
    "ngram": {"speculation": "ngram"},
    "head": {"with_head": True, "speculate_k": 3},
}
LETTERS = [tokenizer().encode(letter, add_special=False)[0] for letter in "abc"]
FEW = {"allowed_token_ids": LETTERS, "ignore_eos": True, "max_tokens": 60}
DRY = {"dry_multiplier": 3.0, "dry_sequence_breakers": []}


def longest_repeat(ids):
    return max(
        length
        for end in range(1, len(ids))
        for begin in range(end)
        for length in [next((k for k in range(begin + 1) if ids[begin - k] != ids[end - k]), begin + 1)]
    )


def ids_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"seed": 3, "n": 2}], ids=["greedy", "seeded"])
def test_repetitions_are_short_and_speculation_changes_no_token(name, given):
    params = SamplingParams(**FEW, **DRY, **given)
    plain = structured_engine().generate(PROMPT, params)
    assert ids_of(structured_engine(**KINDS[name]).generate(PROMPT, params)) == ids_of(plain)
    free = structured_engine().generate(PROMPT, SamplingParams(**FEW, **given))
    for with_penalty, without in zip(plain, free, strict=True):
        assert longest_repeat(with_penalty.token_ids) < min(8, longest_repeat(without.token_ids))
    ids = plain[0].token_ids
    resumed = structured_engine()
    resumed.add(
        "r", tokenizer().encode(PROMPT), SamplingParams(**{**FEW, **DRY, **given, "n": 1}), generated=[ids[:30]], seed=3
    )
    rest = [token for _ in range(80) for output in resumed.step() for token in output.token_ids]
    assert [*ids[:30], *rest] == ids


def test_breakers_are_the_tokens_that_contain_a_text():
    known = tokenizer()
    assert not known.knows_tokens_with("to")
    found = known.tokens_with("to")
    assert known.knows_tokens_with("to")
    assert found == {i for i in range(known.vocab_size) if b"to" in known.token_bytes(i)}
    assert len(found) > 1
    assert known.tokens_with("to be? no!") == {*known.encode("to be? no!", add_special=False)[-1:]}
    for i in range(300):
        known.tokens_with(f"{i}")
    assert not known.knows_tokens_with("to")
    engine = structured_engine()
    params = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["<new>"])
    assert not engine.has_grammar(params, None)
    engine.compile_grammar(params, None)
    assert engine.has_grammar(params, None)
    assert engine.has_grammar(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[]), None)


def test_breakers_need_a_tokenizer():
    with pytest.raises(InvalidRequest, match="dry_sequence_breakers need a tokenizer"):
        tiny_engine().generate([[1, 2]], dry_multiplier=1.0)
    [found] = tiny_engine().generate([[1, 2]], dry_multiplier=1.0, dry_sequence_breakers=[], max_tokens=3)
    assert len(found.token_ids) == 3
