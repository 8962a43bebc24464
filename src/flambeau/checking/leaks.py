"""A handler called many times, and what its process keeps of it."""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable

from flambeau.checking.growth import Growth, Readings, judge
from flambeau.checking.verdict import Verdict
from flambeau.worker.stages import size_text

STEPS = 10
MAX_CALLS = 200
BUDGET_S = 3.0
MOST_S = 15.0  # for the fewest calls that tell anything
WARM_UP_CALLS = 50
WHAT = "memory"


def calls_per_step(call_s: float) -> int:
    """How many calls fit between two readings; 0 when one call takes too long for that."""
    if call_s * STEPS > MOST_S:
        return 0
    return max(1, min(MAX_CALLS, int(BUDGET_S / max(call_s, 1e-6))) // STEPS)


def check_growth(call: Callable[[], object], call_s: float) -> Verdict:
    """Whether memory grows with the calls."""
    count = calls_per_step(call_s)
    if count == 0:
        return Verdict("note", WHAT, f"growth was not looked for: one call takes {call_s:.1f} s")
    for _ in range(min(WARM_UP_CALLS, count * STEPS)):
        call()
    gc.collect()
    gc.freeze()  # what is there now is not looked at again, so that looking is quick
    before = kinds()
    readings = read_while(call, count)
    if (growth := judge(readings)).is_leak:  # interpreter and allocator warm up for long: only what goes on is a leak
        readings = read_while(call, count)
        growth = judge(readings)
    grown = kinds() - before
    gc.unfreeze()
    return verdict(growth, readings, grown)


def read_while(call: Callable[[], object], count: int) -> Readings:
    """Call in steps, with a reading before, between and after them; the readings' own memory is taken beforehand."""
    blocks, objects, resident = (array("q", bytes(8 * (STEPS + 1))) for _ in range(3))
    for step in range(STEPS + 1):
        if step:
            for _ in range(count):
                call()
        gc.collect()
        blocks[step] = sys.getallocatedblocks()
        objects[step] = len(gc.get_objects())
        resident[step] = own_resident_bytes()
    return Readings(count, blocks, objects, resident if resident[0] else ())


def verdict(growth: Growth, readings: Readings, grown: Counter[str]) -> Verdict:
    """What the growth means to the author."""
    calls = f"over {readings.num_calls} calls"
    if growth.is_leak:
        found = []
        if growth.resident_bytes:
            found.append(f"{size_text(round(growth.resident_bytes))} of memory")
        if number := max(growth.objects, growth.blocks):
            most = ", ".join(name for name, _ in grown.most_common(2))
            found.append(f"{number:.1f} objects" + (f" (mostly {most})" if growth.objects and most else ""))
        return Verdict("problem", WHAT, f"each call keeps {' and '.join(found)}, {calls}")
    if not readings.resident_bytes:
        return Verdict("note", WHAT, f"no Python object is kept {calls}; this system does not tell resident memory")
    return Verdict("ok", WHAT, f"does not grow {calls}")


def kinds() -> Counter[str]:
    """How many containers of each type there are."""
    return Counter(type(item).__name__ for item in gc.get_objects())


def own_resident_bytes() -> int:
    """The resident memory of this process; 0 where it cannot be told."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
