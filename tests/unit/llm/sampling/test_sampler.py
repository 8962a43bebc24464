"""Logits to tokens: against transformers' processors, against a plain reference, and one batch against another."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process

from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.sampler import NO_TOKEN, Sampler, token_infos
from flambeau.llm.sampling_params import SamplingParams
from support.statistics import chi_square_p

VOCAB = 300
EOS = 2


def row(seed: int = 0, prompt: Any = (5, 6, 7, 7), output: Any = (), **settings: Any) -> SamplingState:
    return SamplingState(SamplingParams(**settings), seed, [*prompt, *output], len(prompt))


def logits(rows: int = 1, places: int = 1, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, places, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, eos_ids=[EOS])


def normal(scores: Tensor) -> Tensor:
    return scores.log_softmax(-1)


FILTERS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"top_k": 10}, [logits_process.TopKLogitsWarper(10)]),
    ({"top_k": 64}, [logits_process.TopKLogitsWarper(64)]),
    ({"top_k": 150}, [logits_process.TopKLogitsWarper(150)]),
    ({"top_p": 0.8}, [logits_process.TopPLogitsWarper(0.8)]),
    ({"top_p": 0.001}, [logits_process.TopPLogitsWarper(0.001)]),
    ({"min_p": 0.05}, [logits_process.MinPLogitsWarper(0.05)]),
    ({"top_k": 20, "top_p": 0.7}, [logits_process.TopKLogitsWarper(20), logits_process.TopPLogitsWarper(0.7)]),
    (
        {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.1},
        [
            logits_process.TemperatureLogitsWarper(1.7),
            logits_process.TopKLogitsWarper(40),
            logits_process.TopPLogitsWarper(0.95),
            logits_process.MinPLogitsWarper(0.1),
        ],
    ),
    ({"temperature": 0.3}, [logits_process.TemperatureLogitsWarper(0.3)]),
]


@pytest.mark.parametrize(("settings", "theirs"), FILTERS)
def test_filters_keep_what_transformers_keep(settings: dict[str, Any], theirs: list[Any]) -> None:
    for seed in range(10):
        given = logits(seed=seed)
        expected = given[0]
        for process in theirs:
            expected = process(None, expected)
        found = sampler().scores(given, [row(**settings)])[0]
        torch.testing.assert_close(normal(found), normal(expected))


def test_repetition_is_penalized_as_in_transformers() -> None:
    given = logits()
    theirs = logits_process.RepetitionPenaltyLogitsProcessor(1.4)
    expected = theirs(torch.tensor([[5, 6, 7, 7, 9, 9, 11]]), given[0].clone())
    found = sampler().scores(given, [row(output=[9, 9, 11], repetition_penalty=1.4)])
    torch.testing.assert_close(found[0], expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    given = logits()
    expected = given.clone()
    expected[0, 0, 9] -= 2 * 0.5 + 0.25
    expected[0, 0, 11] -= 1 * 0.5 + 0.25
    settings = {"frequency_penalty": 0.5, "presence_penalty": 0.25}
    torch.testing.assert_close(sampler().scores(given, [row(output=[9, 9, 11], **settings)]), expected)


def test_counts_grow_with_the_output_and_are_dropped_with_their_row() -> None:
    chooser, settings = sampler(), {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "temperature": 0.0}
    for story in range(20):
        kept, gone = row(**settings), row(prompt=[story], **settings)
        for step in range(5):
            given = logits(2, seed=step)
            fresh = sampler().scores(given, [copy_of(kept), copy_of(gone)])
            assert torch.equal(chooser.scores(given, [kept, gone]), fresh)
            for each in (kept, gone):
                each.tokens += [step % 3, story]
    assert len(chooser._counts._outputs) <= 16  # ten of the forty rows are remembered at most


def copy_of(old: SamplingState) -> SamplingState:
    return replace(old, tokens=[*old.tokens])


def test_bias_is_added_and_can_forbid_nothing_else() -> None:
    given = logits(2)
    found = sampler().scores(given, [row(logit_bias={4: 2.5, 5: -100.0}), row()])
    expected = given.clone()
    expected[0, 0, 4] += 2.5
    expected[0, 0, 5] -= 100
    torch.testing.assert_close(found, expected)


def test_no_end_before_min_tokens() -> None:
    short, long = row(min_tokens=3, stop_token_ids=[8], output=[1, 1]), row(min_tokens=3, output=[1, 1, 1])
    found = sampler().scores(logits(2), [short, long])
    assert found[0, 0].isinf().nonzero().flatten().tolist() == [EOS, 8]
    assert found[1].isfinite().all()


def test_several_places_are_what_one_after_another_would_be() -> None:
    """The penalties of a place count the tokens ahead of it, and so does min_tokens."""
    settings = [
        {"frequency_penalty": 0.7, "presence_penalty": 0.2, "top_k": 30},
        {"repetition_penalty": 1.5, "min_tokens": 4, "top_p": 0.9},
        {"temperature": 0.0, "min_tokens": 4},
        {"min_p": 0.1},
    ]
    rows = [row(i, output=[3, 3], **each) for i, each in enumerate(settings)]
    ahead = torch.tensor([[3, 8, 9], [10, 10, 4], [1, 1, 1], [0, 0, 0]])
    given, chooser = logits(4, 4), sampler()
    scores, ids = chooser.scores(given, rows, ahead_SA=ahead), chooser.sample(given, rows, ahead_SA=ahead)
    for place in range(4):
        now = [replace(r, tokens=[*r.tokens, *ahead[i, :place].tolist()]) for i, r in enumerate(rows)]
        one = given[:, place : place + 1]
        torch.testing.assert_close(scores[:, place : place + 1], chooser.scores(one, now))
        assert torch.equal(ids[:, place : place + 1], chooser.sample(one, now))
        assert torch.equal(
            ids[:, place : place + 1], chooser.sample(one, rows, ahead_SA=ahead[:, :place], offset=place)
        )


def mixed_rows() -> list[SamplingState]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.5, "min_p": 0.01},
        {"top_k": 100},
        {"min_p": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"frequency_penalty": 1.0, "logit_bias": {3: 5.0}, "min_tokens": 9},
    ]
    return [row(i, output=[1] * i, **each) for i, each in enumerate(settings)]


@pytest.mark.parametrize("vocab", [40, VOCAB, 1001])
def test_a_row_gets_the_same_token_whatever_the_batch(vocab: int) -> None:
    rows, chooser = mixed_rows(), sampler(vocab)
    for seed in range(20):
        given = logits(len(rows), vocab=vocab, seed=seed)
        together = chooser.sample(given, rows).flatten().tolist()
        alone = [chooser.sample(given[i : i + 1], [each]).item() for i, each in enumerate(rows)]
        backwards = chooser.sample(given.flip(0), rows[::-1]).flatten().tolist()[::-1]
        assert together == alone == backwards


def test_draws_follow_the_scores() -> None:
    """20,000 draws from each kind of filter, and the seed alone makes them differ."""
    vocab, number = 12, 20_000
    chooser, given = sampler(vocab), logits(vocab=vocab) / 3
    for settings in ({}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 6, "temperature": 2.0}):
        one = row(**settings)
        shares = chooser.scores(given, [one])[0, 0].double().softmax(-1)
        drawn = chooser.sample(given.expand(1, number, vocab), [one])  # consecutive positions
        counts = drawn.flatten().bincount(minlength=vocab)
        assert counts[shares == 0].sum() == 0
        possible = shares > 0
        assert chi_square_p(counts[possible], (shares[possible] * number)) > 1e-4
    assert len({chooser.sample(given, [row(seed)]).item() for seed in range(200)}) > 4


@pytest.mark.parametrize("vocab", [40, VOCAB])
def test_the_token_drawn_is_the_one_drawn_from_the_scores(vocab: int) -> None:
    """However few candidates it was looked for among, and in numpy or torch."""
    rows, chooser = [*mixed_rows(), row(20, top_k=9, min_p=0.1), row(21, top_k=50, top_p=0.4)], sampler(vocab)
    for seed in range(20):
        given = logits(len(rows), 3, vocab=vocab, seed=seed)
        assert torch.equal(chooser.sample(given, rows), chooser.draw(chooser.scores(given, rows), rows))


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    given = torch.zeros(2, 1, VOCAB)
    given[1, 0, [7, 200]] = 1.0
    rows = [row(temperature=0.0), row(temperature=0.0)]
    assert sampler().sample(given, rows).flatten().tolist() == [0, 7]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_cost_their_own_row_only(bad: float) -> None:
    rows = mixed_rows()
    given = logits(len(rows) * 2)
    given[::2, 0, 17] = bad
    ids = sampler().sample(given, [each for each in rows for _ in range(2)]).flatten()
    assert ids[::2].tolist() == [NO_TOKEN] * len(rows)
    assert (ids[1::2] >= 0).all()


def test_a_row_with_nothing_left_gets_no_token() -> None:
    given = torch.full((2, 1, VOCAB), -math.inf)
    assert sampler().sample(given, [row(temperature=0.0), row()]).flatten().tolist() == [NO_TOKEN] * 2


def test_logprobs_are_the_models_own() -> None:
    given = logits(3)[:, 0]
    expected = given.double().log_softmax(-1)
    found = token_infos(given, [4, 5, 6], [0, 2, 5])
    for i, each in enumerate(found):
        assert each.logprob == pytest.approx(expected[i, 4 + i].item(), abs=1e-5)
        best = expected[i].topk([0, 2, 5][i])
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-5)
