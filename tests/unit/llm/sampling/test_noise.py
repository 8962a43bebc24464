"""Numbers that depend on seed, position, token and purpose alone, and look like chance otherwise."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from flambeau.llm.sampling import noise


def keys(*seeds: int) -> Tensor:
    return torch.tensor([noise.key(seed) for seed in seeds])


def test_a_number_depends_on_nothing_but_what_it_is_for() -> None:
    seeds, positions, tokens = keys(7, 8, 9), torch.tensor([3, 5, 3]), torch.arange(50)
    together = noise.uniform(seeds, positions, tokens, noise.DRAW)
    alone = noise.uniform(seeds[1:2], positions[1:2], tokens[20:30], noise.DRAW)
    own_tokens = noise.uniform(seeds, positions, torch.stack([tokens.flip(0)] * 3), noise.DRAW)
    assert torch.equal(together[1:2, 20:30], alone)
    assert torch.equal(together, own_tokens.flip(1))
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(together, noise.uniform(seeds, positions, tokens, noise.ACCEPT))


def test_numbers_lie_between_0_and_1_and_their_noise_is_finite() -> None:
    positions, tokens = torch.arange(40), torch.arange(50_000)
    numbers = noise.uniform(keys(*range(40)), positions, tokens, noise.DRAW)
    assert 0 < numbers.min() < 1e-5
    assert 1 - 1e-5 < numbers.max() < 1
    assert noise.gumbel(keys(*range(40)), positions, tokens, noise.DRAW).isfinite().all()


def test_extreme_bits_still_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_bits", lambda *_: torch.tensor([0, 2**63 - 1]))
    nothing = torch.zeros(1)
    assert noise.gumbel(nothing, nothing, nothing, noise.DRAW).isfinite().all()
    assert [0 < number < 1 for number in noise.uniform(nothing, nothing, nothing, noise.DRAW).tolist()] == [True, True]


def test_numbers_are_uniform() -> None:
    numbers = noise.uniform(keys(1, 2), torch.tensor([0, 1000]), torch.arange(200_000), noise.DRAW)
    for row in numbers:
        counts = torch.histc(row, 256, 0, 1)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("neighbor", ["position", "token", "seed", "purpose"])
def test_neighbors_are_independent(neighbor: str) -> None:
    places, tokens = torch.arange(300), torch.arange(1000)
    one = noise.uniform(keys(*range(300)), places, tokens, noise.DRAW)
    other = {
        "position": lambda: noise.uniform(keys(*range(300)), places + 1, tokens, noise.DRAW),
        "token": lambda: noise.uniform(keys(*range(300)), places, tokens + 1, noise.DRAW),
        "seed": lambda: noise.uniform(keys(*range(1, 301)), places, tokens, noise.DRAW),
        "purpose": lambda: noise.uniform(keys(*range(300)), places, tokens, noise.ACCEPT),
    }[neighbor]()
    cells = (one * 16).long() * 16 + (other * 16).long()
    assert stats.chisquare(cells.flatten().bincount(minlength=256).numpy()).pvalue > 1e-4
    # The first tokens of consecutive positions and the first positions of consecutive seeds are what texts are made of.
    cells = (one[:, :8] * 4).long() * 4 + (other[:, :8] * 4).long()
    assert stats.chisquare(cells.flatten().bincount(minlength=16).numpy()).pvalue > 1e-4


def test_the_largest_score_with_noise_is_a_draw() -> None:
    weights = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    noises = noise.gumbel(keys(3).expand(20_000), torch.arange(20_000), torch.arange(5), noise.DRAW)
    counts = (weights.log() + noises).argmax(-1).bincount(minlength=5)
    assert stats.chisquare(counts.numpy(), [10_000, 6_000, 3_000, 800, 200]).pvalue > 1e-4


def test_noise_is_the_same_in_numpy() -> None:
    seeds, positions = keys(*range(5)).unsqueeze(1), torch.arange(15).view(5, 3) * 1000
    for purpose in (noise.DRAW, noise.RESIDUAL):
        tensor = noise.gumbel(seeds, positions, torch.arange(2000), purpose)
        array = noise.gumbel_array(seeds.numpy(), positions.numpy(), torch.arange(2000).numpy(), purpose)
        torch.testing.assert_close(tensor, torch.from_numpy(array))


def test_a_key_is_a_signed_word_for_any_seed() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 2, -(2**63) + 5]
    found = {noise.key(seed) for seed in seeds}
    assert len(found) == 6
    assert all(-(2**63) <= key < 2**63 for key in found)
