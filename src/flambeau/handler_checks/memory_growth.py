"""Calls a handler many times and tells a memory leak from warm-up."""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

STEPS = 10
MAX_CALLS = 200
BUDGET_S = 3.0
MAX_TOTAL_S = 15.0  # for one call per step, the fewest that show a trend
WARM_UP_CALLS = 50

MIN_BYTES_PER_CALL, MIN_BYTES = 4096, 800_000
MIN_BLOCKS_PER_CALL, MIN_BLOCKS = 0.9, 20
MIN_RISING_SHARE = 0.6  # of all steps
MIN_SECOND_HALF = 0.7  # growth of the second half over the first: a cache that fills stays below


@dataclass(frozen=True, slots=True)
class MemoryReadings:
    """Readings before, between and after steps of calls; the three series have the same length."""

    calls_per_step: int
    blocks: Sequence[int]  # memory blocks that Python has allocated
    objects: Sequence[int]  # containers that the garbage collector tracks
    resident_bytes: Sequence[int]  # empty if the system does not report it

    @property
    def num_calls(self) -> int:
        return self.calls_per_step * (len(self.blocks) - 1)


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """What each call leaves behind; 0 for a series that does not grow steadily."""

    blocks: float
    objects: float
    resident_bytes: float

    @property
    def is_leak(self) -> bool:
        return bool(self.blocks or self.objects or self.resident_bytes)


@dataclass(frozen=True, slots=True)
class GrowthReport:
    growth: MemoryGrowth
    num_calls: int
    knows_resident_bytes: bool
    grown_types: Sequence[str]  # types whose number of objects grew most


def measure_growth(call: Callable[[], object], call_s: float) -> GrowthReport | None:
    """Call repeatedly and report what grows; None if one call takes too long for that."""
    count = calls_per_step(call_s)
    if count == 0:
        return None
    for _ in range(min(WARM_UP_CALLS, count * STEPS)):
        call()
    gc.collect()
    gc.freeze()  # existing objects are not traversed again, which makes the readings fast
    before = count_types()
    readings = read_while(call, count)
    # The interpreter and the allocator warm up slowly: only growth that continues is a leak.
    if (growth := find_growth(readings)).is_leak:
        readings = read_while(call, count)
        growth = find_growth(readings)
    grown = count_types() - before
    gc.unfreeze()
    return GrowthReport(
        growth, readings.num_calls, bool(readings.resident_bytes), [name for name, _ in grown.most_common(2)]
    )


def calls_per_step(call_s: float) -> int:
    """How many calls fit between two readings; 0 if one call takes too long."""
    if call_s * STEPS > MAX_TOTAL_S:
        return 0
    return max(1, min(MAX_CALLS, int(BUDGET_S / max(call_s, 1e-6))) // STEPS)


def read_while(call: Callable[[], object], count: int) -> MemoryReadings:
    # The arrays are allocated first, so that the readings themselves do not grow.
    blocks, objects, resident = (array("q", bytes(8 * (STEPS + 1))) for _ in range(3))
    for step in range(STEPS + 1):
        if step:
            for _ in range(count):
                call()
        gc.collect()
        blocks[step] = sys.getallocatedblocks()
        objects[step] = len(gc.get_objects())
        resident[step] = resident_bytes()
    return MemoryReadings(count, blocks, objects, resident if resident[0] else ())


def count_types() -> Counter[str]:
    return Counter(type(item).__name__ for item in gc.get_objects())


def resident_bytes() -> int:
    """The resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


# ---- the decision: no effects below this line ----


def find_growth(readings: MemoryReadings) -> MemoryGrowth:
    """The series that grow steadily and by more than noise."""
    calls = readings.num_calls
    blocks_limit = max(MIN_BLOCKS_PER_CALL, MIN_BLOCKS / calls)
    bytes_limit = max(MIN_BYTES_PER_CALL, MIN_BYTES / calls)
    return MemoryGrowth(
        blocks=growth_per_call(readings.blocks, readings.calls_per_step, blocks_limit),
        objects=growth_per_call(readings.objects, readings.calls_per_step, blocks_limit),
        resident_bytes=growth_per_call(readings.resident_bytes, readings.calls_per_step, bytes_limit),
    )


def growth_per_call(values: Sequence[int], calls_per_step: int, limit: float) -> float:
    """The slope of a series that rises steadily by at least `limit` per call; else 0."""
    if len(values) < 3 or not rises_steadily(values):
        return 0.0
    per_call = slope(values) / calls_per_step
    return per_call if per_call >= limit else 0.0


def rises_steadily(values: Sequence[int]) -> bool:
    """Whether most steps rise, and the second half about as much as the first."""
    rises = sum(later > earlier for earlier, later in pairwise(values))
    middle, last = len(values) // 2, len(values) - 1
    first, second = (values[middle] - values[0]) / middle, (values[last] - values[middle]) / (last - middle)
    return rises >= MIN_RISING_SHARE * (len(values) - 1) and first > 0 and second >= MIN_SECOND_HALF * first


def slope(values: Sequence[int]) -> float:
    """The median slope between any two readings, which a single jump does not change."""
    return median((values[j] - values[i]) / (j - i) for i, j in combinations(range(len(values)), 2))
