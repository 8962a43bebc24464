"""Which of the proposed tokens are kept, and what comes after them: two rules, both exact.

`matching` keeps a proposal while it is what the target draws anyway: the text is the one without speculation, token for
token. `by_ratio` keeps it with probability p/q and draws from the rest of p otherwise: the text has the target's
distribution, and more proposals are kept.

Shapes: S rows · K tokens proposed · W = K + 1 places · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flambeau.llm.sampling import noise
from flambeau.llm.sampling.sampler import chosen


def matching(draws: Sequence[int], proposed: Sequence[int]) -> list[int]:
    """The new tokens of a row: the proposals that are what the target draws, and the target's own after them."""
    num_kept = 0
    while num_kept < len(proposed) and draws[num_kept] == proposed[num_kept]:
        num_kept += 1
    return [*draws[: num_kept + 1]]


def by_ratio(
    p_SWV: Tensor, q_SKV: Tensor | None, ids_SK: Tensor, lengths_S: Tensor, keys_S: Tensor, positions_S: Tensor
) -> tuple[Tensor, Tensor]:
    """How many proposals are kept [S], and the token after them [S], from probabilities.

    Where `q_SKV` is None each token was the only one that could be proposed. `positions_S` are those of the first
    places.
    """
    places_K = torch.arange(ids_SK.shape[1], device=ids_SK.device)
    positions_SK = positions_S.unsqueeze(1) + places_K
    chance_SK = noise.uniform(keys_S.unsqueeze(1), positions_SK, ids_SK.new_zeros(1), noise.ACCEPT).squeeze(-1)
    p_of_ids_SK = p_SWV[:, :-1].gather(-1, ids_SK.unsqueeze(-1)).squeeze(-1)
    if q_SKV is not None:
        chance_SK = chance_SK * q_SKV.gather(-1, ids_SK.unsqueeze(-1)).squeeze(-1)
    is_kept_SK = (chance_SK < p_of_ids_SK) & (places_K < lengths_S.unsqueeze(1))
    num_kept_S = is_kept_SK.long().cumprod(1).sum(1)  # those before the first that is not
    rest_SV = rest(p_SWV, q_SKV, ids_SK, lengths_S, num_kept_S)
    return num_kept_S, draw(rest_SV, keys_S, positions_S + num_kept_S)


def rest(p_SWV: Tensor, q_SKV: Tensor | None, ids_SK: Tensor, lengths_S: Tensor, num_kept_S: Tensor) -> Tensor:
    """What the token after those kept is drawn from: p where all were kept, else what p has more than q."""
    rows_S = torch.arange(len(num_kept_S), device=num_kept_S.device)
    p_SV = p_SWV[rows_S, num_kept_S]
    last_S = num_kept_S.clamp(max=ids_SK.shape[1] - 1)
    if q_SKV is None:
        more_SV = p_SV.scatter(1, ids_SK[rows_S, last_S].unsqueeze(1), 0.0)
    else:
        more_SV = (p_SV - q_SKV[rows_S, last_S]).clamp_(min=0)
    # Where rounding leaves nothing, p and q are the same; where q is no numbers, nothing of it was kept.
    is_whole_S = (num_kept_S == lengths_S) | ~(more_SV.sum(1) > 0)
    return torch.where(is_whole_S.unsqueeze(1), p_SV, more_SV)


def draw(weights_SV: Tensor, keys_S: Tensor, positions_S: Tensor) -> Tensor:
    """A token [S] by these weights, or NO_TOKEN where they are no numbers."""
    tokens_V = torch.arange(weights_SV.shape[1], device=weights_SV.device)
    noise_SV = noise.gumbel(keys_S, positions_S, tokens_V, noise.RESIDUAL)
    return chosen(weights_SV.log() + noise_SV)
