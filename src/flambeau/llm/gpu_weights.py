"""Which quantized weights stay as files have them on a GPU, and in what order the kernels read them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.quantize.coded import CodedLinear, CodeLayout, CudaCodedLinear
from flambeau.llm.quantize.cuda_groups import (
    CudaGroupedLinear,
    CudaGroupedStack,
    has_whole_octets,
    join_neighbors,
)
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout, JoinedLinear
from flambeau.llm.quantize.quantizer import CudaCodedStack, ExpertStack

CAPABILITY = (8, 9)  # the first with 8-bit floating point numbers
BFLOAT16_CAPABILITY = (8, 0)


def can_keep_on_gpu(
    config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None, arch: Architecture
) -> bool:
    """Whether fp8 with scales of blocks and codes of 4 bits stay: only the Triton kernels multiply them fast."""
    return can_use_kernels(config, device, ranks, arch, CAPABILITY)


def can_keep_integers(
    config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None, arch: Architecture
) -> bool:
    """Whether integers in groups stay, and the codes of GGUF files; with several ranks, in plain PyTorch."""
    if ranks is not None:
        return device.type != "cpu" and config.quantization is None and not config.merge_lora
    return can_use_kernels(config, device, ranks, arch, BFLOAT16_CAPABILITY)


def can_use_kernels(
    config: EngineConfig,
    device: torch.device,
    ranks: TensorParallelGroup | None,
    arch: Architecture,
    capability: tuple[int, int],
) -> bool:
    """Whether the Triton kernels compute a network with the weights of its files."""
    is_plain = config.quantization is None and not config.merge_lora and ranks is None
    if device.type != "cuda" or not config.compile or not is_plain or torch.version.hip is not None:
        return False
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < capability:
        return False
    return not unknown_parts(arch)  # else Inductor would widen weights in each step


def order_codes(dtype: torch.dtype, *, is_part: bool = False) -> Callable[[str, nn.Module], nn.Module | None]:
    """For `load_model(arrived=…)`: puts codes and levels into the order of the kernels as soon as a layer is loaded.

    Of a rank's part, which has no kernels, only levels: in that order they take no more bits than they need.
    """

    def arrived(_: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, CodedLinear) and not is_part:
            return CudaCodedLinear(module, dtype)
        if isinstance(module, GroupedLinear) and has_whole_octets(module.layout):
            return CudaGroupedLinear(module)
        if isinstance(module, ExpertStack) and isinstance(module.layout, CodeLayout) and not is_part:
            return CudaCodedStack(module)
        if isinstance(module, ExpertStack) and isinstance(module.layout, GroupLayout):
            return CudaGroupedStack(module) if has_whole_octets(module.layout) else None
        return None

    return arrived


def join_equal_parts(model: nn.Module) -> None:
    """Let neighbors of one layout among the projections of a module be one part."""
    for module in [*model.modules()]:
        if isinstance(module, JoinedLinear):
            join_neighbors(module)
