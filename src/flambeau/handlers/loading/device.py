"""Which torch device a handler computes on, and with what precision."""

from __future__ import annotations

import importlib.util
import os

import torch

from flambeau.errors import HandlerError

AMPERE = 8  # from this compute capability on, float32 products can use TF32

DTYPES = {"float32": torch.float32, "float16": torch.float16, "half": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(gpu_id: int | str | None) -> tuple[torch.device, str | None]:
    """The device, and where weights are mapped to when loaded; TorchServe's order.

    A worker that was given no GPU stays on the CPU, whatever the machine has.
    """
    if gpu_id is not None:
        gpu_id = int(gpu_id)  # handlers' own tests say "0"
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
    """Make it the current device, and let its float32 products be quick where the hardware can."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if torch.cuda.get_device_capability(device)[0] >= AMPERE:
            torch.set_float32_matmul_precision("high")


def dtype_named(name: str) -> torch.dtype:
    """The dtype a model-config names."""
    if name not in DTYPES:
        raise HandlerError(f"dtype: {name} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]
