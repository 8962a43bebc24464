"""Quantization of a network: one that is there, one that is being loaded, or an empty one for quantized files."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flambeau.llm.config import Quantization
from flambeau.llm.errors import LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.fp8 import Fp8Linear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.int8 import Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings, read_settings
from flambeau.llm.quantize.stacks import Stack, as_rows

QuantizedLinear = Int8Linear | Int4Linear | Fp8Linear
Make = Callable[[nn.Linear, QuantizationSettings], QuantizedLinear]


def quantize(model: Transformer, kind: Quantization, *, group_size: int = 64, lm_head: bool = False) -> Transformer:
    """The network with quantized layers in place of its linear ones."""
    exchange_all(model, QuantizationSettings(kind=kind, group_size=group_size, lm_head=lm_head), smaller)
    return model


def while_loading(kind: Quantization | None, arch: Architecture) -> Callable[[str, nn.Module], nn.Module | None] | None:
    """For `load_model(arrived=…)`: each layer is quantized as soon as its weights are there, unless it is already."""
    written = read_settings(arch.source)
    if kind is None or (written is not None and written.kind == kind):
        return None
    if written is not None:
        raise LLMError(f"the checkpoint holds {written.kind} weights; for {kind} load the original one")
    settings = QuantizationSettings(kind=kind)
    return lambda name, module: exchanged(name, module, settings, smaller)


def build(arch: Architecture) -> Transformer:
    """An empty network with the parameters that the files of its config.json hold, quantized or not."""
    model = Transformer(arch)
    settings = read_settings(arch.source)
    if settings is not None:
        exchange_all(model, settings, empty)
    return model


def exchange_all(model: Transformer, settings: QuantizationSettings, make: Make) -> None:
    """Put quantized layers in the place of all that are to be."""
    for name, module in [*model.named_modules()]:
        other = exchanged(name, module, settings, make)
        if other is not None:
            model.set_submodule(name, other)


def exchanged(name: str, module: nn.Module, settings: QuantizationSettings, make: Make) -> nn.Module | None:
    """What takes the place of a module; None: it stays. Experts stay, with other weights."""
    if isinstance(module, nn.Linear) and settings.applies_to(name, module):
        return make(module, settings)
    if isinstance(module, Experts):
        for leaf in ("gate_up_proj", "down_proj"):
            exchange_stack(module, leaf, settings, make)
    return None


def exchange_stack(experts: Experts, leaf: str, settings: QuantizationSettings, make: Make) -> None:
    """Put quantized weights in the place of those of all experts."""
    weight_NOI = getattr(experts, leaf)
    if settings.fits(weight_NOI.shape[2]):
        delattr(experts, leaf)
        stack = Stack(make(as_rows(weight_NOI), settings), num_experts=len(weight_NOI), dtype=weight_NOI.dtype)
        experts.add_module(leaf, stack)


def smaller(linear: nn.Linear, settings: QuantizationSettings) -> QuantizedLinear:
    """A linear layer with quantized weights."""
    if settings.kind == "int4":
        return Int4Linear.from_linear(linear, settings.group_size_for(linear.in_features))
    return Int8Linear.from_linear(linear) if settings.kind == "int8" else Fp8Linear.from_linear(linear)


def empty(linear: nn.Linear, settings: QuantizationSettings) -> QuantizedLinear:
    """A quantized layer of the same shape, to be filled."""
    size_in, size_out, bias = linear.in_features, linear.out_features, linear.bias is not None
    if settings.kind == "int4":
        return Int4Linear(size_in, size_out, group_size=settings.group_size_for(size_in), bias=bias)
    return (Int8Linear if settings.kind == "int8" else Fp8Linear)(size_in, size_out, bias=bias)
