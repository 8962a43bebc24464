"""A scan over many tokens is one update for each token, one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flambeau.llm.models import scans
from flambeau.llm.models.scans import convolve, mask_padding, scan_channel_delta, scan_delta, scan_mamba, scan_mamba2

S, Q, H, P, G, N = 2, 150, 4, 5, 2, 3  # more than two chunks


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def one_by_one(scan, inputs: list[Tensor], fixed: dict[int, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The scan of single tokens; `fixed` are arguments without a token dimension, by place."""
    pieces = []
    for token in range(Q):
        arguments = [x[:, token : token + 1] for x in inputs]
        for place, value in fixed.items():
            arguments.insert(place, value)
        y, state = scan(*arguments, state)
        pieces.append(y)
    return torch.cat(pieces, dim=1), state


def mamba_2_case():
    inputs = [random(S, Q, H, P), random(S, Q, H).abs(), random(S, Q, G, N), random(S, Q, G, N, seed=1)]
    return scan_mamba2, inputs, {2: -random(H).exp()}, random(S, H, P, N)


def mamba_case():
    inputs = [random(S, Q, P), random(S, Q, P, seed=1).abs(), random(S, Q, N), random(S, Q, N, seed=1)]
    return scan_mamba, inputs, {2: -random(P, N).exp()}, random(S, P, N)


def delta_case():
    q, k = (torch.nn.functional.normalize(random(S, Q, H, N, seed=seed), dim=-1) for seed in (0, 1))
    inputs = [q, k, random(S, Q, H, P), -random(S, Q, H).abs(), random(S, Q, H, seed=1).sigmoid()]
    return scan_delta, inputs, {}, random(S, H, N, P)


def channel_delta_case():
    _, inputs, fixed, state = delta_case()
    inputs[3] = -random(S, Q, H, N, seed=2).abs()
    return scan_channel_delta, inputs, fixed, state


CASES = {"mamba": mamba_case, "mamba-2": mamba_2_case, "delta": delta_case, "channel-delta": channel_delta_case}


@pytest.mark.parametrize("case", CASES)
def test_many_tokens_are_one_after_another(case):
    scan, inputs, fixed, state = CASES[case]()
    arguments = [*inputs]
    for place, value in fixed.items():
        arguments.insert(place, value)
    found, expected = scan(*arguments, state), one_by_one(scan, inputs, fixed, state)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_strong_decay_does_not_overflow(case):
    scan, inputs, fixed, state = CASES[case]()
    place = 3 if case.endswith("delta") else 1  # of what decays depend on
    inputs[place] = inputs[place] * 1000
    arguments = [x.float() for x in inputs]
    for at, value in fixed.items():
        arguments.insert(at, value.float())
    y, last = scan(*arguments, state.float())
    assert torch.isfinite(y).all()
    assert torch.isfinite(last).all()


def test_padding_changes_neither_state_nor_window():
    lengths = torch.tensor([3, 70])
    x, dt = random(S, Q, H, P), random(S, Q, H).abs()
    b, c, a, state = random(S, Q, G, N), random(S, Q, G, N, seed=1), -random(H).exp(), random(S, H, P, N)
    _, padded = scan_mamba2(x, mask_padding(dt, lengths), a, b, c, state)
    weight, window = random(P, 1, 4), random(S, P, 3)
    _, padded_window = convolve(x[:, :, 0], window, weight, None, lengths)
    for i, length in enumerate(lengths.tolist()):
        one = slice(i, i + 1)
        _, alone = scan_mamba2(*(t[one, :length] for t in (x, dt)), a, *(t[one, :length] for t in (b, c)), state[one])
        torch.testing.assert_close(padded[one], alone)
        _, own_window = convolve(x[one, :length, 0], window[one], weight, None, None)
        assert torch.equal(padded_window[one], own_window)


def test_a_convolution_in_pieces_is_the_whole():
    x, weight, bias = random(S, 20, P), random(P, 1, 4), random(P)
    start = torch.zeros(S, P, 3, dtype=torch.float64)
    whole, last = convolve(x, start, weight, bias, None)
    window, pieces = start, []
    for piece in (x[:, :2], x[:, 2:3], x[:, 3:13], x[:, 13:]):
        y, window = convolve(piece, window, weight, bias, None)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    assert torch.equal(window, last)


def test_chunks_cover_all_tokens():
    assert [(chunk.start, chunk.stop) for chunk in scans.chunks(130)] == [(0, 64), (64, 128), (128, 192)]


def test_large_decays_of_mamba_2_lose_no_digits():
    """After a thousandfold decay inside of a chunk, tokens next to each other still see each other as they should."""
    scan, (x, dt, b, c), fixed, state = mamba_2_case()
    dt = dt * torch.where(torch.arange(Q) % 50 < 40, 60.0, 1e-3)[:, None]
    arguments = [x, dt, fixed[2], b, c, state]
    expected, _ = scan(*arguments)
    found, _ = scan(*(each.float() for each in arguments))
    difference = (found - expected).abs() / expected.abs().clamp(min=1.0)
    assert float(difference.max()) < 1e-5
