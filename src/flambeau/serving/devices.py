"""Accelerators of this host, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path


@cache
def count_gpus() -> int:
    """How many GPUs workers may use; visibility variables count positions, so UUIDs and MIG ids are fine."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = os.environ.get(variable)
        if visible is not None:
            return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    drivers = Path("/proc/driver/nvidia/gpus")
    if drivers.is_dir():
        return len([*drivers.iterdir()])
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    return listing.stdout.count("GPU ") if listing.returncode == 0 else 0


def count_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
