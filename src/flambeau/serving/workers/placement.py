"""Which devices the next worker gets, under which names it sees them, and how many threads; pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from flambeau.errors import PlacementFailed


def next_device(candidates: Sequence[int], taken: Iterable[int | None]) -> int | None:
    """The candidate with the fewest workers, lowest number first; None without candidates."""
    load = Counter(taken)
    return min(candidates, key=lambda device: (load[device], candidates.index(device)), default=None)


def next_devices(candidates: Sequence[int], level: int, taken: Iterable[int | None]) -> tuple[int, ...]:
    """`level` neighbors among the candidates, the least used ones; the last candidate's neighbor is the first.

    Of equally used ones those that start at a multiple of `level` come first, so that groups leave no gaps.
    """
    load = Counter(taken)

    def neighbors(start: int) -> tuple[int, ...]:
        return tuple(candidates[(start + i) % len(candidates)] for i in range(level))

    def cost(start: int) -> tuple[int, int, bool, int]:
        used = [load[device] for device in neighbors(start)]
        return max(used), sum(used), start % level != 0, start

    return neighbors(min(range(len(candidates)), key=cost))


def num_groups(num_devices: int, level: int, model: str) -> int:
    """How many groups of `level` devices there are; none is an error, in the words that clients know."""
    if level > num_devices:
        raise PlacementFailed(f"No enough gpu devices for model:{model} parallelLevel:{level}")
    return num_devices // level


def visible_devices(devices: Iterable[int], servers_own: str | None) -> str:
    """What a worker's visibility variable says, so that it sees these devices and no others.

    Where the server itself sees only some, the numbers are positions in that list: its names (numbers, UUIDs,
    MIG ids) are passed on as they are.
    """
    if servers_own is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in servers_own.split(",") if name.strip() not in ("", "-1")]
    return ",".join(names[device] for device in devices)


def threads_per_worker(num_cores: int, num_workers: int, *, is_pipelined: bool = False) -> int:
    """An equal share of the cores, so that workers do not fight; one that prepares batches meanwhile keeps one free."""
    share = num_cores // max(1, num_workers)
    return max(1, share - is_pipelined)
