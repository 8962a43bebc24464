"""The device, dtype and number of threads a handler computes with.

torch is imported on use: the ONNX handlers run without it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from flambeau.errors import HandlerError

if TYPE_CHECKING:
    import torch

AMPERE = 8  # first compute capability with TF32 for float32 products

DTYPES = {"float32": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}  # config → torch


def choose_device(gpu_id: int | str | None) -> tuple[torch.device, str | None]:
    """The device, and the `map_location` for weights.

    The order is CUDA, XPU, MPS, XLA, CPU. A worker without a GPU id stays on the CPU, even if the machine has GPUs.
    """
    import torch

    if gpu_id is not None:
        gpu_id = int(gpu_id)  # tests of handlers pass "0"
        if torch.cuda.is_available():
            return torch.device("cuda", gpu_id), "cuda"
        if os.environ.get("TS_IPEX_GPU_ENABLE") == "true" and torch.xpu.is_available():
            return torch.device("xpu", gpu_id), "xpu"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "mps"
    if importlib.util.find_spec("torch_xla") is not None:
        import torch_xla.core.xla_model as xm

        return xm.xla_device(), None
    return torch.device("cpu"), "cpu"


def prepare(device: torch.device) -> None:
    """Make it the current device, and enable TF32 for float32 products if the GPU has it."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)
        if torch.cuda.get_device_capability(device)[0] >= AMPERE:
            torch.set_float32_matmul_precision("high")


def dtype_named(name: str) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise HandlerError(f"dtype: {name} is not known; use one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def choose_threads() -> int:
    """The number of threads the server assigned to this worker, else every core it may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
