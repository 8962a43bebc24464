"""Which device the next worker gets, and how many threads; pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def next_device(candidates: Sequence[int], taken: Iterable[int | None]) -> int | None:
    """The candidate with the fewest workers, lowest number first; None without candidates."""
    load = Counter(taken)
    return min(candidates, key=lambda device: (load[device], candidates.index(device)), default=None)


def threads_per_worker(num_cores: int, num_workers: int, *, is_pipelined: bool = False) -> int:
    """An equal share of the cores, so that workers do not fight; one that prepares batches meanwhile keeps one free."""
    share = num_cores // max(1, num_workers)
    return max(1, share - is_pipelined)
