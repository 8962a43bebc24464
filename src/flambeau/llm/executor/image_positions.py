"""rotary_positions: what rotates the queries and keys of a prompt whose images have rows and columns (Qwen-VL).

A token of such an image has three positions: that of the image, and its row and column from there on. In a video the
first one grows with time. The text after goes on behind the largest of these, so that an image takes fewer positions
than it has tokens.

Attention depends on differences of positions only. So all of them are counted from the end: behind the last image, a
token is rotated by its place among all tokens, and every kernel computes it as in a text. What comes before is rotated
by as many positions more as the images behind save. Cached keys depend on that number, too (`Sequence.contents`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.core.sequence import PromptMedia

Ints = NDArray[np.int64]


def rotary_positions(media: Many[PromptMedia], start: int, length: int) -> Ints | None:
    """Time, row and column [3, length] of the tokens from `start` on; None: all three are their places."""
    if not media or start >= media[-1].end or all(part.encoded.grid is None for part in media):
        return None
    saved = sum(part.num_saved for part in media)
    positions = np.tile(np.arange(start, start + length), (3, 1))
    first = start  # of the tokens whose positions are not known yet
    for part in media:
        begin, end = (min(max(place, start), start + length) for place in (part.start, part.end))
        positions[:, first - start : begin - start] += saved
        if begin < end:
            places = np.arange(begin, end) - part.start
            positions[:, begin - start : end - start] = part.start + saved + steps_of(part, places)
        saved -= part.num_saved
        first = end
    return positions


def steps_of(part: PromptMedia, places: Ints) -> Ints:
    """Time, row and column of these tokens of an image, from its first one on."""
    if part.encoded.grid is None:
        return np.tile(places, (3, 1))
    num_rows, num_columns = part.encoded.grid
    steps, places = np.divmod(places, num_rows * num_columns)
    rows, columns = np.divmod(places, num_columns)
    return np.stack((np.array(part.encoded.times)[steps], rows, columns))
