"""Which cached tokens the tokens of a step attend to, by the scores of an indexer; in plain PyTorch.

Shapes: … any leading dimensions (sequences) · Q tokens of a step · C cached tokens · I heads · K size of a head
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.models.indexer import Pools, Selection
from flambeau.llm.models.moe import needs_static_shapes

NUMBERS_AT_ONCE = 1 << 26  # scores of single heads: a quarter of a gigabyte


def chosen_keys(selection: Selection, k_CK: Tensor, mask_QC: Tensor) -> Tensor:
    """Which keys […, Q, C] are attended to, of those where the mask […, Q, C] is true.

    `selection` has queries […, Q, I, K] and weights […, Q, I], and the cache keys […, C, K].
    """
    if selection.pools is not None:
        return chosen_pools(selection, selection.pools, k_CK, mask_QC)
    count, num_cached = selection.num_chosen, mask_QC.shape[-1]
    is_static = needs_static_shapes(k_CK)
    if not is_static and num_cached <= count:
        return mask_QC
    tokens_at_once = max(1, NUMBERS_AT_ONCE // (selection.q.shape[-2] * num_cached))
    if is_static or selection.q.shape[-3] <= tokens_at_once:
        return mask_QC & best(scores(selection.q, selection.weights, k_CK), mask_QC, count)
    parts = zip(
        torch.split(selection.q, tokens_at_once, dim=-3),
        torch.split(selection.weights, tokens_at_once, dim=-2),
        torch.split(mask_QC, tokens_at_once, dim=-2),
        strict=True,
    )
    return torch.cat([mask & best(scores(q, weights, k_CK), mask, count) for q, weights, mask in parts], dim=-2)


def chosen_pools(selection: Selection, pools: Pools, cached_CK: Tensor, mask_QC: Tensor) -> Tensor:
    """The same where groups of tokens are chosen; those of a group that is not complete are attended to, too."""
    size, num_cached = pools.size, mask_QC.shape[-1]
    groups = torch.unflatten(F.pad(mask_QC, (0, -num_cached % size)), -1, (-1, size))
    complete_QP = groups[..., -1]
    own = selection._replace(pools=None, num_chosen=selection.num_chosen // size)
    chosen_QP = chosen_keys(own, pools.keys(cached_CK), complete_QP)
    found = groups & (chosen_QP | ~complete_QP).unsqueeze(-1)
    return found.flatten(-2)[..., :num_cached]


def scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """How well keys […, C, K] match queries […, Q, I, K]: […, Q, C], in float32."""
    products = F.relu(q.float() @ k.float().transpose(-1, -2).unsqueeze(-3))
    return (weights.float().unsqueeze(-2) @ products).squeeze(-2)


def best(scores_QC: Tensor, mask_QC: Tensor, count: int) -> Tensor:
    """Where the largest scores are that the mask allows, so many in each row."""
    allowed = scores_QC.masked_fill(~mask_QC, -torch.inf)
    # As many columns as are chosen, or more, whatever is cached: the shapes of a traced step hold for any cache.
    wide = F.pad(allowed, (0, count), value=-torch.inf)
    places = wide.topk(count, dim=-1)[1]
    return torch.zeros_like(wide, dtype=torch.bool).scatter(-1, places, True)[..., : scores_QC.shape[-1]]
