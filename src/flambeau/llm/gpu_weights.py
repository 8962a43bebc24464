"""Which quantized weights stay as files have them on a GPU, and in what order the kernels read them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.parallel import TensorParallelGroup
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.quantize.coded import CodedLinear, CodeLayout, CudaCodedLinear
from flambeau.llm.quantize.quantizer import CudaCodedStack, ExpertStack

CAPABILITY = (8, 9)  # the first with 8-bit floating point numbers


def can_keep_on_gpu(
    config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None, arch: Architecture
) -> bool:
    """Whether fp8 with scales of blocks and codes of 4 bits stay: only the Triton kernels multiply them fast."""
    is_plain = config.quantization is None and not config.merge_lora and ranks is None
    if device.type != "cuda" or not config.compile or not is_plain or torch.version.hip is not None:
        return False
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    return arch.recurrence is None and not unknown_parts(arch)  # else Inductor would widen weights in each step


def order_codes(dtype: torch.dtype) -> Callable[[str, nn.Module], nn.Module | None]:
    """For `load_model(arrived=…)`: puts codes into the order of the kernels as soon as a layer is loaded."""

    def arrived(_: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, CodedLinear):
            return CudaCodedLinear(module, dtype)
        is_coded = isinstance(module, ExpertStack) and isinstance(module.layout, CodeLayout)
        return CudaCodedStack(module) if is_coded and isinstance(module, ExpertStack) else None

    return arrived
