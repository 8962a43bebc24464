from __future__ import annotations

import os

from flambeau.metrics.system import (
    CpuTimes,
    HostReader,
    cpu_percent,
    parse_gpus,
    read_cpu_times,
    resident_bytes,
    to_readings,
)

HOST = {"MemoryUsed", "MemoryAvailable", "MemoryUtilization", "DiskUsage", "DiskAvailable", "DiskUtilization"}


def test_cpu_load_is_measured_between_two_readings():
    assert cpu_percent(CpuTimes(100, 1000), CpuTimes(150, 1100)) == 50.0
    assert cpu_percent(CpuTimes(100, 1000), CpuTimes(100, 1000)) is None  # no time has passed
    assert cpu_percent(None, CpuTimes(1, 2)) is None


def test_this_host_is_read_without_torch():
    host = HostReader()
    before = read_cpu_times()
    while read_cpu_times() == before:  # until a tick has passed
        pass
    readings = {name: value for name, _, value, _ in host.read(gpus=False)}
    assert readings.keys() == HOST | {"CPUUtilization"}
    assert 0 <= readings["CPUUtilization"] <= 100
    assert all(value >= 0 for value in readings.values())
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes(2**30) == 0


def test_gpus_are_read_from_the_table_of_nvidia_smi():
    table = "0, 35, 1024, 81559\n1, [N/A], [N/A], [N/A]\nnonsense\n"
    assert [*to_readings(parse_gpus(table, 3))] == [
        ("GPUMemoryUtilization", "Percent", 1.26, "0"),
        ("GPUMemoryUsed", "Megabytes", 1024.0, "0"),
        ("GPUUtilization", "Percent", 35.0, "0"),
    ]
