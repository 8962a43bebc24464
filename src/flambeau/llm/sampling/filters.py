"""Top-k, top-p and min-p as thresholds on scores. Tokens as likely as the last one that passes also pass.

Shapes: S sequences · W places of each · V vocabulary · C candidates, in no order · settings are [S, 1, 1]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

SMALL_TOP_K = 64  # up to this top-k, the candidates are found first and all else is done to them alone


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFilter:
    """The filter settings of several sequences; None: no sequence has one."""

    top_k: Tensor | None = None  # integers; the vocabulary's size for sequences without one
    top_p: Tensor | None = None
    log_min_p: Tensor | None = None

    def threshold(self, ascending: Tensor) -> Tensor:
        """The smallest score [S, W, 1] that passes, from sorted scores that include all the best ones."""
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
    """The smallest score [S, W, 1] of the fewest best tokens whose probabilities sum to `top_p`."""
    cumulative = F.softmax(ascending, -1).cumsum(-1)  # the share of a token and of all less likely ones
    is_out = cumulative <= 1 - top_p
    is_out[..., -1:] = False
    return ascending.masked_fill(is_out, torch.inf).amin(-1, keepdim=True)


def sort_ascending(scores_SWV: Tensor) -> Tensor:
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
