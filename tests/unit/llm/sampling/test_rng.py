"""Numbers that depend on seed, position, token and purpose alone, and look like chance otherwise."""

import pytest
import torch
from torch import Tensor

from flambeau.llm.core.sequence import seed_key
from flambeau.llm.sampling import rng
from support.statistics import chi_square_p


def keys(*seeds: int) -> Tensor:
    return torch.tensor([seed_key(seed) for seed in seeds])


def test_a_number_depends_on_nothing_but_what_it_is_for() -> None:
    seeds, positions, tokens = keys(7, 8, 9), torch.tensor([3, 5, 3]), torch.arange(50)
    together = rng.uniform(seeds, positions, tokens, rng.DRAW)
    alone = rng.uniform(seeds[1:2], positions[1:2], tokens[20:30], rng.DRAW)
    own_tokens = rng.uniform(seeds, positions, torch.stack([tokens.flip(0)] * 3), rng.DRAW)
    assert torch.equal(together[1:2, 20:30], alone)
    assert torch.equal(together, own_tokens.flip(1))
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(together, rng.uniform(seeds, positions, tokens, rng.ACCEPT))


def test_numbers_lie_between_0_and_1_and_their_noise_is_finite() -> None:
    positions, tokens = torch.arange(40), torch.arange(50_000)
    numbers = rng.uniform(keys(*range(40)), positions, tokens, rng.DRAW)
    assert 0 < numbers.min() < 1e-5
    assert 1 - 1e-5 < numbers.max() < 1
    assert rng.gumbel(keys(*range(40)), positions, tokens, rng.DRAW).isfinite().all()


def test_extreme_bits_still_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_bits", lambda *_: torch.tensor([0, 2**63 - 1]))
    nothing = torch.zeros(1)
    assert rng.gumbel(nothing, nothing, nothing, rng.DRAW).isfinite().all()
    assert [0 < number < 1 for number in rng.uniform(nothing, nothing, nothing, rng.DRAW).tolist()] == [True, True]


def test_numbers_are_uniform() -> None:
    numbers = rng.uniform(keys(1, 2), torch.tensor([0, 1000]), torch.arange(200_000), rng.DRAW)
    for row in numbers:
        counts = torch.histc(row, 256, 0, 1)
        assert chi_square_p(counts) > 1e-4


@pytest.mark.parametrize("neighbor", ["position", "token", "seed", "purpose"])
def test_neighbors_are_independent(neighbor: str) -> None:
    places, tokens = torch.arange(300), torch.arange(1000)
    one = rng.uniform(keys(*range(300)), places, tokens, rng.DRAW)
    other = {
        "position": lambda: rng.uniform(keys(*range(300)), places + 1, tokens, rng.DRAW),
        "token": lambda: rng.uniform(keys(*range(300)), places, tokens + 1, rng.DRAW),
        "seed": lambda: rng.uniform(keys(*range(1, 301)), places, tokens, rng.DRAW),
        "purpose": lambda: rng.uniform(keys(*range(300)), places, tokens, rng.ACCEPT),
    }[neighbor]()
    cells = (one * 16).long() * 16 + (other * 16).long()
    assert chi_square_p(cells.flatten().bincount(minlength=256)) > 1e-4
    # The first tokens of consecutive positions and the first positions of consecutive seeds are what texts are made of.
    cells = (one[:, :8] * 4).long() * 4 + (other[:, :8] * 4).long()
    assert chi_square_p(cells.flatten().bincount(minlength=16)) > 1e-4


def test_the_largest_score_with_noise_is_a_draw() -> None:
    weights = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    noises = rng.gumbel(keys(3).expand(20_000), torch.arange(20_000), torch.arange(5), rng.DRAW)
    counts = (weights.log() + noises).argmax(-1).bincount(minlength=5)
    assert chi_square_p(counts, [10_000, 6_000, 3_000, 800, 200]) > 1e-4


def test_noise_is_the_same_in_numpy() -> None:
    seeds, positions = keys(*range(5)).unsqueeze(1), torch.arange(15).view(5, 3) * 1000
    for purpose in (rng.DRAW, rng.RESIDUAL):
        tensor = rng.gumbel(seeds, positions, torch.arange(2000), purpose)
        array = rng.gumbel_array(seeds.numpy(), positions.numpy(), torch.arange(2000).numpy(), purpose)
        torch.testing.assert_close(tensor, torch.from_numpy(array))


def test_a_key_is_a_signed_word_for_any_seed() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 2, -(2**63) + 5]
    found = {seed_key(seed) for seed in seeds}
    assert len(found) == 6
    assert all(-(2**63) <= key < 2**63 for key in found)
