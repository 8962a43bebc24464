"""How much memory processes use, and how much is left, without any library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flambeau.metrics.system import resident_bytes

GROUP = Path("/sys/fs/cgroup")
HOST = Path("/proc/meminfo")


def resident_bytes_of(pids: Iterable[int]) -> int:
    """The same of several processes together."""
    return sum(map(resident_bytes, pids))


def available_bytes(group: Path = GROUP, host: Path = HOST) -> int | None:
    """What may still be taken, by the host's count and the container's limit; None where neither can be told."""
    known = [size for size in (_left_on_host(host), _left_in_group(group)) if size is not None]
    return min(known, default=None)


def _left_on_host(host: Path) -> int | None:
    try:
        lines = host.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group(group: Path) -> int | None:
    """The limit less what is used; file pages that the kernel can drop at once count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(counts.get("inactive_file", 0))
    except (OSError, ValueError):  # no limit reads "max"
        return None
