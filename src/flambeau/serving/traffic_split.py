"""TrafficSplit: which version of a model gets a request that names none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar
from zlib import crc32

from flambeau.wire.messages import header

WHOLE = 100  # percent
KEY_HEADER = "x-flambeau-traffic-key"  # requests with the same value get the same version
VERSION_HEADER = "x-flambeau-model-version"  # of a response: the version that was chosen

Version = TypeVar("Version")


class TrafficSplit(Generic[Version]):
    """Some versions get a percentage of the requests, and the default version gets the others.

    A version that cannot answer gets none: the default has its share meanwhile.
    """

    def __init__(self, default: Version, shares: Mapping[Version, int], can_answer: Callable[[Version], bool]) -> None:
        self._default = default
        self._can_answer = can_answer
        self._shares = {**shares, default: WHOLE - sum(shares.values())}
        self._credit = dict.fromkeys(self._shares, 0)

    def percent_of(self, version: Version) -> int:
        return self._shares.get(version, 0)

    def choose(self, headers: Sequence[tuple[str, str]]) -> Version:
        """The version for a request with these headers."""
        key = header(headers, KEY_HEADER)
        version = self._by_key(key) if key else self._by_turn()
        return version if version is self._default or self._can_answer(version) else self._default

    def _by_turn(self) -> Version:
        """The version that is furthest behind its share: of 100 requests each gets its percentage, evenly spread."""
        for version, percent in self._shares.items():
            self._credit[version] += percent
        chosen = max(self._credit, key=self._credit.__getitem__)
        self._credit[chosen] -= WHOLE
        return chosen

    def _by_key(self, key: str) -> Version:
        """The version of a key. While the share of one version grows, its keys stay with it."""
        place = crc32(key.encode("utf-8", "surrogatepass")) % WHOLE
        for version, percent in self._shares.items():
            place -= percent
            if place < 0:
                return version
        return self._default
