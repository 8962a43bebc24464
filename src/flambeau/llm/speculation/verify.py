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
from flambeau.llm.speculation.proposal import Proposal, by_promise, part


def verify(sampler: Sampler, logits_SWV: Tensor, rows: Many[Row], proposal: Proposal) -> list[list[int]]:
    """The new tokens of each row: the proposals that it keeps and one more, or NO_TOKEN at the end."""
    ids_SK = proposal.ids_SK
    lengths_S = torch.tensor(proposal.lengths, device=ids_SK.device)
    exact, loose = by_promise(rows)
    found_S2 = ids_SK.new_empty(len(rows), 2)  # how many are kept, and the next one
    if exact:
        some = [rows[i] for i in exact]
        given = part(logits_SWV, exact), part(ids_SK, exact), part(lengths_S, exact)
        found_S2[exact] = torch.stack(_matched(sampler, some, *given), 1)
    if loose:
        some = [rows[i] for i in loose]
        given = part(logits_SWV, loose), part(ids_SK, loose), part(lengths_S, loose)
        found_S2[loose] = torch.stack(_weighed(sampler, some, *given, proposal.q_RKV), 1)
    return [[*ids[:num_kept], next_id] for num_kept, next_id, *ids in torch.cat([found_S2, ids_SK], 1).tolist()]


def _matched(
    sampler: Sampler, rows: Many[Row], logits_SWV: Tensor, ids_SK: Tensor, lengths_S: Tensor
) -> tuple[Tensor, Tensor]:
    return match(sampler.sample(logits_SWV, rows, ahead_SA=ids_SK), ids_SK, lengths_S)


def _weighed(
    sampler: Sampler, rows: Many[Row], logits_SWV: Tensor, ids_SK: Tensor, lengths_S: Tensor, q_SKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    p_SWV = sampler.scores(logits_SWV, rows, ahead_SA=ids_SK).softmax(-1)
    return by_ratio(p_SWV, q_SKV, ids_SK, lengths_S, sampler.keys(rows), sampler.positions(rows, 1).squeeze(1))
