"""Whether memory grows with every call, told apart from warming up (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

LEAST_BYTES_PER_CALL, LEAST_BYTES = 4096, 800_000
LEAST_BLOCKS_PER_CALL, LEAST_BLOCKS = 0.9, 20
LEAST_RISES = 0.6  # of all steps
KEEPS_ON = 0.7  # the second half must grow at least so much as the first: a cache that fills does not


@dataclass(frozen=True, slots=True)
class Readings:
    """What was read between steps of some calls each; all three have the same length."""

    calls_per_step: int
    blocks: Sequence[int]  # memory blocks that Python holds
    objects: Sequence[int]  # containers the garbage collector knows
    resident_bytes: Sequence[int]  # empty where the system does not tell

    @property
    def num_calls(self) -> int:
        """All the calls between the first reading and the last."""
        return self.calls_per_step * (len(self.blocks) - 1)


@dataclass(frozen=True, slots=True)
class Growth:
    """What is kept for each call; 0 where nothing grows steadily."""

    blocks: float
    objects: float
    resident_bytes: float

    @property
    def is_leak(self) -> bool:
        """Whether anything grows."""
        return bool(self.blocks or self.objects or self.resident_bytes)


def judge(readings: Readings) -> Growth:
    """What grows steadily, by more than noise."""
    calls = readings.num_calls
    blocks_limit = max(LEAST_BLOCKS_PER_CALL, LEAST_BLOCKS / calls)
    bytes_limit = max(LEAST_BYTES_PER_CALL, LEAST_BYTES / calls)
    return Growth(
        blocks=kept_per_call(readings.blocks, readings.calls_per_step, blocks_limit),
        objects=kept_per_call(readings.objects, readings.calls_per_step, blocks_limit),
        resident_bytes=kept_per_call(readings.resident_bytes, readings.calls_per_step, bytes_limit),
    )


def kept_per_call(values: Sequence[int], calls_per_step: int, limit: float) -> float:
    """The slope of a series that rises all the time by at least `limit` per call; else 0."""
    if len(values) < 3 or not rises_steadily(values):
        return 0.0
    per_call = slope(values) / calls_per_step
    return per_call if per_call >= limit else 0.0


def rises_steadily(values: Sequence[int]) -> bool:
    """Whether most steps rise, and the second half about as much as the first."""
    rises = sum(later > earlier for earlier, later in pairwise(values))
    middle, last = len(values) // 2, len(values) - 1
    first, second = (values[middle] - values[0]) / middle, (values[last] - values[middle]) / (last - middle)
    return rises >= LEAST_RISES * (len(values) - 1) and first > 0 and second >= KEEPS_ON * first


def slope(values: Sequence[int]) -> float:
    """The median slope between any two readings: a single jump does not move it."""
    return median((values[j] - values[i]) / (j - i) for i, j in combinations(range(len(values)), 2))
