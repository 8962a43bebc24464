"""Verifying a proposal: which of its tokens each sequence keeps, and the token that comes after them.

Shapes: S sequences · K tokens proposed · W = K + 1 places · R sequences of which the distribution alone is promised ·
V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from flambeau.llm.rows import Row
from flambeau.llm.sampler import Sampler
from flambeau.llm.speculation.accept import by_ratio, match
from flambeau.llm.speculation.proposal import Proposal, unrepeatable


def verify(sampler: Sampler, logits_SWV: Tensor, rows: Many[Row], proposal: Proposal) -> list[list[int]]:
    """The new tokens of each row: the proposals that it keeps and one more, or NO_TOKEN at the end."""
    ids_SK = proposal.ids_SK
    lengths_S = torch.tensor(proposal.lengths, device=ids_SK.device)
    loose = unrepeatable(rows)
    if loose:
        scores_SWV = sampler.scores(logits_SWV, rows, ahead_SA=ids_SK)
        num_kept_S, next_S = match(sampler.draw(scores_SWV, rows), ids_SK, lengths_S)
        num_kept_S[loose], next_S[loose] = by_ratio(
            scores_SWV[loose].softmax(-1),
            proposal.q_RKV,
            ids_SK[loose],
            lengths_S[loose],
            sampler.keys(rows)[loose],
            sampler.positions(rows, 1).squeeze(1)[loose],
        )
    else:
        num_kept_S, next_S = match(sampler.sample(logits_SWV, rows, ahead_SA=ids_SK), ids_SK, lengths_S)
    found = torch.cat([num_kept_S.unsqueeze(1), next_S.unsqueeze(1), ids_SK], 1).tolist()
    return [[*ids[:num_kept], next_id] for num_kept, next_id, *ids in found]
