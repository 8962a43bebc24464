"""sample_round: the tokens of one round, sampled place by place from the logits of whatever proposes them.

Shapes: S sequences · K tokens proposed · A of them so far · R sequences for which only the distribution is promised ·
V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.speculator import Proposal, gather_rows, scatter_rows, split_by_exactness

# A place, and the tokens [S] of the place before it, to logits [S, V]; before the first place there are none.
LogitsOfPlace = Callable[[int, Tensor | None], Tensor]


def sample_round(
    sampler: Sampler, states: Many[SamplingState], lengths: list[int], num_ahead: int, logits_of: LogitsOfPlace
) -> Proposal:
    """Sample with the random numbers that the target will use."""
    exact, loose = split_by_exactness(states)
    ids_KS = torch.empty(num_ahead, len(states), dtype=torch.int64, device=sampler.device)
    q_RV: list[Tensor] = []
    for place in range(num_ahead):
        logits_S1V = logits_of(place, ids_KS[place - 1] if place else None).unsqueeze(1)
        ahead_SA = ids_KS[:place].T
        if loose:
            ids_S, q = sample_with_q(sampler, logits_S1V, ahead_SA, states, exact, loose)
            q_RV.append(q)
        else:
            ids_S = sampler.sample(logits_S1V, states, ahead_SA=ahead_SA, offset=place).view(-1)
        # Where logits are not finite, token 0 is proposed, which is verified like any other.
        torch.clamp(ids_S, min=0, out=ids_KS[place])
    return Proposal(ids_KS.T, lengths, torch.stack(q_RV, 1) if loose else None)


def sample_with_q(
    sampler: Sampler,
    logits_S1V: Tensor,
    ahead_SA: Tensor,
    states: Many[SamplingState],
    exact: list[int],
    loose: list[int],
) -> tuple[Tensor, Tensor]:
    """Tokens [S], and the probabilities [R, V] that the loose ones were drawn from."""
    offset = ahead_SA.shape[1]
    ids_S1 = ahead_SA.new_empty(len(states), 1)
    if exact:
        some, ahead = [states[i] for i in exact], gather_rows(ahead_SA, exact)
        ids = sampler.sample(gather_rows(logits_S1V, exact), some, ahead_SA=ahead, offset=offset)
        scatter_rows(ids_S1, exact, ids)
    some, ahead = [states[i] for i in loose], gather_rows(ahead_SA, loose)
    scores_R1V = sampler.scores(gather_rows(logits_S1V, loose), some, ahead_SA=ahead, offset=offset)
    scatter_rows(ids_S1, loose, sampler.draw(scores_R1V, some, offset=offset))
    return ids_S1.squeeze(1), scores_R1V.squeeze(1).softmax(-1)
