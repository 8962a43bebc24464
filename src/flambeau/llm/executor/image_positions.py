"""rotary_positions: what rotates the queries and keys of a prompt whose images have rows and columns (Qwen-VL).

A token of such an image has three positions: that of the image, and its row and column from there on. The text after
an image goes on behind the largest of these, so that an image takes fewer positions than it has tokens.

Attention depends on differences of positions only. So all of them are counted from the end: behind the last image, a
token is rotated by its place among all tokens, and every kernel computes it as in a text. What comes before is rotated
by as many positions more as the images behind save. Cached keys depend on that number, too (`Sequence.contents`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.core.sequence import PromptImage

Ints = NDArray[np.int64]


def rotary_positions(images: Many[PromptImage], start: int, length: int) -> Ints | None:
    """Time, row and column [3, length] of the tokens from `start` on; None: all three are their places."""
    if not images or start >= images[-1].end or all(image.image.grid is None for image in images):
        return None
    saved = sum(image.num_saved for image in images)
    positions = np.tile(np.arange(start, start + length), (3, 1))
    first = start  # of the tokens whose positions are not known yet
    for image in images:
        begin, end = (min(max(place, start), start + length) for place in (image.start, image.end))
        positions[:, first - start : begin - start] += saved
        if begin < end:
            places = np.arange(begin, end) - image.start
            positions[:, begin - start : end - start] = image.start + saved + steps_of(image, places)
        saved -= image.num_saved
        first = end
    return positions


def steps_of(image: PromptImage, places: Ints) -> Ints:
    """Time, row and column of these tokens of an image, from its first one on."""
    if image.image.grid is None:
        return np.tile(places, (3, 1))
    rows, columns = np.divmod(places, image.image.grid[1])
    return np.stack((np.zeros_like(rows), rows, columns))
