"""Sampling on a GPU gives the sampler's tokens: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.grammar_masks import mask_logits
from flambeau.llm.sampling.row_groups import RowSettings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import sampling_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
    pytest.mark.filterwarnings("ignore:invalid value"),  # the interpreter computes with NaN
]


class AnyText:
    """Stands for a grammar; the tests make the masks."""

    error = ""


SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1e-35),
    SamplingParams(temperature=0.8, top_k=200),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    SamplingParams(top_k=1),
    SamplingParams(temperature=2.0, top_k=700),
    SamplingParams(temperature=2.0, top_k=700, top_p=0.5),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=20, top_p=0.95, min_p=0.2),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Some rows have more candidates than are ranked at once."""
    sizes = {"BLOCK": 256, "LANES": 256, "CANDIDATES": 512, "FEW": 128, "TOP_P_CANDIDATES": 128, "SEARCH_BLOCK": 64}
    for name, number in sizes.items():
        monkeypatch.setattr(sampling_kernel, name, number)


def choose(logits_TV, seed=0):
    """The tokens of the sampler and of the kernel, with row i by the i-th settings."""
    vocab_size = logits_TV.shape[1]
    states = [SamplingState(p, 9 * seed + i, [*range(5 + i)], 3) for i, p in enumerate(SETTINGS)]
    expected = Sampler(vocab_size, device=DEVICE).sample(logits_TV.unsqueeze(1), states).view(-1)
    choice = sampling_kernel.TokenChoice(len(SETTINGS) + 1, vocab_size, DEVICE)
    choice.set(RowSettings.of(states, vocab_size))
    positions_T = torch.tensor([*(len(state.tokens) - 1 for state in states), 0], device=DEVICE)
    next_T = torch.full_like(positions_T, -7)
    choice.run(torch.cat([logits_TV, logits_TV[:1]]), positions_T, next_T)  # and a row of padding
    assert next_T.tolist() == choice.chosen_T.clamp(min=0).tolist()
    return expected.tolist(), choice.chosen_T[:-1].tolist()


@pytest.mark.parametrize("many_parts", [1, 1000])  # rows with top-p alone are searched at once, or ranked first
@pytest.mark.parametrize("vocab_size", [50, 256, 900])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_tokens_are_those_of_the_sampler(vocab_size, spread, many_parts, monkeypatch):
    monkeypatch.setattr(sampling_kernel, "MANY_PARTS", many_parts)
    for seed in range(2 if DEVICE.type == "cpu" else 50):
        generator = torch.Generator().manual_seed(seed)
        logits_TV = torch.randn(len(SETTINGS), vocab_size, generator=generator) * spread
        expected, found = choose(logits_TV.to(DEVICE), seed)
        assert found == expected


@pytest.mark.parametrize("is_masked", [False, True])
def test_rows_may_be_padded(is_masked):
    """As those of products that a compiler has padded."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(4, 97, generator=generator).to(DEVICE)
    padded = torch.full((4, 100), 50.0, device=DEVICE)
    padded[:, :97] = logits_TV
    choice = sampling_kernel.TokenChoice(4, 97, DEVICE)
    choose = choice.run_masked if is_masked else choice.run
    positions_T, next_T = (torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2))
    choose(padded[:, :97], positions_T, next_T)
    assert next_T.tolist() == choice.chosen_T.tolist() == logits_TV.argmax(-1).tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_token_is_chosen_from_logits_that_are_not_finite(value):
    logits_TV = torch.randn(len(SETTINGS), 300, device=DEVICE)
    logits_TV[:, 270] = value
    expected, found = choose(logits_TV)
    assert set(found) == set(expected) == {NO_TOKEN}


def test_a_single_possible_token_is_chosen():
    logits_TV = torch.full((len(SETTINGS), 300), -torch.inf, device=DEVICE)
    assert set(choose(logits_TV)[1]) == {NO_TOKEN}
    logits_TV[:, 277] = -3.0
    assert set(choose(logits_TV)[1]) == {277}


def test_the_first_of_equal_tokens_is_the_best():
    logits_TV = torch.zeros(len(SETTINGS), 300, device=DEVICE)
    logits_TV[0, [260, 31, 290]] = 1.0
    assert choose(logits_TV)[1][0] == 31


def masks_of(num_rows, vocab_size, seed):
    """Random words; then few tokens, one, none, and all."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(-(2**31), 2**31, (num_rows, -(-vocab_size // 32))).astype(np.int32)
    bits[1] &= bits[2] & bits[3] & bits[4] & bits[5]
    bits[6:9] = 0
    bits[7, 1] = -(2**31)  # token 63
    bits[9] = -1
    return bits


@pytest.mark.parametrize("vocab_size", [95, 256, 1500])
def test_masked_tokens_are_those_of_the_sampler(vocab_size):
    num_rows = len(SETTINGS)
    states = [SamplingState(p, i, [*range(5 + i)], 3, grammar=AnyText()) for i, p in enumerate(SETTINGS)]
    positions_T = torch.tensor([len(state.tokens) - 1 for state in states] + [0] * 3, device=DEVICE)
    choice = sampling_kernel.TokenChoice(num_rows + 3, vocab_size, DEVICE)
    settings = RowSettings.of(states, vocab_size)
    assert settings.is_constrained
    choice.set(settings)
    for seed in range(2 if DEVICE.type == "cpu" else 20):
        generator = torch.Generator().manual_seed(seed)
        logits_TV = (torch.randn(num_rows + 3, vocab_size, generator=generator) * 3).to(DEVICE)
        logits_TV[3, 64] = torch.nan  # allowed or not
        bits = masks_of(num_rows, vocab_size, seed)
        free = [SamplingState(state.params, state.seed, state.tokens, 3) for state in states]
        masked_SWV = mask_logits(logits_TV[:num_rows].unsqueeze(1), bits[:, None], None)
        expected = Sampler(vocab_size, device=DEVICE).sample(masked_SWV, free).view(-1)
        next_T = torch.full_like(positions_T, -7)
        choice.run(logits_TV, positions_T, next_T)  # as in the step's own graph: without masks
        choice.set_masks(bits)
        choice.run_masked(logits_TV, positions_T, next_T)
        assert choice.chosen_T[:num_rows].tolist() == expected.tolist()
        assert expected[6:9].tolist() == [NO_TOKEN, 63, NO_TOKEN]
        assert expected[3] == NO_TOKEN
        assert next_T.tolist() == choice.chosen_T.clamp(min=0).tolist()


def test_settings_with_and_without_masks_take_turns():
    states = [SamplingState(SETTINGS[1], i, [*range(5 + i)], 3) for i in range(3)]
    positions_T = torch.tensor([len(state.tokens) - 1 for state in states], device=DEVICE)
    logits_TV, next_T = torch.randn(3, 300, device=DEVICE), torch.zeros_like(positions_T)
    expected = Sampler(300, device=DEVICE).sample(logits_TV.unsqueeze(1), states).view(-1).tolist()
    choice = sampling_kernel.TokenChoice(3, 300, DEVICE)
    free = RowSettings.of(states, 300)
    for settings, wanted in [(free, expected), (replace(free, is_constrained=True), None), (free, expected)] * 2:
        choice.set(settings)
        choice.run(logits_TV, positions_T, next_T)
        assert choice.chosen_T.tolist() == (wanted or logits_TV.argmax(-1).tolist())
        if settings.is_constrained:
            choice.set_masks(np.full((3, 10), -1, np.int32))
            choice.run_masked(logits_TV, positions_T, next_T)
            assert choice.chosen_T.tolist() == expected


def test_a_kernel_that_chooses_other_tokens_is_noticed(monkeypatch):
    assert sampling_kernel.is_exact(300, DEVICE)
    assert sampling_kernel.is_exact(30, DEVICE)
    run = sampling_kernel.TokenChoice.run

    def run_with_other_noise(choice, logits_TV, positions_T, next_T):
        run(choice, logits_TV, positions_T + 1, next_T)

    monkeypatch.setattr(sampling_kernel.TokenChoice, "run", run_with_other_noise)
    assert not sampling_kernel.is_exact(300, DEVICE)


def test_without_settings_the_best_tokens_are_chosen():
    logits_TV = torch.randn(3, 300, device=DEVICE)
    choice = sampling_kernel.TokenChoice(3, 300, DEVICE)
    choice.set(RowSettings.of([SamplingState(SETTINGS[1], 1, [1], 1)] * 3, 300))
    choice.set(None)
    choice.run(
        logits_TV, torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    )
    assert choice.chosen_T.tolist() == logits_TV.argmax(-1).tolist()
