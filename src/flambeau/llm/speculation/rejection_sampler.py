"""Verification of a proposal: which tokens each sequence accepts, and the token after them. Two rules, both exact.

`accept_matching` accepts a token while the target draws the same one: the text is the one without speculation, token
for token. `accept_by_ratio` accepts it with probability p/q and draws from the rest of p otherwise: the text has the
target's distribution, and more tokens are accepted.

Shapes: S sequences · K tokens proposed · W = K + 1 places · R sequences for which only the distribution is promised ·
V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling import rng
from flambeau.llm.sampling.logits_processors import argmax_tokens
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.speculator import Proposal, gather_rows, split_by_exactness


def verify(sampler: Sampler, logits_SWV: Tensor, states: Many[SamplingState], proposal: Proposal) -> list[list[int]]:
    """The new tokens of each sequence: the accepted ones and one more, or NO_TOKEN at the end."""
    exact, loose = split_by_exactness(states)
    ids_SK = proposal.ids_SK.to(logits_SWV.device)
    found: list[list[int]] = [[] for _ in states]
    for rows, rule in ((exact, _verify_matching), (loose, _verify_by_ratio)):
        if rows:
            some, logits, ids = [states[i] for i in rows], gather_rows(logits_SWV, rows), gather_rows(ids_SK, rows)
            lengths = [proposal.lengths[i] for i in rows]
            for i, new_ids in zip(rows, rule(sampler, some, logits, ids, lengths, proposal.q_RKV), strict=True):
                found[i] = new_ids
    return found


def verify_draws(draws: Many[list[int]], proposal: Proposal) -> list[list[int]]:
    """The same, given what the target draws at every place."""
    rows = zip(draws, proposal.ids_SK.tolist(), proposal.lengths, strict=True)
    return [accept_matching(drawn, proposed[:length]) for drawn, proposed, length in rows]


def _verify_matching(
    sampler: Sampler,
    states: Many[SamplingState],
    logits_SWV: Tensor,
    ids_SK: Tensor,
    lengths: Many[int],
    _: Tensor | None,
) -> list[list[int]]:
    draws_SW = sampler.sample(logits_SWV, states, ahead_SA=ids_SK)
    both, num_places = torch.cat([draws_SW, ids_SK], 1).tolist(), draws_SW.shape[1]
    return [
        accept_matching(each[:num_places], each[num_places : num_places + length])
        for each, length in zip(both, lengths, strict=True)
    ]


def _verify_by_ratio(
    sampler: Sampler,
    states: Many[SamplingState],
    logits_SWV: Tensor,
    ids_SK: Tensor,
    lengths: Many[int],
    q_SKV: Tensor | None,
) -> list[list[int]]:
    p_SWV = sampler.scores(logits_SWV, states, ahead_SA=ids_SK).softmax(-1)
    lengths_S = torch.tensor(lengths, device=ids_SK.device)
    positions_S = sampler.positions(states, 1).squeeze(1)
    num_accepted_S, next_S = accept_by_ratio(p_SWV, q_SKV, ids_SK, lengths_S, sampler.keys(states), positions_S)
    found = torch.cat([num_accepted_S.unsqueeze(1), next_S.unsqueeze(1), ids_SK], 1).tolist()
    return [[*ids[:num_accepted], next_id] for num_accepted, next_id, *ids in found]


def accept_matching(draws: Many[int], proposed: Many[int]) -> list[int]:
    """The proposed tokens that the target draws too, and the target's own token after them."""
    num_accepted = 0
    while num_accepted < len(proposed) and draws[num_accepted] == proposed[num_accepted]:
        num_accepted += 1
    return [*draws[: num_accepted + 1]]


def accept_by_ratio(
    p_SWV: Tensor, q_SKV: Tensor | None, ids_SK: Tensor, lengths_S: Tensor, keys_S: Tensor, positions_S: Tensor
) -> tuple[Tensor, Tensor]:
    """How many tokens are accepted [S], and the token after them [S], from probabilities.

    `q_SKV` is None if each token was the only one that could be proposed. `positions_S` belong to the first places.
    """
    places_K = torch.arange(ids_SK.shape[1], device=ids_SK.device)
    positions_SK = positions_S.unsqueeze(1) + places_K
    chance_SK = rng.uniform(keys_S.unsqueeze(1), positions_SK, ids_SK.new_zeros(1), rng.ACCEPT).squeeze(-1)
    p_of_ids_SK = p_SWV[:, :-1].gather(-1, ids_SK.unsqueeze(-1)).squeeze(-1)
    if q_SKV is not None:
        chance_SK = chance_SK * q_SKV.gather(-1, ids_SK.unsqueeze(-1)).squeeze(-1)
    is_accepted_SK = (chance_SK < p_of_ids_SK) & (places_K < lengths_S.unsqueeze(1))
    num_accepted_S = is_accepted_SK.long().cumprod(1).sum(1)  # those before the first rejected one
    residual_SV = residual(p_SWV, q_SKV, ids_SK, lengths_S, num_accepted_S)
    return num_accepted_S, draw(residual_SV, keys_S, positions_S + num_accepted_S)


def residual(p_SWV: Tensor, q_SKV: Tensor | None, ids_SK: Tensor, lengths_S: Tensor, num_accepted_S: Tensor) -> Tensor:
    """The weights [S, V] of the token after the accepted ones: p if all were accepted, else max(p - q, 0)."""
    rows_S = torch.arange(len(num_accepted_S), device=num_accepted_S.device)
    p_SV = p_SWV[rows_S, num_accepted_S]
    last_S = num_accepted_S.clamp(max=ids_SK.shape[1] - 1)
    if q_SKV is None:
        more_SV = p_SV.scatter(1, ids_SK[rows_S, last_S].unsqueeze(1), 0.0)
    else:
        more_SV = (p_SV - q_SKV[rows_S, last_S]).clamp_(min=0)
    # If rounding leaves nothing, p and q are equal; if q is not finite, nothing of it was accepted.
    is_whole_S = (num_accepted_S == lengths_S) | ~(more_SV.sum(1) > 0)
    return torch.where(is_whole_S.unsqueeze(1), p_SV, more_SV)


def draw(weights_SV: Tensor, keys_S: Tensor, positions_S: Tensor) -> Tensor:
    """A token [S] by these weights, or NO_TOKEN if they are not finite."""
    tokens_V = torch.arange(weights_SV.shape[1], device=weights_SV.device)
    noise_SV = rng.gumbel(keys_S, positions_S, tokens_V, rng.RESIDUAL)
    return argmax_tokens(weights_SV.log() + noise_SV)
