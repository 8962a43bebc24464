"""Attention in plain PyTorch: over the keys and values in the cache, or over nothing but the tokens given.

This is the twin that every faster kernel is compared with.

Shapes: T tokens of the step · S sequences · Q tokens of each in this step · C cached tokens · H heads · G key-value
heads · D head size
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs


class WholeAttention:
    """Without a cache: the tokens of […, T] are whole sequences, and each looks at those before it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """From q […, T, H, D] and k, v […, T, G, D] to […, T, H, D]."""
        length = q.shape[-3]
        positions = torch.arange(length, device=q.device)
        mask = visible(positions, positions, window)
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return y.transpose(-3, -2)


class PagedAttention:
    """Over the blocks of a cache, to which the tokens of this step are added first."""

    def __init__(self, cache: KVCache, inputs: StepInputs) -> None:
        self._cache = cache
        self._inputs = inputs

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """From q [T, H, D] and k, v [T, G, D] to [T, H, D]."""
        cache, inputs = self._cache, self._inputs
        cache.write(layer, inputs.slots_T, k, v)
        attend = attend_evenly if inputs.query_len else attend_each
        return attend(q, cache.keys[layer], cache.values[layer], inputs, scale, window)


def attend_evenly(
    q_THD: Tensor, keys: Tensor, values: Tensor, inputs: StepInputs, scale: float, window: int | None
) -> Tensor:
    """Every sequence has the same number of tokens, so that shapes depend on nothing else."""
    length = inputs.query_len
    q_SHQD = q_THD.view(-1, length, *q_THD.shape[1:]).transpose(1, 2)
    k_SGCD = keys[inputs.block_tables_SB].flatten(1, 2).transpose(1, 2)
    v_SGCD = values[inputs.block_tables_SB].flatten(1, 2).transpose(1, 2)
    places_C = torch.arange(k_SGCD.shape[2], device=keys.device)
    positions_SQ = inputs.positions_T.view(-1, length)
    mask_SQC = visible(positions_SQ, places_C, window)
    # What a block held before may be no numbers, and a weight of 0 does not undo that.
    is_old = (places_C > positions_SQ.amax(1, keepdim=True))[:, None, :, None]
    k_SGCD, v_SGCD = k_SGCD.masked_fill_(is_old, 0), v_SGCD.masked_fill_(is_old, 0)
    y_SHQD = F.scaled_dot_product_attention(
        q_SHQD, k_SGCD, v_SGCD, attn_mask=mask_SQC.unsqueeze(1), scale=scale, enable_gqa=True
    )
    return y_SHQD.transpose(1, 2).flatten(0, 1)


def attend_each(
    q_THD: Tensor, keys: Tensor, values: Tensor, inputs: StepInputs, scale: float, window: int | None
) -> Tensor:
    """One sequence after another, each with its own number of tokens."""
    starts = inputs.query_starts.tolist()
    pieces = []
    for i, length in enumerate(inputs.context_lens_S.tolist()):
        tokens = slice(starts[i], starts[i + 1])
        blocks = inputs.block_tables_SB[i, : -(-length // keys.shape[1])]
        k_GCD = keys[blocks].flatten(0, 1)[:length].transpose(0, 1)
        v_GCD = values[blocks].flatten(0, 1)[:length].transpose(0, 1)
        mask_QC = visible(inputs.positions_T[tokens], torch.arange(length, device=keys.device), window)
        q_HQD = q_THD[tokens].transpose(0, 1)
        y_HQD = F.scaled_dot_product_attention(
            q_HQD.unsqueeze(0), k_GCD.unsqueeze(0), v_GCD.unsqueeze(0), attn_mask=mask_QC, scale=scale, enable_gqa=True
        )
        pieces.append(y_HQD[0].transpose(0, 1))
    return torch.cat(pieces)


def visible(positions: Tensor, places_C: Tensor, window: int | None) -> Tensor:
    """Which of the cached places […, Q, C] a token at each position […, Q] may look at."""
    behind = positions.unsqueeze(-1) - places_C
    mask = behind >= 0
    return mask if window is None else mask & (behind < window)
