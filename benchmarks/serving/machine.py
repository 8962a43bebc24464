"""Processors, memory, load and stolen time of the machine, read from /proc."""

import os
import platform
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Above this many cores taken by others or by the host, a point says more about the neighbors than about the server.
NOISE_CORES = 0.1


def describe() -> dict[str, Any]:
    """A description of the machine without its host name."""
    return {
        "cpu": _first_value(PROC / "cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _first_value(file: Path, key: str) -> str | None:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


@dataclass(frozen=True, slots=True)
class Process:
    """A line of the process table with the CPU time used so far."""

    pid: int
    parent: int
    name: str
    cpu_s: float


def process_table() -> dict[int, Process]:
    """Every process that is alive (zombies are not)."""
    table = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        # The name stands in brackets and may itself hold brackets and blanks.
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        if fields[0] != "Z":
            pid = int(folder.name)
            cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
            table[pid] = Process(pid, int(fields[1]), name, cpu_s)
    return table


def family(root: int, mark: str) -> dict[int, Process]:
    """The process `root`, its descendants, and any process whose environment carries `mark` (orphans too)."""
    table = process_table()
    members = {pid for pid in table if pid == root or _carries(pid, mark)}
    while more := {pid for pid, process in table.items() if process.parent in members and pid not in members}:
        members |= more
    return {pid: table[pid] for pid in members if pid in table and pid != os.getpid()}


def _carries(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def memory_of(pids: Iterable[int]) -> dict[str, Any]:
    """RSS and PSS of these processes together, in MB (PSS counts a shared page once)."""
    rss_kb = pss_kb = processes = 0
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        values = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
        rss_kb += values.get("Rss:", 0)
        pss_kb += values.get("Pss:", 0)
        processes += 1
    return {"rss_mb": round(rss_kb / 1024, 1), "pss_mb": round(pss_kb / 1024, 1), "processes": processes}


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds used so far: by the machine, its host, the server, and us with our finished children."""

    at: float
    busy_s: float
    steal_s: float
    client_s: float
    server: dict[int, Process]

    @classmethod
    def now(cls, server: dict[int, Process]) -> "Usage":
        with (PROC / "stat").open() as file:
            user, nice, system, _, _, irq, softirq, steal = (int(field) for field in file.readline().split()[1:9])
        clients = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(
            at=time.perf_counter(),
            busy_s=(user + nice + system + irq + softirq) / TICKS_PER_S,
            steal_s=steal / TICKS_PER_S,
            client_s=sum(client.ru_utime + client.ru_stime for client in clients),
            server=server,
        )


def cores_between(before: Usage, after: Usage) -> dict[str, Any]:
    """Cores used between two moments, by whom; "client" is this process and any child of it that ended in between."""
    elapsed_s = after.at - before.at
    used: list[tuple[str, float]] = []
    for pid, process in after.server.items():
        earlier = before.server.get(pid)
        cores = (process.cpu_s - (earlier.cpu_s if earlier else 0)) / elapsed_s
        used.append((process.name, cores))
    used.sort(key=lambda entry: -entry[1])
    server = sum(cores for _, cores in used)
    client = (after.client_s - before.client_s) / elapsed_s
    other = (after.busy_s - before.busy_s) / elapsed_s - server - client
    steal = (after.steal_s - before.steal_s) / elapsed_s
    return {
        "server_cores": round(server, 2),
        "server_processes": [{"name": name, "cores": round(cores, 2)} for name, cores in used if cores >= 0.02],
        "client_cores": round(client, 2),
        "other_cores": round(other, 2) + 0.0,  # never -0.0
        "steal_cores": round(steal, 2),
        "noisy": other > NOISE_CORES or steal > NOISE_CORES,
    }
