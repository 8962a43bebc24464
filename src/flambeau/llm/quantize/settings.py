"""QuantizationSettings: which layers of a network are quantized, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.quantize.int4 import GROUP_SIZES

METHOD = "flambeau"
DEQUANTIZED = ("mxfp4",)  # while they are loaded
DECAYS = (".in_proj_ba", ".dt_proj")  # layers that give the decays of recurrent states


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSettings:
    """How linear layers and experts are quantized; embeddings, norms and routers never are."""

    kind: Quantization
    group_size: int = 64  # int4: weights that share a scale
    block_size: int = 0  # fp8: weights of a row that share a scale; 0: all
    lm_head: bool = False  # quantize the last layer too, unless it is tied to the embeddings
    layers: frozenset[str] | None = None  # the only layers that are quantized, by name; None: all that can be
    wide_scales: bool = False  # integers: scales in float32 instead of bfloat16, for files that were made elsewhere

    def __post_init__(self) -> None:
        if self.kind not in get_args(Quantization):
            raise LLMError(f"quantization must be one of {', '.join(get_args(Quantization))}, not {self.kind!r}")
        if self.group_size not in GROUP_SIZES:
            raise LLMError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, not {self.group_size!r}")

    def to_config(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        settings = {"quant_method": METHOD, "kind": self.kind, "lm_head": self.lm_head}
        settings |= {"layers": sorted(self.layers)} if self.layers is not None else {}
        settings |= {"wide_scales": True} if self.wide_scales else {}
        settings |= {"block_size": self.block_size} if self.block_size else {}
        return settings | ({"group_size": self.group_size} if self.kind == "int4" else {})

    def applies_to(self, name: str, linear: nn.Linear) -> bool:
        """Whether a layer is quantized. Routers of experts and what gives decays are small, and need precision."""
        is_excluded = name.endswith((".gate", ".shared_expert_gate")) or (name == "lm_head" and not self.lm_head)
        is_small = self.layers is None and name.endswith(DECAYS)
        return not is_excluded and not is_small and self.fits(name, linear.in_features)

    def fits(self, name: str, in_features: int) -> bool:
        """Whether the weights of this name and with this many inputs can be quantized."""
        if self.layers is not None and name not in self.layers:
            return False
        return self.kind != "int4" or any(in_features % size == 0 for size in GROUP_SIZES if size <= self.group_size)

    def group_size_for(self, in_features: int) -> int:
        """The group size, or the next smaller one that divides the inputs of a layer."""
        return max(size for size in GROUP_SIZES if size <= self.group_size and in_features % size == 0)


def read_quantization(config: Mapping[str, Any]) -> QuantizationSettings | None:
    """The quantization that a config.json declares; None: none."""
    declared = config.get("quantization_config")
    if not declared or declared.get("quant_method") in DEQUANTIZED:
        return None
    try:
        return QuantizationSettings(
            kind=declared["kind"],
            group_size=declared.get("group_size", 64),
            block_size=declared.get("block_size", 0),
            lm_head=bool(declared.get("lm_head", False)),
            layers=frozenset(declared["layers"]) if "layers" in declared else None,
            wide_scales=bool(declared.get("wide_scales", False)),
        )
    except (KeyError, LLMError) as error:
        raise CheckpointError(f"the quantization_config of config.json is not understood: {error}") from error
