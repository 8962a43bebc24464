"""Top-k, top-p and min-p as thresholds on scores. Tokens as likely as the last one that passes also pass.

Shapes: S sequences · W places of each · V vocabulary · C candidates, in no order · settings are [S, 1, 1]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.sampling import rng

SMALL_TOP_K = 64  # up to this top-k, the candidates are found first and all else is done to them alone


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFilter:
    """The filter settings of several sequences; None: no sequence has one."""

    top_k: Tensor | None = None  # integers; the vocabulary's size for sequences without one
    top_p: Tensor | None = None
    log_min_p: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.top_k is None and self.top_p is None and self.log_min_p is None

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


Array = NDArray[Any]


class TopKDraws:
    """The settings of several sequences with a small top-k, as arrays."""

    def __init__(self, keys_S1: Tensor, temperature: Tensor, token_filter: TokenFilter) -> None:
        settings = (token_filter.top_k, token_filter.top_p, token_filter.log_min_p)
        self._keys_S1, self._temperature = keys_S1.numpy(), temperature.numpy()
        self._top_k, self._top_p, self._log_min_p = (None if each is None else each.numpy() for each in settings)

    def draw(self, logits_SWV: Array, positions_SW: Array) -> tuple[Array, Array]:
        """The largest score with its noise [S, W], and its token."""
        size = logits_SWV.shape[-1]
        count = min(SMALL_TOP_K, size)
        ids = np.argpartition(logits_SWV, size - count, -1)[..., size - count :]
        scores = _take_last(logits_SWV, ids) / self._temperature
        scores = np.where(scores < self._threshold(np.sort(scores, -1)), -np.inf, scores)
        scores += rng.gumbel_array(self._keys_S1, positions_SW, ids, rng.DRAW)
        place = scores.argmax(-1)[..., None]
        return scores.max(-1), _take_last(ids, place)[..., 0]

    def _threshold(self, ascending: Array) -> Array:
        """As `TokenFilter.threshold`."""
        lowest: Array = np.float32(-np.inf)  # type: ignore[assignment]
        if self._top_k is not None:
            places = np.broadcast_to(ascending.shape[-1] - self._top_k, (*ascending.shape[:2], 1))
            lowest = _take_last(ascending, places)
        if self._top_p is not None:
            lowest = np.maximum(lowest, _nucleus(np.where(ascending < lowest, -np.inf, ascending), self._top_p))
        if self._log_min_p is not None:
            lowest = np.maximum(lowest, ascending[..., -1:] + self._log_min_p)
        return lowest


def _nucleus(ascending: Array, top_p: Array) -> Array:
    """As `filters.nucleus`."""
    with np.errstate(invalid="ignore"):  # sequences with NaN get NO_TOKEN in the end
        shares = np.exp(ascending - ascending[..., -1:])
    cumulative = np.cumsum(shares, -1)
    is_out = cumulative <= (1 - top_p) * cumulative[..., -1:]
    is_out[..., -1:] = False
    lowest: Array = np.where(is_out, np.inf, ascending).min(-1, keepdims=True)
    return lowest


def _take_last(array: Array, places: Array) -> Array:
    """As `np.take_along_axis` along the last axis, without its overhead."""
    flat = array.reshape(-1, array.shape[-1])
    wanted = places.reshape(len(flat), -1)
    taken: Array = flat[np.arange(len(flat))[:, None], wanted].reshape(places.shape)
    return taken
