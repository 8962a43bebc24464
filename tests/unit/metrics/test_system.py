from __future__ import annotations

import os
import re
import subprocess
import sys

from flambeau.metrics.log_lines import parse_line
from flambeau.metrics.system import (
    CpuTimes,
    HostWatch,
    cpu_percent,
    parse_gpus,
    read_cpu_times,
    resident_bytes,
    to_readings,
)
from flambeau.serving.host_watcher import understand

HOST = {"MemoryUsed", "MemoryAvailable", "MemoryUtilization", "DiskUsage", "DiskAvailable", "DiskUtilization"}


def test_load_is_what_happened_between_two_looks():
    assert cpu_percent(CpuTimes(100, 1000), CpuTimes(150, 1100)) == 50.0
    assert cpu_percent(CpuTimes(100, 1000), CpuTimes(100, 1000)) is None  # no time has passed
    assert cpu_percent(None, CpuTimes(1, 2)) is None


def test_this_host_is_read_without_torch():
    watch = HostWatch()
    before = read_cpu_times()
    while read_cpu_times() == before:  # until a tick has passed
        pass
    readings = {name: value for name, _, value, _ in watch.read(gpus=False)}
    assert readings.keys() == HOST | {"CPUUtilization"}
    assert 0 <= readings["CPUUtilization"] <= 100
    assert all(value >= 0 for value in readings.values())
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes(2**30) == 0


def test_gpus_from_their_vendors_table():
    table = "0, 35, 1024, 81559\n1, [N/A], [N/A], [N/A]\nnonsense\n"
    assert [*to_readings(parse_gpus(table, 3))] == [
        ("GPUMemoryUtilization", "Percent", 1.26, "0"),
        ("GPUMemoryUsed", "Megabytes", 1024.0, "0"),
        ("GPUUtilization", "Percent", 35.0, "0"),
    ]


def test_a_commands_lines_and_its_processes(caplog):
    lines = ["CPUUtilization.Percent:12.5|#Level:Host|#hostname:h,1", "noise", ""]
    lines += ["GPUUtilization.Percent:1|#Level:Host,device_id:3|#hostname:h,1", "12:4096", "x:y"]
    readings = understand([lines[3], *lines[:3], *lines[4:]])
    assert readings == [("GPUUtilization", "Percent", 1.0, "3"), ("CPUUtilization", "Percent", 12.5, None)]
    assert "no metric: noise" in caplog.text
    assert "x:y" not in caplog.text


def test_the_collector_script_speaks_the_protocol():
    program = [sys.executable, "-m", "ts.metrics.metric_collector", "--gpu", "0"]
    done = subprocess.run(program, input=f"{os.getpid()},\n", capture_output=True, text=True, check=True, timeout=50)
    readings = understand(done.stdout.splitlines())
    assert {name for name, _, _, _ in readings} == HOST | {"CPUUtilization"}
    assert re.search(rf"^{os.getpid()}:[1-9]", done.stdout, re.MULTILINE)
    assert all(parse_line(line) for line in done.stdout.split("\n\n")[0].splitlines())
