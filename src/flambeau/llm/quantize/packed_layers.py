"""Faster versions of quantized layers for CPUs and NVIDIA GPUs, used where the machine has them and they are correct.

On a CPU, PyTorch's operations compute in bfloat16, which costs less precision than quantization did. A token's result
of such a layer does not depend on the batch size. Int8Linear has no faster version for GPUs: the kernels, or a
compiler, use its plain form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.quantize.coded import CodedLinear, CodeLayout, CudaCodedLinear
from flambeau.llm.quantize.int4 import GROUP_SIZES, Int4Linear, unpack_int4
from flambeau.llm.quantize.quantizer import CudaCodedStack, ExpertStack
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear, dequantize_rows, quantize_fp8

logger = logging.getLogger(__name__)

FastLayer = Callable[[Any], nn.Module]

MAX_ERROR = 0.02  # allowed error relative to the largest output: bfloat16
MAX_FP8_ERROR = 0.1  # with 8-bit inputs


def use_fast_layers(
    model: nn.Module, dtype: torch.dtype, *, keeps_plain: bool = False, has_gpu_kernels: bool = True
) -> None:
    """Replace quantized layers by faster ones with the same results; layers without one stay as they are.

    With `keeps_plain`, those for a CPU keep what the CPU kernels are made from later. Without `has_gpu_kernels`,
    nothing is put into their order.
    """
    unusable: set[type] = set()
    checked: set[type] = set()
    for name in [name for name, _ in model.named_modules()]:  # names only: replaced layers must be freed
        layer: Any = model.get_submodule(name)
        make = fast_layer_for(layer, dtype, keeps_plain=keeps_plain, has_gpu_kernels=has_gpu_kernels)
        if make is None or type(layer) in unusable:
            continue
        try:
            faster = make(layer)
            if type(layer) not in checked and not isinstance(layer, ExpertStack):
                check(faster, layer, dtype)
                checked.add(type(layer))
            model.set_submodule(name, faster)
        except ValueError:
            continue  # not for this shape
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            unusable.add(type(layer))
            logger.warning("%s stays in plain PyTorch on this machine: %s", type(layer).__name__, error)


def fast_layer_for(
    layer: nn.Module, dtype: torch.dtype, *, keeps_plain: bool = False, has_gpu_kernels: bool = True
) -> FastLayer | None:
    """The faster version of a layer on its device; None: there is none."""
    if isinstance(layer, Int4Linear):
        if layer.weight.is_cuda:
            is_known = has_gpu_kernels and has_capability(layer.weight, 8, 0)
            return partial(CudaInt4Linear, dtype=dtype) if is_known else None
        return partial(CpuInt4Linear, keeps_plain=keeps_plain) if layer.weight.device.type == "cpu" else None
    if isinstance(layer, Int8Linear):
        return CpuInt8Linear if layer.weight.device.type == "cpu" else None
    if isinstance(layer, Fp8Linear):
        has_rows = layer.scale.dim() == 1  # the Triton kernels read scales of groups as they are
        return CudaFp8Linear if has_rows and layer.weight.is_cuda and has_capability(layer.weight, 8, 9) else None
    if isinstance(layer, CodedLinear):
        return partial(CudaCodedLinear, dtype=dtype) if has_gpu_kernels and layer.weight.is_cuda else None
    if isinstance(layer, ExpertStack) and isinstance(layer.layout, CodeLayout) and has_gpu_kernels:
        is_new = layer.get_buffer("weight").is_cuda and not isinstance(layer, CudaCodedStack)
        return CudaCodedStack if is_new else None
    return None


def has_capability(tensor: Tensor, major: int, minor: int) -> bool:
    """Whether the tensor's GPU has this compute capability."""
    return torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (major, minor)


@torch.inference_mode()
def check(faster: nn.Module, plain: Int8Linear | Int4Linear | Fp8Linear | CodedLinear, dtype: torch.dtype) -> None:
    """Raise if a faster layer does not give the results of the plain one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, plain.in_features, generator=generator).to(plain.weight.device, dtype)
    expected = plain(x).float()
    difference = (faster(x).float() - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    allowed = MAX_FP8_ERROR if isinstance(plain, Fp8Linear) else MAX_ERROR
    if not difference <= allowed:
        raise RuntimeError(f"the faster layer is off by {float(difference):.1%}")


ALIGNMENT_BYTES = 64


class CpuInt8Linear(nn.Module):
    """Int8Linear that reads 8-bit weights directly."""

    def __init__(self, plain: Int8Linear) -> None:
        super().__init__()
        if plain.scale.dim() > 1:
            raise ValueError("PyTorch's kernel has one scale for a row")
        if plain.in_features % 16:  # PyTorch's kernel crashes on rows that are not aligned
            raise ValueError(f"rows of {plain.in_features} numbers do not divide into vectors")
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", aligned(plain.weight))
        is_wide = plain.scale.dtype != torch.bfloat16  # the kernel has bfloat16: other scales are applied after it
        self.register_buffer(
            "scale", aligned(torch.ones_like(plain.scale, dtype=torch.bfloat16) if is_wide else plain.scale)
        )
        self.wide_scale: Tensor | None
        self.register_buffer("wide_scale", plain.scale if is_wide else None)
        self.bias = plain.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        return dequantize_rows(self.weight, self.scale if self.wide_scale is None else self.wide_scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        flat = x.flatten(0, -2).to(torch.bfloat16).contiguous()
        y = torch._weight_int8pack_mm(flat, self.weight, self.scale)
        return shaped(y if self.wide_scale is None else y * self.wide_scale, x, self.bias)


class CpuInt4Linear(nn.Module):
    """Int4Linear with its weights in PyTorch's packed order."""

    def __init__(self, plain: Int4Linear, *, keeps_plain: bool = False) -> None:
        super().__init__()
        if plain.group_size not in GROUP_SIZES:
            raise ValueError(f"groups of {plain.group_size} weights, of a rank's part, are not known")
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.group_size = plain.group_size
        self._kept: tuple[Int4Linear, ...] = (plain,) if keeps_plain else ()  # in a tuple: not a part of the network
        self.weight: Tensor
        self.scales_and_zeros: Tensor
        levels = unpack_int4(plain.weight).to(torch.int32)
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1))
        self.register_buffer("scales_and_zeros", scales_and_zeros(plain))
        self.bias = plain.bias

    @property
    def plain(self) -> Int4Linear | None:
        """The original layer, if it is kept until the CPU kernels are built."""
        return self._kept[0] if self._kept else None

    def forget_plain(self) -> None:
        self._kept = ()

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        flat = x.flatten(0, -2).to(torch.bfloat16).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.weight, self.group_size, self.scales_and_zeros)
        return shaped(y, x, self.bias)


def aligned(tensor: Tensor) -> Tensor:
    """An aligned tensor: PyTorch's int8 kernel crashes on unaligned ones, as mapped files have them."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


def shaped(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs [tokens, O] with the type and leading dimensions of the inputs, plus the bias."""
    y = y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])  # also of no tokens
    return y if bias is None else y + bias


def scales_and_zeros(plain: Int4Linear) -> Tensor:
    """[groups, outputs, 2] in PyTorch's layout: its zero is the value of level 8, not of level 0."""
    zeros = plain.minimums.float() + 8 * plain.scales.float()
    pairs = torch.stack((plain.scales.float(), zeros), dim=2)
    return pairs.transpose(0, 1).to(torch.bfloat16).contiguous()


class CudaInt4Linear(nn.Module):
    """Int4Linear in the order of the Triton kernels: the two weights of a byte are half a group apart."""

    def __init__(self, plain: Int4Linear, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.group_size = plain.group_size
        scale_dtype = (
            torch.bfloat16 if dtype == torch.bfloat16 else plain.scales.dtype
        )  # rounded in this network anyway
        self.weight: Tensor
        self.scales: Tensor
        self.minimums: Tensor
        groups = unpack_int4(plain.weight).view(plain.out_features, -1, 2, plain.group_size // 2)
        self.register_buffer("weight", (groups[:, :, 0] << 4 | groups[:, :, 1]).flatten(1))
        self.register_buffer("scales", plain.scales.to(scale_dtype))
        self.register_buffer("minimums", plain.minimums.to(scale_dtype))
        self.bias = plain.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        pairs = self.weight.view(len(self.weight), -1, self.group_size // 2)
        levels = torch.cat((pairs >> 4, pairs & 15), dim=2).to(dtype)
        scaled = torch.addcmul(self.minimums.to(dtype).unsqueeze(2), levels, self.scales.to(dtype).unsqueeze(2))
        return scaled.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O], for many tokens: the weights are widened first. The Triton kernels compute few tokens."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


class CudaFp8Linear(nn.Module):
    """Fp8Linear on tensor cores that multiply 8-bit numbers: inputs are quantized too, with one scale per token."""

    def __init__(self, plain: Fp8Linear) -> None:
        super().__init__()
        if plain.in_features % 16 or plain.out_features % 16:
            raise ValueError(f"{plain.out_features}x{plain.in_features} does not divide into tiles")
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", plain.weight)
        self.register_buffer("scale", plain.scale.unsqueeze(0))
        self.bias = plain.bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        return dequantize_rows(self.weight, self.scale.squeeze(0), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        small, scale = quantize_fp8(x.flatten(0, -2))
        y = torch._scaled_mm(
            small, self.weight.t(), scale_a=scale.unsqueeze(1), scale_b=self.scale, out_dtype=torch.bfloat16
        )
        return shaped(y, x, self.bias)
