"""Whether there is the device that a benchmark needs: asked first, as making networks and processes takes a while."""

import torch


def need_device(device: str = "cuda") -> None:
    """End the program in words if PyTorch finds no such device."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"this needs a CUDA device, and PyTorch {torch.__version__} finds none here")
