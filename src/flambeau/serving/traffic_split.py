"""TrafficSplit: which version of a model gets a request that names none, and which versions get copies of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from random import shuffle
from typing import Generic, TypeVar
from zlib import crc32

from flambeau.serving.job import Job
from flambeau.serving.mirror import Mirror
from flambeau.wire.messages import header

WHOLE = 100  # percent
KEY_HEADER = "x-flambeau-traffic-key"  # requests with the same value get the same version
VERSION_HEADER = "x-flambeau-model-version"  # of a response: the version that was chosen

Version = TypeVar("Version")


class TrafficSplit(Generic[Version]):
    """Some versions get a percentage of the requests, and the default version gets the others.

    A version that cannot answer gets none: the default has its share meanwhile. Mirrors get copies of the requests of
    the default.
    """

    def __init__(
        self,
        default: Version,
        shares: Mapping[Version, int],
        can_answer: Callable[[Version], bool],
        mirrors: Sequence[Mirror] = (),
    ) -> None:
        self.default = default
        self._can_answer = can_answer
        self._mirrors = mirrors
        self._shares = {**shares, default: WHOLE - sum(shares.values())}
        self._unit = gcd(*self._shares.values())
        self._turns: list[Version] = []  # of the next requests

    def percent_of(self, version: Version) -> int:
        return self._shares.get(version, 0)

    def choose(self, headers: Sequence[tuple[str, str]]) -> Version:
        """The version for a request with these headers."""
        key = header(headers, KEY_HEADER)
        version = self._by_key(key) if key else self._by_turn()
        return version if version is self.default or self._can_answer(version) else self.default

    def copy(self, job: Job, version: Version) -> None:
        """Mirror a request that its version has accepted."""
        if version is self.default:
            for mirror in self._mirrors:
                mirror.copy(job)

    def _by_turn(self) -> Version:
        """Of 100 requests each version gets its percentage; of 10, if all percentages are multiples of 10.

        The order among them is random: one that repeats itself would give a version all requests of one kind where
        clients send several kinds in turns.
        """
        if not self._turns:
            self._turns = [each for each, percent in self._shares.items() for _ in range(percent // self._unit)]
            shuffle(self._turns)
        return self._turns.pop()

    def _by_key(self, key: str) -> Version:
        """The version of a key. While the share of one version grows, its keys stay with it."""
        place = crc32(key.encode("utf-8", "surrogatepass")) % WHOLE
        for version, percent in self._shares.items():
            place -= percent
            if place < 0:
                return version
        return self.default
