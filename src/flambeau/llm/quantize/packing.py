"""Puts the layers in place that are faster on the machine at hand, where it has them and they are right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.quantize.cpu_layers import CpuInt4Linear, CpuInt8Linear
from flambeau.llm.quantize.cuda_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.fp8 import Fp8Linear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.int8 import Int8Linear

logger = logging.getLogger(__name__)

Faster = Callable[[Any], nn.Module]

ROUNDING = 0.02  # of the largest output: what bfloat16 may cost
INPUT_ROUNDING = 0.1  # where inputs have 8 bits, too


def pack(model: nn.Module, dtype: torch.dtype) -> None:
    """Exchange quantized layers for faster ones that give the same; those that have none stay as they are."""
    refused: set[type] = set()
    checked: set[type] = set()
    for name in [name for name, _ in model.named_modules()]:  # names alone: layers are to go as others take their place
        layer: Any = model.get_submodule(name)
        make = faster_for(layer, dtype)
        if make is None or type(layer) in refused:
            continue
        try:
            faster = make(layer)
            if type(layer) not in checked:
                check(faster, layer, dtype)
                checked.add(type(layer))
            model.set_submodule(name, faster)
        except ValueError:
            continue  # only this shape has none
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            refused.add(type(layer))
            logger.warning("%s stays in plain PyTorch on this machine: %s", type(layer).__name__, error)


def faster_for(layer: nn.Module, dtype: torch.dtype) -> Faster | None:
    """The faster kind of a layer on the device it is on; None: it has none."""
    if isinstance(layer, Int4Linear):
        if layer.weight.is_cuda:
            return CudaInt4Linear if has_capability(layer.weight, 8, 0) else None
        return CpuInt4Linear if layer.weight.device.type == "cpu" else None
    if isinstance(layer, Int8Linear):
        return CpuInt8Linear if layer.weight.device.type == "cpu" else None
    if isinstance(layer, Fp8Linear):
        return CudaFp8Linear if layer.weight.is_cuda and has_capability(layer.weight, 8, 9) else None
    return None


def has_capability(tensor: Tensor, major: int, minor: int) -> bool:
    """Whether the GPU of a tensor is new enough."""
    return torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (major, minor)


@torch.inference_mode()
def check(faster: nn.Module, plain: Int8Linear | Int4Linear | Fp8Linear, dtype: torch.dtype) -> None:
    """Refuse a layer that does not give what its plain twin gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, plain.in_features, generator=generator).to(plain.weight.device, dtype)
    expected = plain(x).float()
    difference = (faster(x).float() - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    allowed = INPUT_ROUNDING if isinstance(plain, Fp8Linear) else ROUNDING
    if not difference <= allowed:
        raise RuntimeError(f"the faster layer is off by {float(difference):.1%}")
