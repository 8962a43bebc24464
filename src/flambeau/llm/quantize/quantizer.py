"""Quantizes a network, or each layer while it is loaded; builds an empty network for quantized files.

Shapes: N experts · O outputs · I inputs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flambeau.llm.config import Quantization
from flambeau.llm.errors import LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.tensor_names import part_rows
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.coded import (
    CodedLinear,
    CodeLayout,
    dequantize_codes,
    half_groups_apart,
    narrow_scales,
)
from flambeau.llm.quantize.groups import GroupedLinear, JoinedLinear, dequantize_levels, wide_scales
from flambeau.llm.quantize.int4 import Int4Linear, dequantize_groups
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear, dequantize_rows
from flambeau.llm.quantize.settings import PartLayout, Parts, QuantizationSettings, read_quantization

QuantizedLinear = Int8Linear | Int4Linear | Fp8Linear | CodedLinear
STACKS = ("gate_up_proj", "down_proj")  # of experts
MakeLayer = Callable[[nn.Linear, QuantizationSettings], nn.Module]


class LayerMakers(NamedTuple):
    """What quantizes linear layers, and the weights of all experts of a layer as one: these stay in plain form."""

    linear: MakeLayer
    experts: MakeLayer


def quantize(model: Transformer, kind: Quantization, *, group_size: int = 64, lm_head: bool = False) -> Transformer:
    """Replace the linear layers of a network by quantized ones."""
    replace_layers(model, QuantizationSettings(kind=kind, group_size=group_size, lm_head=lm_head), quantized_layer)
    return model


def quantize_on_load(
    kind: Quantization | None, arch: Architecture, makers: LayerMakers | None = None
) -> Callable[[str, nn.Module], nn.Module | None] | None:
    """For `load_model(arrived=…)`: quantizes each layer as soon as it is loaded; None if the files are quantized."""
    written = read_quantization(arch.source)
    if kind is None or (written is not None and written.kind == kind):
        return None
    if written is not None:
        raise LLMError(
            f"the checkpoint holds {written.kind} weights; leave quantization out, or load the original one for {kind}"
        )
    settings = QuantizationSettings(kind=kind)
    makers = makers or LayerMakers(quantized_layer, quantized_layer)
    return lambda name, module: replacement_for(
        name, module, settings, makers.linear if isinstance(module, nn.Linear) else makers.experts
    )


def build(arch: Architecture, *, whole: Architecture | None = None) -> Transformer:
    """An empty network with the parameters of its checkpoint, quantized if config.json says so.

    If it is one rank's part of a network, `whole` is that network: the same layers are quantized.
    """
    model = Transformer(arch)
    settings = read_quantization(arch.source)
    if settings is not None and whole is not None and settings.layers is None and not settings.groups:
        settings = replace(settings, layers=quantized_modules(Transformer(whole), settings))
    if settings is not None and settings.groups:
        for name, parts in settings.groups.items():
            replace_by_groups(model, name, parts)
    elif settings is not None:
        replace_layers(model, settings, empty_layer)
    return model


def replace_by_groups(model: Transformer, name: str, parts: Parts) -> None:
    """Replace a linear layer, the embeddings or the weights of experts by empty ones with these layouts."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    current: Any = getattr(owner, leaf)
    layout = parts[0]
    if isinstance(owner, Experts):
        assert layout is not None
        delattr(owner, leaf)
        num_experts, out_features, in_features = current.shape
        rows = empty_groups(in_features, num_experts * out_features, layout)
        owner.add_module(leaf, ExpertStack(rows, num_experts=num_experts, dtype=current.dtype))
    elif isinstance(current, nn.Embedding):
        assert layout is not None
        shape = current.embedding_dim, current.num_embeddings
        rows = CodedLinear(*shape, layout) if isinstance(layout, CodeLayout) else GroupedLinear(*shape, layout)
        model.set_submodule(name, RowEmbedding(rows))
    elif len(parts) == 1:
        assert layout is not None
        has_bias = current.bias is not None
        model.set_submodule(name, empty_groups(current.in_features, current.out_features, layout, bias=has_bias))
    else:
        slices = part_rows(model.arch, f"{name}.weight", current.out_features).values()
        sizes = [rows.stop - rows.start for rows in slices]
        joined = [empty_part(current.in_features, size, each) for size, each in zip(sizes, parts, strict=True)]
        model.set_submodule(name, JoinedLinear(joined, current.bias))


def empty_part(in_features: int, out_features: int, layout: PartLayout | None) -> nn.Module:
    if layout is None:
        return nn.Linear(in_features, out_features, bias=False)
    return empty_groups(in_features, out_features, layout)


def empty_groups(
    in_features: int, out_features: int, layout: PartLayout, *, bias: bool = False
) -> Int4Linear | GroupedLinear | CodedLinear:
    """An empty layer; two weights of 4 bits share a byte, where PyTorch has a layer for them too.

    Groups are smaller only in a rank's part of a layer, whose border cuts a group.
    """
    has_pairs = not isinstance(layout, CodeLayout) and layout.has_pairs
    layout = replace(layout, size=math.gcd(layout.size, in_features))
    if isinstance(layout, CodeLayout):
        return CodedLinear(in_features, out_features, layout, bias=bias)
    if has_pairs:
        return Int4Linear(in_features, out_features, group_size=layout.size, bias=bias, scale_dtype=torch.float32)
    return GroupedLinear(in_features, out_features, layout, bias=bias)


def quantized_modules(model: nn.Module, settings: QuantizationSettings) -> frozenset[str]:
    """The linear layers and stacks of experts that the settings apply to."""
    modules = [*model.named_modules()]
    linear = {name for name, one in modules if isinstance(one, nn.Linear) and settings.applies_to(name, one)}
    experts = [(name, one) for name, one in modules if isinstance(one, Experts)]
    stacks = {f"{name}.{leaf}": getattr(one, leaf) for name, one in experts for leaf in STACKS}
    return frozenset(linear | {name for name, stack in stacks.items() if settings.fits(name, stack.shape[2])})


def replace_layers(model: nn.Module, settings: QuantizationSettings, make: MakeLayer) -> None:
    """Replace every layer that the settings apply to."""
    for name, module in [*model.named_modules()]:
        other = replacement_for(name, module, settings, make)
        if other is not None:
            model.set_submodule(name, other)


def replacement_for(name: str, module: nn.Module, settings: QuantizationSettings, make: MakeLayer) -> nn.Module | None:
    """The replacement of a module; None: it stays. Experts stay, but their weights are replaced."""
    if isinstance(module, nn.Linear) and settings.applies_to(name, module):
        return make(module, settings)
    if isinstance(module, Experts):
        for leaf in STACKS:
            quantize_experts(module, f"{name}.{leaf}", settings, make)
    return None


def quantize_experts(experts: Experts, name: str, settings: QuantizationSettings, make: MakeLayer) -> None:
    """Replace the stacked weights of all experts."""
    leaf = name.rpartition(".")[2]
    weight_NOI = getattr(experts, leaf)
    if settings.fits(name, weight_NOI.shape[2]):
        delattr(experts, leaf)
        rows: Any = make(as_linear(weight_NOI), settings)
        stack = ExpertStack(rows, num_experts=len(weight_NOI), dtype=weight_NOI.dtype)
        experts.add_module(leaf, stack)


def quantized_layer(linear: nn.Linear, settings: QuantizationSettings) -> QuantizedLinear:
    if settings.kind == "int4":
        return Int4Linear.from_linear(linear, settings.group_size_for(linear.in_features))
    return Int8Linear.from_linear(linear) if settings.kind == "int8" else Fp8Linear.from_linear(linear)


def grouped_layer(linear: nn.Linear, settings: QuantizationSettings, *, int8_group_size: int) -> QuantizedLinear:
    """The same with 8-bit integers in groups."""
    if settings.kind == "int8":
        return Int8Linear.in_groups(linear, int8_group_size)
    return quantized_layer(linear, settings)


def empty_layer(linear: nn.Linear, settings: QuantizationSettings) -> QuantizedLinear:
    """A quantized layer of the same shape, to be filled from files."""
    size_in, size_out, bias = linear.in_features, linear.out_features, linear.bias is not None
    scale_dtype = torch.float32 if settings.wide_scales else torch.bfloat16
    if settings.table:
        size = settings.block_size_for(size_in)
        layout = CodeLayout(settings.table, size, has_wide_scales=settings.wide_scales)
        return CodedLinear(size_in, size_out, layout, bias=bias)
    if settings.kind == "int4":
        group_size = settings.group_size_for(size_in)
        return Int4Linear(size_in, size_out, group_size=group_size, bias=bias, scale_dtype=scale_dtype)
    if settings.kind == "int8":
        return Int8Linear(size_in, size_out, bias=bias, scale_dtype=scale_dtype)
    num_groups = size_in // settings.block_size_for(size_in) if settings.block_size else None
    return Fp8Linear(size_in, size_out, bias=bias, num_groups=num_groups)


class ExpertStack(nn.Module):
    """The quantized weights of all experts; replaces a parameter [N, O, I] and is used like it."""

    def __init__(
        self,
        rows: Int8Linear | Int4Linear | Fp8Linear | GroupedLinear | CodedLinear,
        num_experts: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.layout = rows.layout if isinstance(rows, (GroupedLinear, CodedLinear)) else None
        for name, buffer in rows.named_buffers():
            self.register_buffer(name, buffer.view(num_experts, -1, *buffer.shape[1:]))

    def __len__(self) -> int:
        return len(self.get_buffer("weight"))

    def __getitem__(self, chosen: Any) -> Tensor:
        """The weights [O, I] of an expert, or […, O, I] of several."""
        buffers = {name: buffer[chosen] for name, buffer in self.named_buffers()}
        if isinstance(self.layout, CodeLayout):
            ordered = isinstance(self, CudaCodedStack)
            return dequantize_codes(buffers["weight"], buffers["scales"], self.layout, self.dtype, is_ordered=ordered)
        if self.layout is not None:
            scales, minimums = wide_scales(buffers["scales"], buffers.get("minimums"), buffers.get("factors"))
            return dequantize_levels(buffers["weight"], scales, minimums, self.layout).to(self.dtype)
        dequantize = dequantize_groups if "minimums" in buffers else dequantize_rows
        return dequantize(**buffers, dtype=self.dtype)

    def transpose(self, first: int, second: int) -> Tensor:
        """All weights, transposed."""
        return self[:].transpose(first, second)


class CudaCodedStack(ExpertStack):
    """Codes of all experts in the order of the Triton kernels: the two codes of a byte are half a group apart."""

    def __init__(self, plain: ExpertStack) -> None:
        nn.Module.__init__(self)
        assert isinstance(plain.layout, CodeLayout)
        self.dtype, self.layout = plain.dtype, plain.layout
        self.register_buffer("weight", half_groups_apart(plain.get_buffer("weight"), plain.layout.size))
        self.register_buffer("scales", narrow_scales(plain.get_buffer("scales"), plain.dtype))


def as_linear(weight_NOI: Tensor) -> nn.Linear:
    """The weights of all experts as one linear layer, which can be quantized like any other."""
    with torch.device("meta"):
        linear = nn.Linear(weight_NOI.shape[2], weight_NOI.shape[0] * weight_NOI.shape[1], bias=False)
    linear.weight = nn.Parameter(weight_NOI.detach().flatten(0, 1), requires_grad=False)
    return linear
