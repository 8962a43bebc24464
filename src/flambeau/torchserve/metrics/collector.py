"""A script that prints the state of the host: one metric per line, an empty line, then the memory of processes."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from flambeau.metrics.system import HostReader, Reading, read_disk, read_gpus, read_memory, resident_bytes
from flambeau.torchserve.metrics.metric import Dimension
from flambeau.torchserve.metrics.store import Metric

MEASURED_S = 0.2  # the interval for the CPU load


class SystemMetricsCollector:
    """Appends readings of the host to `metrics`, one method per metric."""

    def __init__(self, dimensions: list[Dimension]) -> None:
        self.metrics: list[Metric] = []
        self.dimensions = dimensions

    def cpu_utilization(self) -> None:
        """Measure the CPU load over MEASURED_S."""
        host = HostReader()
        time.sleep(MEASURED_S)
        self._add(host.read(gpus=False), "CPUUtilization")

    def memory_used(self) -> None:
        self._add(read_memory(), "MemoryUsed")

    def memory_available(self) -> None:
        self._add(read_memory(), "MemoryAvailable")

    def memory_utilization(self) -> None:
        self._add(read_memory(), "MemoryUtilization")

    def disk_used(self) -> None:
        self._add(read_disk(), "DiskUsage")

    def disk_utilization(self) -> None:
        self._add(read_disk(), "DiskUtilization")

    def disk_available(self) -> None:
        self._add(read_disk(), "DiskAvailable")

    def gpu_utilization(self, num_of_gpu: int | None) -> None:
        """Add the load and memory of all GPUs, if there are any."""
        if num_of_gpu:
            self._add(read_gpus(), "GPUMemoryUtilization", "GPUMemoryUsed", "GPUUtilization")

    def collect_all(self, mod: Any = None, num_of_gpu: int | None = 0) -> None:
        """Read everything and print it, followed by an empty line."""
        for read in (
            self.cpu_utilization,
            self.disk_available,
            self.disk_used,
            self.disk_utilization,
            self.memory_available,
            self.memory_used,
            self.memory_utilization,
        ):
            read()
        self.gpu_utilization(num_of_gpu)
        for metric in self.metrics:
            logging.info("%s", metric)
        logging.info("")

    def _add(self, readings: Iterable[Reading], *names: str) -> None:
        for name, unit, value, device in readings:
            if name in names:
                more = [] if device is None else [Dimension("device_id", device)]
                self.metrics.append(Metric(name, value, unit, [*self.dimensions, *more]))


HOST_COLLECTOR = SystemMetricsCollector([Dimension("Level", "Host")])


def get_cpu_usage(pid: str | int) -> int:
    """The resident memory of a process in bytes; 0 if there is no such process."""
    return resident_bytes(int(pid))


def check_process_mem_usage(stdin: TextIO) -> None:
    """Read comma-separated process ids and print the memory of each."""
    for pid in stdin.readline().strip().split(","):
        if pid:
            logging.info("%s:%d", pid, get_cpu_usage(pid))


def main() -> None:
    """Print the host's metrics, then the memory of the processes named on stdin."""
    parser = argparse.ArgumentParser(description="Print the state of this host and of processes")
    parser.add_argument("--gpu", type=int, default=0, help="number of GPUs")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    HOST_COLLECTOR.collect_all(None, arguments.gpu)
    check_process_mem_usage(sys.stdin)
