"""Which cached tokens the tokens of a step attend to, by the scores of an indexer; in plain PyTorch.

Shapes: … any leading dimensions (sequences) · Q tokens of a step · C cached tokens · B blocks of them · I heads of an
indexer · K size of a head · G key-value heads, or 1 for all
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.models.indexer import BlockChoice, MeanPools, Pools, Selection
from flambeau.llm.models.moe import needs_static_shapes

NUMBERS_AT_ONCE = 1 << 26  # scores of single heads: a quarter of a gigabyte


def chosen_keys(selection: Selection, k_CK: Tensor, mask_QC: Tensor) -> Tensor:
    """Which keys […, G, Q, C] are attended to, of those where the mask […, Q, C] is true.

    `selection` has queries […, Q, I, K] and weights […, Q, I], and the cache keys […, C, K].
    """
    if selection.pools is not None:
        return chosen_pools(selection, selection.pools, k_CK, mask_QC)
    num_cached, blocks = mask_QC.shape[-1], selection.blocks
    count = selection.num_chosen if blocks is None else selection.num_chosen * blocks.size
    is_static = needs_static_shapes(k_CK)
    if not is_static and num_cached <= count:
        return mask_QC.unsqueeze(-3)
    tokens_at_once = max(1, NUMBERS_AT_ONCE // (selection.q.shape[-2] * num_cached))
    if is_static or selection.q.shape[-3] <= tokens_at_once:
        return chosen_at_once(selection, k_CK, mask_QC)
    queries = torch.split(selection.q, tokens_at_once, dim=-3)
    masks = torch.split(mask_QC, tokens_at_once, dim=-2)
    weights = selection.weights
    own = [None] * len(masks) if weights is None else torch.split(weights, tokens_at_once, dim=-2)
    parts = [
        chosen_at_once(selection._replace(q=q, weights=weight), k_CK, mask)
        for q, weight, mask in zip(queries, own, masks, strict=True)
    ]
    return torch.cat(parts, dim=-2)


def chosen_at_once(selection: Selection, k_CK: Tensor, mask_QC: Tensor) -> Tensor:
    """The same for few enough tokens that all scores are held at a time."""
    if selection.blocks is not None:
        return in_chosen_blocks(selection.q, k_CK, mask_QC, selection.num_chosen, selection.blocks)
    assert selection.weights is not None
    found = best(scores(selection.q, selection.weights, k_CK), mask_QC, selection.num_chosen)
    return (mask_QC & found).unsqueeze(-3)


def in_chosen_blocks(q: Tensor, k_CK: Tensor, mask_QC: Tensor, count: int, blocks: BlockChoice) -> Tensor:
    """The keys […, G, Q, C] in the best blocks of each head, by their best key, and in the last ones."""
    scores_IQC = q.float().transpose(-3, -2) @ k_CK.float().transpose(-1, -2).unsqueeze(-3)
    allowed = scores_IQC.masked_fill(~mask_QC.unsqueeze(-3), -torch.inf)
    num_cached = mask_QC.shape[-1]
    num_blocks = -(-num_cached // blocks.size)
    allowed = F.pad(allowed, (0, num_blocks * blocks.size - num_cached), value=-torch.inf)
    scores_IQB = torch.unflatten(allowed, -1, (num_blocks, blocks.size)).amax(dim=-1)
    if blocks.num_local:
        last_Q1 = (mask_QC.sum(dim=-1, keepdim=True) - 1) // blocks.size  # the block of the token itself
        behind_QB = last_Q1 - torch.arange(num_blocks, device=q.device)
        is_local = (behind_QB >= 0) & (behind_QB < blocks.num_local)
        scores_IQB = scores_IQB.masked_fill(is_local.unsqueeze(-3), torch.inf)
    found_IQB = best(scores_IQB, scores_IQB > -torch.inf, count)
    found_GQB = found_IQB[..., blocks.first_head : blocks.first_head + blocks.num_heads, :, :]
    return found_GQB.repeat_interleave(blocks.size, dim=-1)[..., :num_cached] & mask_QC.unsqueeze(-3)


def chosen_pools(selection: Selection, pools: Pools | MeanPools, cached_CK: Tensor, mask_QC: Tensor) -> Tensor:
    """The same where groups of tokens are chosen; those of a group that is not complete are attended to, too."""
    size, num_cached = pools.size, mask_QC.shape[-1]
    groups = torch.unflatten(F.pad(mask_QC, (0, -num_cached % size)), -1, (-1, size))
    complete_QP = groups[..., -1]
    own = selection._replace(pools=None, num_chosen=selection.num_chosen // size)
    chosen_QP = chosen_keys(own, pools.keys(cached_CK), complete_QP).squeeze(-3)
    found = groups & (chosen_QP | ~complete_QP).unsqueeze(-1)
    return found.flatten(-2)[..., :num_cached].unsqueeze(-3)


def scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """How well keys […, C, K] match queries […, Q, I, K]: […, Q, C], in float32."""
    products = F.relu(q.float() @ k.float().transpose(-1, -2).unsqueeze(-3))
    return (weights.float().unsqueeze(-2) @ products).squeeze(-2)


def best(scores_QC: Tensor, mask_QC: Tensor, count: int) -> Tensor:
    """Where the largest scores are that the mask allows, so many in each row; of equal ones, the first.

    Scores are 0 where all heads of an indexer reject a key, so equal ones are common. Which of them topk takes depends
    on the number of columns: on other sequences of a step, and on the portions of a prompt.
    """
    allowed = scores_QC.masked_fill(~mask_QC, -torch.inf)
    # As many columns as are chosen, or more, whatever is cached: the shapes of a traced step hold for any cache.
    least_Q1 = F.pad(allowed, (0, count), value=-torch.inf).topk(count, dim=-1)[0][..., -1:]
    is_larger, is_equal = ~(allowed <= least_Q1), allowed == least_Q1  # NaN is the largest
    num_left_Q1 = count - is_larger.sum(dim=-1, keepdim=True)
    return is_larger | is_equal & (is_equal.cumsum(dim=-1, dtype=torch.int32) <= num_left_Q1)
