"""Speculation is lossless: the tokens that come out have the target's distribution, and a broken rule would be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flambeau.llm.core.sequence import seed_key
from flambeau.llm.sampling import rng
from flambeau.llm.sampling.sampler import NO_TOKEN
from flambeau.llm.speculation import rejection_sampler as rules
from support.statistics import chi_square_p

NUM = 20_000
VOCAB = 5
STRIDE = 8  # positions between two simulated texts
UNLIKELY = 1e-4
BROKEN = 1e-6


def distribution(*weights: float) -> Tensor:
    return torch.tensor(weights) / sum(weights)


PAIRS = {
    "equal": (distribution(5, 3, 1, 1, 2), distribution(5, 3, 1, 1, 2)),
    "near": (distribution(5, 3, 1, 1, 2), distribution(4, 4, 1, 2, 1)),
    "far": (distribution(9, 4, 2, 1, 1), distribution(1, 1, 2, 5, 9)),
    "hardly anything in common": (distribution(6, 3, 1, 0, 0), distribution(0, 0, 1, 4, 6)),
    "a sure target": (distribution(0, 1, 0, 0, 0), distribution(1, 1, 1, 1, 1)),
    "a sure draft": (distribution(4, 3, 2, 1, 1), distribution(0, 0, 0, 1, 0)),
}


@dataclass
class Texts:
    """Many texts at a time, whose second token depends on the first, for the target and for the draft."""

    p_V: Tensor
    q_V: Tensor

    def __post_init__(self) -> None:
        self.keys_S = torch.full((NUM,), seed_key(11))
        self.positions_S = torch.arange(NUM) * STRIDE
        self.p_VV = torch.stack([self.p_V.roll(i) for i in range(VOCAB)])  # after each first token
        self.q_VV = torch.stack([self.q_V.roll(2 * i) for i in range(VOCAB)])

    def drawn(self, weights_SV: Tensor, offset: int) -> Tensor:
        """The noise is the one that the target would use."""
        tokens = torch.arange(VOCAB)
        return (weights_SV.log() + rng.gumbel(self.keys_S, self.positions_S + offset, tokens, rng.DRAW)).argmax(-1)


Rule = Callable[[Tensor, Tensor | None, Tensor, Tensor, "Texts", int], tuple[Tensor, Tensor]]


def by_ratio(p_SWV: Tensor, q_SKV: Tensor | None, ids_SK: Tensor, lengths_S: Tensor, texts: Texts, offset: int):
    return rules.accept_by_ratio(p_SWV, q_SKV, ids_SK, lengths_S, texts.keys_S, texts.positions_S + offset)


def by_match(p_SWV: Tensor, q_SKV: Tensor | None, ids_SK: Tensor, lengths_S: Tensor, texts: Texts, offset: int):
    draws = [texts.drawn(p_SWV[:, place], offset + place) for place in range(p_SWV.shape[1])]
    draws_SW = torch.stack(draws, 1).tolist()
    found = [rules.accept_matching(*each) for each in zip(draws_SW, ids_SK.tolist(), strict=True)]
    return torch.tensor([len(each) - 1 for each in found]), torch.tensor([each[-1] for each in found])


def two_tokens(texts: Texts, rule: Rule, *, is_lookup: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The first two tokens of every text, and how many of the first round's two proposals were kept."""
    p_SV, q_SV = texts.p_V.expand(NUM, -1), texts.q_V.expand(NUM, -1)
    first_S = torch.full((NUM,), 3) if is_lookup else texts.drawn(q_SV, 0)
    q_next_SV, p_next_SV = texts.q_VV[first_S], texts.p_VV[first_S]
    second_S = torch.full((NUM,), 1) if is_lookup else texts.drawn(q_next_SV, 1)
    p_SWV = torch.stack([p_SV, p_next_SV, texts.p_VV[second_S]], 1)
    q_SKV = None if is_lookup else torch.stack([q_SV, q_next_SV], 1)
    ids_SK = torch.stack([first_S, second_S], 1)
    kept_S, next_S = rule(p_SWV, q_SKV, ids_SK, torch.full((NUM,), 2), texts, 0)
    one_S = torch.where(kept_S >= 1, first_S, next_S)
    # Where the first proposal was refused, another round begins at the second token, with the same noise as before.
    q_again_SV, p_again_SV = texts.q_VV[one_S], texts.p_VV[one_S]
    again_S = torch.full((NUM,), 1) if is_lookup else texts.drawn(q_again_SV, 1)
    q_SKV = None if is_lookup else q_again_SV.unsqueeze(1)
    p_SWV = torch.stack([p_again_SV, texts.p_VV[again_S]], 1)
    kept_again_S, next_again_S = rule(p_SWV, q_SKV, again_S.unsqueeze(1), torch.ones(NUM, dtype=torch.long), texts, 1)
    two_S = torch.where(kept_again_S >= 1, again_S, next_again_S)
    return one_S, torch.where(kept_S >= 2, second_S, torch.where(kept_S == 1, next_S, two_S)), kept_S


def p_value(tokens: Tensor, weights: Tensor) -> float:
    """How probable it is that these tokens were drawn by these weights."""
    counts = tokens.bincount(minlength=len(weights)).double()
    if counts[weights == 0].sum() > 0:
        return 0.0
    counts, expected = counts[weights > 0], weights[weights > 0].double()
    if len(counts) == 1:
        return 1.0
    return chi_square_p(counts, (expected / expected.sum() * counts.sum()))


def p_values(texts: Texts, rule: Rule, *, is_lookup: bool = False) -> tuple[float, float]:
    """Of the first token, and of the first two together."""
    one_S, two_S, _ = two_tokens(texts, rule, is_lookup=is_lookup)
    joint = texts.p_V.unsqueeze(1) * texts.p_VV
    return p_value(one_S, texts.p_V), p_value(one_S * VOCAB + two_S, joint.flatten())


@pytest.mark.parametrize("is_lookup", [False, True], ids=["draft", "lookup"])
@pytest.mark.parametrize("rule", [by_ratio, by_match])
@pytest.mark.parametrize("pair", PAIRS)
def test_kept_tokens_have_the_targets_distribution(pair: str, rule: Rule, is_lookup: bool):
    first, both = p_values(Texts(*PAIRS[pair]), rule, is_lookup=is_lookup)
    assert first > UNLIKELY
    assert both > UNLIKELY


def resampled_from_p(monkeypatch: pytest.MonkeyPatch) -> Rule:
    """The commonest mistake: after a refusal, draw from the whole of p."""

    def whole(p_SWV: Tensor, _q: object, _ids: object, _lengths: object, kept_S: Tensor) -> Tensor:
        return p_SWV[torch.arange(len(kept_S)), kept_S]

    monkeypatch.setattr(rules, "residual", whole)
    return by_ratio


def always_accepted(monkeypatch: pytest.MonkeyPatch) -> Rule:
    monkeypatch.setattr(rng, "uniform", lambda *given: torch.zeros(len(given[0]), given[1].shape[1], 1))
    return by_ratio


def rest_without_q(monkeypatch: pytest.MonkeyPatch) -> Rule:
    """After a refusal, only the refused token is taken out of p, as if nothing else could have been proposed."""
    rest = rules.residual
    monkeypatch.setattr(rules, "residual", lambda p, _q, ids, lengths, kept: rest(p, None, ids, lengths, kept))
    return by_ratio


def drawn_again(monkeypatch: pytest.MonkeyPatch) -> Rule:
    """The target's draw is looked at, and after a mismatch another one is made."""

    def rule(p_SWV: Tensor, q: object, ids_SK: Tensor, lengths_S: Tensor, texts: Texts, offset: int):
        kept_S, _ = by_match(p_SWV, None, ids_SK, lengths_S, texts, offset)
        p_SV = p_SWV[torch.arange(NUM), kept_S]
        return kept_S, rules.draw(p_SV, texts.keys_S, texts.positions_S + offset + kept_S)

    return rule


def same_chance_everywhere(monkeypatch: pytest.MonkeyPatch) -> Rule:
    """All positions of a text use one and the same number to decide."""
    uniform = rng.uniform

    def first_only(keys: Tensor, positions: Tensor, tokens: Tensor, purpose: int) -> Tensor:
        return uniform(keys, positions - positions % STRIDE, tokens, purpose)

    monkeypatch.setattr(rng, "uniform", first_only)
    return by_ratio


@pytest.mark.parametrize(
    "broken", [resampled_from_p, always_accepted, rest_without_q, drawn_again, same_chance_everywhere]
)
def test_a_broken_rule_would_be_seen(broken: Callable[..., Rule], monkeypatch: pytest.MonkeyPatch):
    texts = Texts(*PAIRS["near"])
    assert min(p_values(texts, broken(monkeypatch))) < BROKEN


def test_as_many_proposals_are_kept_as_p_and_q_have_in_common():
    """No rule can keep more; equal ones lose nothing."""
    for p_V, q_V in PAIRS.values():
        _, _, kept_S = two_tokens(Texts(p_V, q_V), by_ratio)
        assert (kept_S >= 1).double().mean().item() == pytest.approx(torch.minimum(p_V, q_V).sum().item(), abs=0.02)
    _, _, matched_S = two_tokens(Texts(*PAIRS["near"]), by_match)
    assert 0.5 < (matched_S >= 1).double().mean() < torch.minimum(*PAIRS["near"]).sum()


def test_equal_draft_and_target_always_match():
    """They draw with the same rng."""
    _, _, kept_S = two_tokens(Texts(*PAIRS["equal"]), by_match)
    assert (kept_S >= 1).all()


def test_proposals_are_kept_up_to_the_first_mismatch():
    assert rules.accept_matching([1, 2, 3, 4], [1, 2, 3]) == [1, 2, 3, 4]
    assert rules.accept_matching([1, 9, 3, 4], [1, 2, 3]) == [1, 9]
    assert rules.accept_matching([9, 2, 3, 4], [1, 2, 3]) == [9]
    assert rules.accept_matching([1, 2, 3, 4], [1, 2]) == [1, 2, 3]
    assert rules.accept_matching([1, 2, 3, 4], []) == [1]


def test_only_as_many_as_were_proposed_are_kept():
    p = torch.zeros(2, 3, VOCAB)
    p[:, 0, 2] = p[:, 1, 3] = p[:, 2, 4] = 1.0
    ids, keys = torch.tensor([[2, 3], [2, 3]]), torch.tensor([seed_key(1)] * 2)
    kept, after = rules.accept_by_ratio(p, None, ids, torch.tensor([1, 0]), keys, torch.tensor([5, 6]))
    assert kept.tolist() == [1, 0]
    assert after.tolist() == [3, 2]


def test_broken_probabilities_keep_nothing_of_their_row():
    p = torch.full((2, 2, VOCAB), 0.2)
    p[0] = torch.nan
    ids, keys = torch.tensor([[2], [2]]), torch.tensor([seed_key(1)] * 2)
    kept, after = rules.accept_by_ratio(p, p[:, :1], ids, torch.tensor([1, 1]), keys, torch.tensor([5, 5]))
    assert kept.tolist() == [0, 1]
    assert after[0] == NO_TOKEN
    assert after[1] >= 0
