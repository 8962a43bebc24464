"""Readings of CPU, memory, disk and GPUs of this host, without torch; the metrics of the server process."""

from __future__ import annotations

import csv
import os
import resource
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flambeau.metrics.registry import MetricFamily

MB, GB = 1 << 20, 1 << 30
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# name, unit, value, device (None: the host itself)
Reading = tuple[str, str, float, str | None]


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Busy and total CPU time since boot, in ticks."""

    busy: int
    total: int


def read_cpu_times() -> CpuTimes | None:
    """The CPU times, or None if they are not available."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None
    idle = ticks[3] + ticks[4]  # idle and iowait
    return CpuTimes(sum(ticks) - idle, sum(ticks))


def cpu_percent(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """The CPU load between two readings."""
    if before is None or after is None or after.total <= before.total:
        return None
    return round(100 * max(0, after.busy - before.busy) / (after.total - before.total), 1)


class HostReader:
    """Reads the host's state; the CPU load is that since the last reading."""

    def __init__(self) -> None:
        self._cpu = read_cpu_times()

    def read(self, *, gpus: bool = True) -> list[Reading]:
        """Read everything that is available; querying GPUs may take seconds."""
        readings = [*self._read_cpu(), *read_memory(), *read_disk()]
        return [*readings, *read_gpus()] if gpus else readings

    def _read_cpu(self) -> Iterator[Reading]:
        before, self._cpu = self._cpu, read_cpu_times()
        percent = cpu_percent(before, self._cpu)
        if percent is not None:
            yield "CPUUtilization", "Percent", percent, None


def read_memory() -> Iterator[Reading]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines)}
        total, available = kilobytes["MemTotal"], kilobytes["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return
    yield "MemoryUsed", "Megabytes", (total - available) / 1024, None
    yield "MemoryAvailable", "Megabytes", available / 1024, None
    yield "MemoryUtilization", "Percent", round(100 * (total - available) / total, 1), None


def read_disk(path: str = "/") -> Iterator[Reading]:
    """The space of a file system, as users without privileges see it."""
    try:
        state = os.statvfs(path)
    except OSError:
        return
    used = (state.f_blocks - state.f_bfree) * state.f_frsize
    free = state.f_bavail * state.f_frsize
    yield "DiskUsage", "Gigabytes", used / GB, None
    yield "DiskAvailable", "Gigabytes", free / GB, None
    if used + free:
        yield "DiskUtilization", "Percent", round(100 * used / (used + free), 1), None


def read_gpus() -> Iterator[Reading]:
    """Load and memory of each NVIDIA GPU."""
    yield from to_readings(query_gpus("utilization.gpu", "memory.used", "memory.total"))


def query_gpus(*fields: str) -> list[list[str]]:
    """The index and these fields of each GPU, from nvidia-smi; empty without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu=index,{','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout, len(fields)) if done.returncode == 0 else []


def parse_gpus(table: str, num_fields: int) -> list[list[str]]:
    """The valid rows of nvidia-smi's table."""
    rows = ([word.strip() for word in row] for row in csv.reader(table.splitlines(), skipinitialspace=True))
    return [row for row in rows if len(row) == num_fields + 1 and row[0].isdigit()]


def to_readings(rows: Iterable[list[str]]) -> Iterator[Reading]:
    """Readings from rows of index, load, memory used and total; missing values are skipped."""
    for device, load, used, total in rows:
        if is_number(used) and is_number(total) and float(total):
            yield "GPUMemoryUtilization", "Percent", round(100 * float(used) / float(total), 2), device
        if is_number(used):
            yield "GPUMemoryUsed", "Megabytes", float(used), device
        if is_number(load):
            yield "GPUUtilization", "Percent", float(load), device


def is_number(word: str) -> bool:
    """False for `[N/A]`."""
    return word.replace(".", "", 1).isdigit()


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 if it is not available."""
    return read_pages(pid)[0] * PAGE_BYTES


def private_bytes(pid: int) -> int:
    """Of that, what is neither a mapped file nor shared memory."""
    resident, shared = read_pages(pid)
    return (resident - shared) * PAGE_BYTES


def read_pages(pid: int) -> tuple[int, int]:
    """The resident and the shared pages of a process."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            words = file.read().split()
        return int(words[1]), int(words[2])
    except (OSError, IndexError, ValueError):
        return 0, 0


def process_metrics() -> Iterator[MetricFamily]:
    """The `process_*` metrics of this process, under the names that Prometheus' own clients use."""
    for name, kind, text, value in read_process():
        family = MetricFamily(name, kind, text)
        family.values[()] = value
        yield family


def read_process() -> Iterator[tuple[str, str, str, float]]:
    """Name, kind, help text and value; what the system does not tell is left out."""
    times = os.times()
    seconds = times.user + times.system
    yield "process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", seconds
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "process_max_fds", "gauge", "Maximum number of open file descriptors.", soft
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        open_fds = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
        started, virtual, pages = (int(fields[i - 3]) for i in (22, 23, 24))  # numbers as in proc(5)
    except (OSError, ValueError, IndexError, StopIteration):
        return
    started_at = int(boot.split()[1]) + started / os.sysconf("SC_CLK_TCK")
    yield "process_open_fds", "gauge", "Number of open file descriptors.", open_fds
    yield "process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.", started_at
    yield "process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", virtual
    yield "process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", pages * PAGE_BYTES
