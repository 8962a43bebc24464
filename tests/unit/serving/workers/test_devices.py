from __future__ import annotations

import platform
import sys

import pytest

from flambeau.serving.workers import devices
from flambeau.serving.workers.devices import count_gpus

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TS_IPEX_GPU_ENABLE")


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """A machine without accelerators, with a folder for vendors' tools."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(devices, "NVIDIA_DRIVER", tmp_path / "no-driver")
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
    monkeypatch.setattr(devices, "NVIDIA_DRIVER", bare_machine / "driver")
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
