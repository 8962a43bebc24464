"""Verifying a proposal: which of its tokens each sequence keeps, and the token that comes after them.

Shapes: S sequences · K tokens proposed · W = K + 1 places · R sequences of which the distribution alone is promised ·
V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from flambeau.llm.sampling.rows import Row
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.accept import by_ratio, matching
from flambeau.llm.speculation.proposal import Proposal, by_promise, part


def verify(sampler: Sampler, logits_SWV: Tensor, rows: Many[Row], proposal: Proposal) -> list[list[int]]:
    """The new tokens of each row: the proposals that it keeps and one more, or NO_TOKEN at the end."""
    exact, loose = by_promise(rows)
    ids_SK = proposal.ids_SK.to(logits_SWV.device)
    found: list[list[int]] = [[] for _ in rows]
    for places, way in ((exact, _matched), (loose, _weighed)):
        if places:
            some, logits, ids = [rows[i] for i in places], part(logits_SWV, places), part(ids_SK, places)
            lengths = [proposal.lengths[i] for i in places]
            for i, new_ids in zip(places, way(sampler, some, logits, ids, lengths, proposal.q_RKV), strict=True):
                found[i] = new_ids
    return found


def matched(draws: Many[list[int]], proposal: Proposal) -> list[list[int]]:
    """The same where it is known already what the target draws at every place."""
    rows = zip(draws, proposal.ids_SK.tolist(), proposal.lengths, strict=True)
    return [matching(drawn, proposed[:length]) for drawn, proposed, length in rows]


def _matched(
    sampler: Sampler, rows: Many[Row], logits_SWV: Tensor, ids_SK: Tensor, lengths: Many[int], _: Tensor | None
) -> list[list[int]]:
    draws_SW = sampler.sample(logits_SWV, rows, ahead_SA=ids_SK)
    both, num_places = torch.cat([draws_SW, ids_SK], 1).tolist(), draws_SW.shape[1]
    return [
        matching(each[:num_places], each[num_places : num_places + length])
        for each, length in zip(both, lengths, strict=True)
    ]


def _weighed(
    sampler: Sampler, rows: Many[Row], logits_SWV: Tensor, ids_SK: Tensor, lengths: Many[int], q_SKV: Tensor | None
) -> list[list[int]]:
    p_SWV = sampler.scores(logits_SWV, rows, ahead_SA=ids_SK).softmax(-1)
    lengths_S = torch.tensor(lengths, device=ids_SK.device)
    positions_S = sampler.positions(rows, 1).squeeze(1)
    num_kept_S, next_S = by_ratio(p_SWV, q_SKV, ids_SK, lengths_S, sampler.keys(rows), positions_S)
    found = torch.cat([num_kept_S.unsqueeze(1), next_S.unsqueeze(1), ids_SK], 1).tolist()
    return [[*ids[:num_kept], next_id] for num_kept, next_id, *ids in found]
