from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from flambeau.metrics.system import parse_gpus
from flambeau.serving.workers import host_resources
from flambeau.serving.workers.host_resources import (
    available_bytes,
    count_gpus,
    descendants,
    family_bytes,
    free_swap_bytes,
    private_bytes_of,
    resident_bytes,
    resident_bytes_of,
)

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TS_IPEX_GPU_ENABLE")


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """A machine without accelerators, with a folder for vendors' tools."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(host_resources, "NVIDIA_DRIVER", tmp_path / "no-driver")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    count_gpus.cache_clear()
    yield tmp_path
    count_gpus.cache_clear()


def tool(folder, name, script):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_machine_without_accelerators(bare_machine):
    tool(bare_machine, "nvidia-smi", "exit 9")
    assert count_gpus() == 0


@pytest.mark.parametrize(("value", "count"), [("", 0), ("-1", 0), ("0", 1), ("2,5", 2), ("GPU-1a, MIG-2b", 2)])
def test_visible_devices_are_counted_by_position(bare_machine, monkeypatch, value, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert count_gpus() == count


def test_nvidia_driver_and_tool(bare_machine, monkeypatch):
    tool(bare_machine, "nvidia-smi", 'echo "GPU 0: A100 (UUID: x)"; echo "GPU 1: A100 (UUID: y)"')
    assert count_gpus() == 2
    (bare_machine / "driver" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(host_resources, "NVIDIA_DRIVER", bare_machine / "driver")
    count_gpus.cache_clear()
    assert count_gpus() == 1


def test_intel_gpus_are_counted_when_they_are_asked_for(bare_machine, monkeypatch):
    tool(bare_machine, "xpu-smi", "echo Device ID; echo 0; echo 1; echo 2")
    assert count_gpus() == 0
    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    count_gpus.cache_clear()
    assert count_gpus() == 3


def test_apple_silicon_has_one(bare_machine, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert count_gpus() == 1


def test_memory_of_a_missing_process_is_zero():
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes_of([os.getpid(), -1]) > 1 << 20
    assert resident_bytes(-1) == resident_bytes(1 << 30) == 0


def test_memory_left_is_the_smaller_of_the_hosts_and_the_containers(tmp_path):
    host = tmp_path / "meminfo"
    host.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert available_bytes(tmp_path / "none", host) == 5000 << 10
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100\n")
    assert available_bytes(tmp_path, host) == 5000 << 10
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_bytes(tmp_path, host) == 400


def test_gpu_usage_has_the_format_of_describe(monkeypatch):
    table = "0, 17, 3, 1024\n1, 0, 0, 5\nodd line\n"
    monkeypatch.setattr(host_resources, "query_gpus", lambda *fields: parse_gpus(table, len(fields)))
    assert host_resources.gpu_usage() == {
        0: "gpuId::0 utilization.gpu::17 % utilization.memory::3 % memory.used::1024 MiB",
        1: "gpuId::1 utilization.gpu::0 % utilization.memory::0 % memory.used::5 MiB",
    }


def test_usage_is_empty_without_the_vendors_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert host_resources.gpu_usage() == {}


FAMILY = """
import os, subprocess, sys, time
hoard = bytearray(os.urandom(1 << 20) * 64)
if sys.argv[1] == "forks":
    for _ in range(2):
        if os.fork() == 0:
            break
else:
    subprocess.Popen([sys.executable, "-c", "import os; h = os.urandom(1 << 20) * 64; print(flush=True); input()"])
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("how", "copies"), [("forks", 1), ("starts", 2)])
def test_memory_of_a_family_counts_shared_pages_once(how, copies):
    command = [sys.executable, "-c", FAMILY, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            for _ in range(2):
                parent.stdout.readline()
            assert len([*descendants(parent.pid)]) >= 1
            used = family_bytes([parent.pid], limit=70 << 20)
            assert copies * 64 <= used >> 20 < copies * 64 + 40
            assert family_bytes([parent.pid], limit=1 << 40) < 110 << 20  # far from it, only the parent is looked at
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_private_memory_is_part_of_the_resident_memory():
    assert 0 < private_bytes_of([os.getpid()]) < resident_bytes(os.getpid())
    assert private_bytes_of([0]) == 0


def test_free_swap(tmp_path):
    file = tmp_path / "meminfo"
    assert free_swap_bytes(file) == 0
    file.write_text("MemAvailable: 10 kB\nSwapFree: 3 kB\n")
    assert free_swap_bytes(file) == 3 << 10
