"""Draws with a small top-k on a CPU, in numpy: the same as filters.py and rng.py at half the cost per call.

Shapes: S sequences · W places of each · V vocabulary · C candidates · settings are [S, 1, 1]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.sampling import rng
from flambeau.llm.sampling.filters import SMALL_TOP_K, TokenFilter

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
