"""How many threads a worker's libraries may use."""

from __future__ import annotations

import os


def choose_threads() -> int:
    """What the server gave this worker, else every core it may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
