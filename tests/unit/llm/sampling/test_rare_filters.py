"""Typical-p as in transformers; top-n-sigma and XTC against a plain loop; all three together with speculation."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.generation.logits_process import TypicalLogitsWarper

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.sampling import rng
from flambeau.llm.sampling.rare_filters import typical, within_sigmas, without_top_choices
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.async_backend import AsyncEagerBackend
from support.statistics import chi_square_p
from support.tiny_models import tiny_draft, tiny_engine, tiny_model

VOCAB = 97
PROMPT = [1, 2, 3, 4, 4, 2, 1, 3]


def logits_of(seed: int, *shape: int) -> torch.Tensor:
    logits = 3 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[..., ::7] = -torch.inf  # what a grammar forbids
    return logits


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def kept(scores: torch.Tensor) -> list[int]:
    return scores.isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.9, 0.999])
def test_typical_tokens_are_those_of_transformers(mass):
    logits = logits_of(1, 5, 1)
    found = typical(logits, column(*[mass] * 5))
    expected = TypicalLogitsWarper(mass)(torch.zeros(5, 1, dtype=torch.long), logits[:, 0].clone())
    assert torch.equal(found[:, 0], expected)
    assert 0 < found.isfinite().sum() < logits.isfinite().sum()
    assert torch.equal(typical(logits, column(*[1.0] * 5)), logits)


def plainly_within(row: list[float], sigmas: float) -> list[int]:
    possible = [value for value in row if math.isfinite(value)]
    mean = sum(possible) / len(possible)
    sigma = math.sqrt(sum((value - mean) ** 2 for value in possible) / len(possible))
    return [i for i, value in enumerate(row) if math.isfinite(value) and value >= max(row) - sigmas * sigma]


@pytest.mark.parametrize("sigmas", [0.3, 1.0, 2.5])
def test_tokens_within_sigmas_are_those_of_a_plain_loop(sigmas):
    logits = logits_of(2, 4, 2)
    found = within_sigmas(logits, column(sigmas, sigmas, 0.0, sigmas))
    for row in (0, 1, 3):
        for place in range(2):
            assert kept(found[row, place]) == plainly_within(logits[row, place].double().tolist(), sigmas)
    assert torch.equal(found[2], logits[2])


def plainly_without_top(row: list[float], threshold: float) -> list[int]:
    total = sum(math.exp(value) for value in row)
    shares = {i: math.exp(value) / total for i, value in enumerate(row) if math.isfinite(value)}
    top = sorted((i for i, share in shares.items() if share >= threshold), key=lambda i: shares[i])
    return sorted(shares.keys() - {*top[1:]})


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.2, 0.6])
def test_top_choices_but_the_last_are_left_out(threshold):
    logits = logits_of(3, 6, 1)
    found = without_top_choices(logits, column(*[threshold] * 6))
    for row in range(6):
        assert kept(found[row, 0]) == plainly_without_top(logits[row, 0].double().tolist(), threshold)


def test_a_broken_row_stays_broken():
    logits = logits_of(4, 3, 1)
    logits[1, 0, 5] = torch.nan
    params = SamplingParams(seed=1, top_n_sigma=1.0, typical_p=0.5, xtc_probability=1.0, xtc_threshold=0.02)
    states = [SamplingState(params, i, [1, 2], 1) for i in range(3)]
    tokens = Sampler(VOCAB).sample(logits, states).view(-1).tolist()
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


MIXED = [
    {"typical_p": 0.4},
    {"top_n_sigma": 1.0, "temperature": 3.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "top_k": 20, "min_p": 0.01},
    {"typical_p": 0.8, "top_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.9, "xtc_threshold": 0.01},
    {"top_k": 5},
    {"temperature": 0.0},
]


def test_a_row_gets_the_same_token_whatever_the_batch_and_place_by_place():
    states = [SamplingState(SamplingParams(seed=i, **given), i, [1, 2, 3], 1) for i, given in enumerate(MIXED * 4)]
    logits = logits_of(5, len(states), 3)
    ahead = torch.ones(len(states), 2, dtype=torch.long)
    whole = Sampler(VOCAB).sample(logits, states, ahead_SA=ahead)
    for i, state in enumerate(states):
        for place in range(3):
            one = logits[i : i + 1, place : place + 1]
            alone = Sampler(VOCAB).sample(one, [state], ahead_SA=ahead[i : i + 1, :place], offset=place)
            assert alone.item() == whole[i, place]
            scores = Sampler(VOCAB).scores(one, [state], ahead_SA=ahead[i : i + 1, :place], offset=place)
            assert Sampler(VOCAB).draw(scores, [state], offset=place).item() == whole[i, place]


def test_how_often_top_choices_are_left_out():
    logits = torch.zeros(1, 1, VOCAB)
    logits[..., 8] = 10.0
    logits[..., 9] = 9.0
    params = SamplingParams(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1)
    states = [SamplingState(params, seed, [1, 2], 1) for seed in range(4000)]
    tokens = Sampler(VOCAB).sample(logits.expand(4000, 1, VOCAB).clone(), states).view(-1)
    first, second = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    found = [(tokens == 8).sum().item(), (tokens == 9).sum().item()]
    assert sum(found) > 3900
    expected = [0.7 * first, 0.3 + 0.7 * second]
    assert chi_square_p(found, [sum(found) * share for share in expected]) > 1e-4


def test_xtc_needs_a_temperature():
    with pytest.raises(InvalidRequest, match="xtc_probability must be 0 with temperature 0") as told:
        SamplingParams(temperature=0, xtc_probability=0.5)
    assert told.value.parameter == "xtc_probability"


# ---- in an engine ----

KINDS = {
    "ahead": {"kind": AsyncEagerBackend},
    "ngram": {"speculation": "ngram", "speculate_k": 3},
    "draft": {"speculate_k": 3},
}
FILTERS = {"typical_p": 0.7, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.05}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def engine_of(model, name):
    options = KINDS[name]
    return tiny_engine(model, draft=tiny_draft(model) if name == "draft" else None, max_num_seqs=128, **options)


@pytest.mark.parametrize("name", KINDS)
def test_speculation_and_steps_ahead_change_no_token(model, name):
    params = SamplingParams(seed=3, n=4, max_tokens=40, ignore_eos=True, **FILTERS)
    expected = tiny_engine(model).generate([PROMPT], params)
    found = engine_of(model, name).generate([PROMPT], params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def second_token_shares(model) -> dict[int, float]:
    """The distribution of the second token, summed over the first, with and without the top choices."""

    def shares(ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor(ids)
        with torch.inference_mode():
            logits = model.logits(model(tokens, torch.arange(len(tokens)), WholeAttention())[-1])
        scores = typical(within_sigmas(logits.view(1, 1, -1), column(1.5)), column(0.7))
        without = without_top_choices(scores, column(0.05))
        return (0.5 * scores.softmax(-1) + 0.5 * without.softmax(-1)).view(-1).double()

    found = torch.zeros(VOCAB, dtype=torch.float64)
    first = shares(PROMPT)
    for token in first.nonzero().flatten().tolist():
        found += first[token] * shares([*PROMPT, token])
    return {token: float(found[token]) for token in found.nonzero().flatten().tolist()}


@pytest.fixture
def always_speculates(monkeypatch):
    """Whether it pays is another matter."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


@pytest.mark.usefixtures("always_speculates")
@pytest.mark.parametrize("name", KINDS)
def test_without_a_seed_the_distribution_is_the_filtered_one(model, name):
    engine, number = engine_of(model, name), 2048
    params = SamplingParams(n=128, max_tokens=3, ignore_eos=True, **FILTERS)
    found = [each for _ in range(number // 128) for each in engine.generate([PROMPT], params)]
    if name == "draft":
        assert sum(each.counts.num_accepted for each in found) > 0
    expected = second_token_shares(model)
    tokens = [each.token_ids[1] for each in found]
    assert {*tokens} <= expected.keys()
    common = [token for token, share in expected.items() if share * number >= 8]
    observed = [tokens.count(token) for token in common]
    shares = [expected[token] * number for token in common]
    observed, shares = [*observed, number - sum(observed)], [*shares, number - sum(shares)]
    if shares[-1] < 1:
        observed[-2:], shares[-2:] = [sum(observed[-2:])], [sum(shares[-2:])]
    assert len(common) > 5
    assert chi_square_p(observed, [share * sum(observed) / sum(shares) for share in shares]) > 1e-4


def test_the_purposes_of_random_numbers_are_independent():
    keys, positions, token = torch.arange(1000), torch.zeros(1000, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    numbers = torch.cat([rng.uniform(keys, positions, token, purpose) for purpose in range(4)], 1)
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.1
