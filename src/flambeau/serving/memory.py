"""How much memory processes use, and how much is left, without any library."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GROUP = Path("/sys/fs/cgroup")
HOST = Path("/proc/meminfo")


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 when it cannot be told."""
    if pid <= 0:
        return 0
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


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
