"""Cores, GPUs and memory of this host, found without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from flambeau.metrics.system import private_bytes, query_gpus, resident_bytes

NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
AMD_DRIVER = Path("/dev/kfd")


@cache
def count_gpus() -> int:
    """How many GPUs workers may use. Visibility variables may hold numbers, UUIDs or MIG ids."""
    visible = os.environ.get(visibility_variable())
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if NVIDIA_DRIVER.is_dir():
        return len([*NVIDIA_DRIVER.iterdir()])
    if count := output_of("nvidia-smi", "-L").count("GPU "):
        return count
    if os.environ.get("TS_IPEX_GPU_ENABLE") == "true":  # Intel GPUs are opt-in
        return count_xpus(output_of("xpu-smi", "discovery", "--dump", "1"))
    return int(sys.platform == "darwin" and platform.machine() == "arm64")  # Metal shows one device


def visibility_variable() -> str:
    """The variable that limits which GPUs a process sees: the one that is set, or this vendor's."""
    known = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
    if os.environ.get("TS_IPEX_GPU_ENABLE") == "true":
        known.append("ZE_AFFINITY_MASK")
    if named := [variable for variable in known if variable in os.environ]:
        return named[0]
    if NVIDIA_DRIVER.is_dir():
        return known[0]
    return known[1] if AMD_DRIVER.exists() else known[2] if len(known) > 2 else known[0]


def gpu_usage() -> dict[int, str]:
    """How busy each NVIDIA GPU is, in the format of `describe`; empty if unknown."""
    rows = query_gpus("utilization.gpu", "utilization.memory", "memory.used")
    return {
        int(number): f"gpuId::{number} utilization.gpu::{gpu} % utilization.memory::{memory} % memory.used::{used} MiB"
        for number, gpu, memory, used in rows
    }


def gpu_properties() -> list[tuple[str, ...]]:
    """Index, name, memory in MiB and driver of each NVIDIA GPU; empty if unknown."""
    return [tuple(row) for row in query_gpus("name", "memory.total", "driver_version")]


def count_xpus(listing: str) -> int:
    """The devices in the output of xpu-smi: one line each, after a header."""
    return max(0, len([line for line in listing.splitlines() if line.strip()]) - 1)


def output_of(*command: str) -> str:
    """The output of a vendor's tool; empty if it is missing or fails."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def count_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


GROUP = Path("/sys/fs/cgroup")
HOST = Path("/proc/meminfo")


def resident_bytes_of(pids: Iterable[int]) -> int:
    """The resident memory of several processes together."""
    return sum(map(resident_bytes, pids))


def private_bytes_of(pids: Iterable[int]) -> int:
    """The resident memory of several processes that other processes cannot share, without mapped files."""
    return sum(map(private_bytes, pids))


def family_bytes(pids: Sequence[int], limit: int) -> int:
    """The memory of these processes and all that they have started. It may take long: call it in a thread.

    The resident memory counts what a forked child shares with its parent twice, so above the limit each page is
    divided by the number of its users.
    """
    family = [*pids, *(child for pid in pids for child in descendants(pid))]
    if len(family) == len(pids) or (used := resident_bytes_of(family)) <= limit:
        return resident_bytes_of(pids)
    shares = [proportional_bytes(pid) for pid in family]
    return used if None in shares else max(resident_bytes_of(pids), sum(share or 0 for share in shares))


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in file.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield child
            yield from descendants(child)


def proportional_bytes(pid: int) -> int | None:
    """The memory of a process, with its share of pages that several use; 0 if it has exited, None if unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if not Path(f"/proc/{pid}").exists() else None
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def free_swap_bytes(host: Path = HOST) -> int:
    """What the host can still swap out."""
    return _read_meminfo(host, "SwapFree:") or 0


def available_bytes(group: Path = GROUP, host: Path = HOST) -> int | None:
    """The free memory of the host or its container, whichever is less; None if unknown."""
    known = [size for size in (_free_on_host(host), _free_in_group(group)) if size is not None]
    return min(known, default=None)


def _free_on_host(host: Path) -> int | None:
    return _read_meminfo(host, "MemAvailable:")


def _read_meminfo(host: Path, key: str) -> int | None:
    try:
        lines = host.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(key)), None)


def _free_in_group(group: Path) -> int | None:
    """The limit minus the used memory; file pages that the kernel can drop at once count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(counts.get("inactive_file", 0))
    except (OSError, ValueError):  # "max": no limit
        return None


def return_free_memory() -> None:
    """Return the pages of freed objects to the system, where the C library can: it keeps those of large ones."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
