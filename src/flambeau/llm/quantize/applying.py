"""Quantization of a network: one that is there, one that is being loaded, or an empty one for quantized files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.fp8 import Fp8Linear
from flambeau.llm.quantize.int4 import GROUP_SIZES, Int4Linear
from flambeau.llm.quantize.int8 import Int8Linear

METHOD = "flambeau"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSettings:
    """How the linear layers of a network are quantized; embeddings, normalisations and experts never are."""

    kind: Quantization
    group_size: int = 64  # int4: weights that share a scale
    lm_head: bool = False  # the last layer too, where it is not tied to the embeddings

    def __post_init__(self) -> None:
        """Refuse what does not exist."""
        if self.kind not in get_args(Quantization):
            raise LLMError(f"quantization must be one of {', '.join(get_args(Quantization))}, not {self.kind!r}")
        if self.group_size not in GROUP_SIZES:
            raise LLMError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, not {self.group_size!r}")

    def to_config(self) -> dict[str, Any]:
        """What config.json says about quantized files."""
        settings = {"quant_method": METHOD, "kind": self.kind, "lm_head": self.lm_head}
        return settings | ({"group_size": self.group_size} if self.kind == "int4" else {})

    def applies_to(self, name: str, module: nn.Module) -> bool:
        """Whether a layer is quantized: the router of experts is small and every bit of it counts."""
        if not isinstance(module, nn.Linear) or name.endswith(".gate") or (name == "lm_head" and not self.lm_head):
            return False
        return self.kind != "int4" or self.group_size_for(module.in_features) is not None

    def group_size_for(self, in_features: int) -> int | None:
        """The group size, or a smaller one that divides the inputs of a layer; None: that layer stays as it is."""
        sizes = (size for size in reversed(GROUP_SIZES) if size <= self.group_size and in_features % size == 0)
        return next(sizes, None)

    def quantized(self, linear: nn.Linear) -> nn.Module:
        """A quantized layer in place of this one."""
        if self.kind == "int4":
            return Int4Linear.from_linear(linear, self.group_size_for(linear.in_features) or self.group_size)
        return Int8Linear.from_linear(linear) if self.kind == "int8" else Fp8Linear.from_linear(linear)

    def empty(self, linear: nn.Linear) -> nn.Module:
        """A quantized layer of the same shape, to be filled."""
        size_in, size_out, bias = linear.in_features, linear.out_features, linear.bias is not None
        if self.kind == "int4":
            group_size = self.group_size_for(size_in) or self.group_size
            return Int4Linear(size_in, size_out, group_size=group_size, bias=bias)
        return (
            Int8Linear(size_in, size_out, bias=bias) if self.kind == "int8" else Fp8Linear(size_in, size_out, bias=bias)
        )


def read_settings(config: Mapping[str, Any]) -> QuantizationSettings | None:
    """What a config.json says about how its files were quantized; None: they were not."""
    said = config.get("quantization_config")
    if not said:
        return None
    try:
        return QuantizationSettings(
            kind=said["kind"], group_size=said.get("group_size", 64), lm_head=bool(said.get("lm_head", False))
        )
    except (KeyError, LLMError) as error:
        raise CheckpointError(f"the quantization_config of config.json is not understood: {error}") from error


def quantize(model: Transformer, kind: Quantization, *, group_size: int = 64, lm_head: bool = False) -> Transformer:
    """The network with quantized layers in place of its linear ones."""
    settings = QuantizationSettings(kind=kind, group_size=group_size, lm_head=lm_head)
    exchange_linears(model, settings, settings.quantized)
    return model


def while_loading(kind: Quantization | None, arch: Architecture) -> Callable[[str, nn.Module], nn.Module | None] | None:
    """For `load_model(arrived=…)`: each layer is quantized as soon as its weights are there, unless it is already."""
    written = read_settings(arch.source)
    if kind is None or (written is not None and written.kind == kind):
        return None
    if written is not None:
        raise LLMError(f"the checkpoint holds {written.kind} weights; for {kind} load the original one")
    settings = QuantizationSettings(kind=kind)

    def arrived(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, nn.Linear) and settings.applies_to(name, module):
            return settings.quantized(module)
        return None

    return arrived


def build(arch: Architecture) -> Transformer:
    """An empty network with the parameters that the files of its config.json hold, quantized or not."""
    model = Transformer(arch)
    settings = read_settings(arch.source)
    if settings is not None:
        exchange_linears(model, settings, settings.empty)
    return model


def exchange_linears(
    model: Transformer, settings: QuantizationSettings, make: Callable[[nn.Linear], nn.Module]
) -> None:
    """Put another layer in the place of each linear one that is quantized."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and settings.applies_to(name, module):
            model.set_submodule(name, make(module))
