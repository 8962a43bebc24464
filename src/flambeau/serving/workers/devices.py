"""Accelerators of this host, found without torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from flambeau.metrics.system import query_gpus

NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
AMD_DRIVER = Path("/dev/kfd")


@cache
def count_gpus() -> int:
    """How many GPUs workers may use; visibility variables count positions, so UUIDs and MIG ids are fine."""
    visible = os.environ.get(visibility_variable())
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if NVIDIA_DRIVER.is_dir():
        return len([*NVIDIA_DRIVER.iterdir()])
    if count := output_of("nvidia-smi", "-L").count("GPU "):
        return count
    if os.environ.get("TS_IPEX_GPU_ENABLE") == "true":  # Intel's are used only when asked for, as in TorchServe
        return count_xpus(output_of("xpu-smi", "discovery", "--dump", "1"))
    return int(sys.platform == "darwin" and platform.machine() == "arm64")  # Metal shows one device


def visibility_variable() -> str:
    """The variable that limits which GPUs a process sees: the one that is set, or else this vendor's."""
    known = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
    if os.environ.get("TS_IPEX_GPU_ENABLE") == "true":
        known.append("ZE_AFFINITY_MASK")
    if named := [variable for variable in known if variable in os.environ]:
        return named[0]
    if NVIDIA_DRIVER.is_dir():
        return known[0]
    return known[1] if AMD_DRIVER.exists() else known[2] if len(known) > 2 else known[0]


def gpu_usage() -> dict[int, str]:
    """How busy each NVIDIA GPU is, in the words of `describe`; empty where that cannot be told."""
    rows = query_gpus("utilization.gpu", "utilization.memory", "memory.used")
    return {
        int(number): f"gpuId::{number} utilization.gpu::{gpu} % utilization.memory::{memory} % memory.used::{used} MiB"
        for number, gpu, memory, used in rows
    }


def count_xpus(listing: str) -> int:
    """The devices in a list of xpu-smi: a line each, below a headline."""
    return max(0, len([line for line in listing.splitlines() if line.strip()]) - 1)


def output_of(*command: str) -> str:
    """What a vendor's tool prints; nothing where it is missing or fails."""
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
