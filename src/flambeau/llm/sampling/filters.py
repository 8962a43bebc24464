"""Top-k, top-p and min-p as thresholds: which tokens a draw is made from. Tokens as likely as the last one stay in.

Shapes: S rows · W places of each row · V vocabulary · C tokens considered, in no order · per-row settings are [S, 1, 1]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 64  # up to so many, top-k finds its tokens first and everything else is done to them alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """The settings of several rows; None: no row has one."""

    top_k: Tensor | None = None  # whole numbers, the vocabulary's size where a row has none
    top_p: Tensor | None = None
    log_min_p: Tensor | None = None

    def threshold(self, ascending: Tensor) -> Tensor:
        """The smallest score [S, W, 1] that stays in, from sorted scores whose best ones are all there."""
        lowest: list[Tensor] = []
        if self.top_k is not None:
            places = (ascending.shape[-1] - self.top_k).expand(*ascending.shape[:2], 1)
            lowest.append(ascending.gather(-1, places))
        if self.top_p is not None:
            kept = ascending.masked_fill(ascending < lowest[0], -torch.inf) if lowest else ascending
            lowest.append(nucleus(kept, self.top_p))
        if self.log_min_p is not None:
            lowest.append(ascending[..., -1:] + self.log_min_p)
        return functools.reduce(torch.maximum, lowest)


def nucleus(ascending: Tensor, top_p: Tensor) -> Tensor:
    """The smallest score [S, W, 1] of the fewest best tokens that have a share of `top_p` together."""
    behind = F.softmax(ascending, -1).cumsum(-1)  # the share of a token and of all that are less likely
    out = behind <= 1 - top_p
    out[..., -1:] = False
    return ascending.masked_fill(out, torch.inf).amin(-1, keepdim=True)


def in_order(scores_SWV: Tensor) -> Tensor:
    """The scores in ascending order."""
    if scores_SWV.device.type != "cpu":
        return scores_SWV.sort(-1).values
    return torch.from_numpy(np.sort(scores_SWV.numpy(), -1))  # many times as fast as torch's own


def largest(scores_SWV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores [S, W, C] and their tokens, in no order."""
    if scores_SWV.device.type != "cpu":
        return torch.topk(scores_SWV, count, sorted=False)
    array = scores_SWV.numpy()
    ids = torch.from_numpy(np.argpartition(array, array.shape[-1] - count, -1)[..., -count:])
    return scores_SWV.gather(-1, ids), ids
