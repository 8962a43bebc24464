"""Which torch device a handler computes on."""

from __future__ import annotations

import importlib.util
import os

import torch


def choose_device(gpu_id: int | None) -> tuple[torch.device, str | None]:
    """The device, and where weights are mapped to when loaded; TorchServe's order.

    A worker that was given no GPU stays on the CPU, whatever the machine has.
    """
    if gpu_id is not None:
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
