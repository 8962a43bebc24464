"""kernel_linear: which kernels compute a linear layer, by the form of its weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from flambeau.llm.backends.cuda import few_row_kernel
from flambeau.llm.backends.cuda.code_instructions import Codes
from flambeau.llm.backends.cuda.group_scaled import GroupScaledLinear
from flambeau.llm.backends.cuda.joined_linear import JoinedKernelLinear
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.supported_networks import GROUPED
from flambeau.llm.models.architecture import Activation
from flambeau.llm.quantize.coded import CudaCodedLinear, table_tensor
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear, pair_bits
from flambeau.llm.quantize.groups import JoinedLinear
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.row_scaled import RowScaledLinear


def kernel_linear(layer: nn.Module, *, gates: bool = False, activation: Activation | None = None) -> KernelLinear:
    """A linear layer for the kernels; the activation of gates is SiLU unless said otherwise."""
    activation = activation or ("silu" if gates else None)
    if isinstance(layer, JoinedLinear):
        parts = tuple(kernel_linear(part) for part in layer.parts)
        return JoinedKernelLinear(
            layer=layer, weight=parts[0].weight, bias=layer.bias, gates=gates, activation=activation, parts=parts
        )
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    if isinstance(layer, GROUPED) or (isinstance(layer, RowScaledLinear) and layer.scale.dim() == 2):
        return group_scaled_linear(layer, gates=gates, activation=activation)
    has_kernel = few_row_kernel.runs_on(weight.device) and few_row_kernel.kind_of(layer) is not None
    scales = few_row_kernel.kernel_scales(layer, gates) if has_kernel else None
    linear = KernelLinear(
        layer=layer, weight=weight, bias=bias, gates=gates, activation=activation, kernel_scales=scales
    )
    if isinstance(layer, (RowScaledLinear, CudaFp8Linear)):
        return replace(linear, scale=layer.scale.flatten())
    if isinstance(layer, CudaInt4Linear):
        return replace(linear, scale=layer.scales, minimums=layer.minimums, group_size=layer.group_size)
    return linear


def group_scaled_linear(
    layer: CudaCodedLinear | CudaGroupedLinear | RowScaledLinear, *, gates: bool, activation: Activation | None
) -> GroupScaledLinear:
    """A linear layer with scales of groups for the kernels."""
    linear = GroupScaledLinear(layer=layer, weight=layer.weight, bias=layer.bias, gates=gates, activation=activation)
    if isinstance(layer, RowScaledLinear):
        group_size = layer.in_features // layer.scale.shape[1]
        return replace(linear, scale=layer.scale, group_size=group_size)
    if isinstance(layer, CudaGroupedLinear):
        return replace(
            linear,
            scale=layer.scales,
            minimums=layer.minimums,
            group_size=layer.layout.size,
            bits=pair_bits(layer.layout),
            more=layer.more,
            factors=layer.factors,
        )
    layout = layer.layout
    return replace(
        linear,
        scale=layer.scales,
        group_size=layout.size,
        codes=Codes(layout, table_tensor(layout, layer.weight.device)),
    )
