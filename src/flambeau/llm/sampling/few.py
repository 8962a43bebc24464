"""Drawing from a few candidates on a CPU, in numpy: what `filters` and `noise` do, at half the price per call.

Shapes: S rows · W places of each row · V vocabulary · C candidates · per-row settings are [S, 1, 1]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.sampling import noise
from flambeau.llm.sampling.filters import FEW, Filter

Array = NDArray[Any]


class FewDraws:
    """The settings of several rows with a small top-k, as arrays."""

    def __init__(self, keys_S1: Tensor, temperature: Tensor, filter_: Filter) -> None:
        settings = (filter_.top_k, filter_.top_p, filter_.log_min_p)
        self._keys_S1, self._temperature = keys_S1.numpy(), temperature.numpy()
        self._top_k, self._top_p, self._log_min_p = (None if each is None else each.numpy() for each in settings)

    def draw(self, logits_SWV: Array, positions_SW: Array) -> tuple[Array, Array]:
        """The largest score with its noise [S, W], and its token."""
        size = logits_SWV.shape[-1]
        count = min(FEW, size)
        ids = np.argpartition(logits_SWV, size - count, -1)[..., size - count :]
        scores = _taken(logits_SWV, ids) / self._temperature
        scores = np.where(scores < self._threshold(np.sort(scores, -1)), -np.inf, scores)
        scores += noise.gumbel_array(self._keys_S1, positions_SW, ids, noise.DRAW)
        place = scores.argmax(-1)[..., None]
        return scores.max(-1), _taken(ids, place)[..., 0]

    def _threshold(self, ascending: Array) -> Array:
        """As `Filter.threshold`."""
        lowest: Array = np.float32(-np.inf)  # type: ignore[assignment]
        if self._top_k is not None:
            lowest = _taken(ascending, np.broadcast_to(ascending.shape[-1] - self._top_k, (*ascending.shape[:2], 1)))
        if self._top_p is not None:
            lowest = np.maximum(lowest, _nucleus(np.where(ascending < lowest, -np.inf, ascending), self._top_p))
        if self._log_min_p is not None:
            lowest = np.maximum(lowest, ascending[..., -1:] + self._log_min_p)
        return lowest


def _nucleus(ascending: Array, top_p: Array) -> Array:
    """As `filters.nucleus`."""
    with np.errstate(invalid="ignore"):  # rows that are no numbers get no token in the end
        shares = np.exp(ascending - ascending[..., -1:])
    behind = np.cumsum(shares, -1)
    out = behind <= (1 - top_p) * behind[..., -1:]
    out[..., -1:] = False
    lowest: Array = np.where(out, np.inf, ascending).min(-1, keepdims=True)
    return lowest


def _taken(array: Array, places: Array) -> Array:
    """What `np.take_along_axis` takes along the last one, without its preparations."""
    flat = array.reshape(-1, array.shape[-1])
    wanted = places.reshape(len(flat), -1)
    taken: Array = flat[np.arange(len(flat))[:, None], wanted].reshape(places.shape)
    return taken
