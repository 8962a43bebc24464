"""DryPenalty ("don't repeat yourself"): tokens that continue a repetition become less likely the longer it is.

A repetition is an earlier place whose tokens are those at the end of the text. Breakers are in none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.sampling_params import SamplingParams

Numbers = NDArray[np.int64]
MAX_PENALTY = 1e30  # beyond it, logits would overflow


class RepeatedEndings:
    """The lengths of all repetitions in a text that grows: for each place, how many tokens up to it end the text."""

    def __init__(self, tokens: Sequence[int], breakers: Collection[int]) -> None:
        self._breakers = breakers
        self._ids: Numbers = np.array(tokens, np.int64)
        self._lengths = self._of_whole(tokens)

    def __len__(self) -> int:
        return len(self._ids)

    def _of_whole(self, tokens: Sequence[int]) -> Numbers:
        unbroken = next((i for i, token in enumerate(reversed(tokens)) if token in self._breakers), len(tokens))
        lengths = np.minimum(common_beginnings(tokens[::-1]), unbroken)[::-1]
        found: Numbers = np.ascontiguousarray(lengths, np.int64)
        return found

    def after(self, token: int) -> RepeatedEndings:
        """Those of the text with one token more."""
        longer = object.__new__(RepeatedEndings)
        longer._breakers = self._breakers
        longer._ids = np.append(self._ids, token)
        longer._lengths = np.zeros(len(longer._ids), np.int64)
        if token not in self._breakers:
            same = longer._ids == token
            longer._lengths[1:] = self._lengths + 1
            longer._lengths[:1] = 1
            longer._lengths *= same
        return longer

    def followers(self, least: int, window: int) -> tuple[Numbers, Numbers]:
        """The tokens behind repetitions of `least` tokens or more, and the length of the longest one before each.

        Only the last `window` tokens count.
        """
        start = max(0, len(self._ids) - window)
        lengths = np.minimum(self._lengths[start:-1], np.arange(1, len(self._ids) - start))
        places = np.flatnonzero(lengths >= least)
        tokens, where = np.unique(self._ids[start + 1 :][places], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, where, lengths[places])
        is_kept = np.fromiter((token not in self._breakers for token in tokens.tolist()), bool, len(tokens))
        return tokens[is_kept], longest[is_kept]


class DryPenalty:
    """The penalty of one sequence."""

    def __init__(self, params: SamplingParams, breakers: Collection[int]) -> None:
        self._params, self._breakers = params, breakers
        self._known: RepeatedEndings | None = None

    def places(
        self, tokens: Sequence[int], ahead: Sequence[int], num_places: int
    ) -> Iterator[tuple[Numbers, NDArray[np.float64]]]:
        endings = self._of(tokens)
        first = len(ahead) - num_places + 1
        for place in range(len(ahead) + 1):
            if place:
                endings = endings.after(ahead[place - 1])
            if place >= first:
                yield self._penalties(endings)

    def _of(self, tokens: Sequence[int]) -> RepeatedEndings:
        known = self._known
        if known is None or len(known) > len(tokens):
            known = RepeatedEndings(tokens, self._breakers)
        for token in tokens[len(known) :]:
            known = known.after(token)
        self._known = known
        return known

    def _penalties(self, endings: RepeatedEndings) -> tuple[Numbers, NDArray[np.float64]]:
        params = self._params
        window = params.dry_penalty_last_n if params.dry_penalty_last_n >= 0 else len(endings)
        tokens, lengths = endings.followers(params.dry_allowed_length, window)
        with np.errstate(over="ignore"):
            penalties = params.dry_multiplier * np.power(float(params.dry_base), lengths - params.dry_allowed_length)
        return tokens, np.minimum(penalties, MAX_PENALTY)


def has_dry_penalty(params: SamplingParams) -> bool:
    return params.dry_multiplier > 0 and params.dry_penalty_last_n != 0


def common_beginnings(ids: Sequence[int]) -> Numbers:
    """For each place, how many tokens from there on are those at the beginning (Z-algorithm)."""
    number = len(ids)
    lengths = [number] * min(1, number) + [0] * (number - 1)
    left = right = 0
    for i in range(1, number):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < number and ids[length] == ids[i + length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    return np.array(lengths, np.int64)
