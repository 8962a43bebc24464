"""QuantizationSettings: which layers of a network are quantized, and how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn

from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.quantize.coded import CodeLayout
from flambeau.llm.quantize.groups import GroupLayout
from flambeau.llm.quantize.int4 import GROUP_SIZES

PartLayout = GroupLayout | CodeLayout
Parts = tuple[PartLayout | None, ...]  # the layout of a module, or of each of its projections; None: not quantized
METHOD = "flambeau"
CODES = "codes of 4 bits"
TABLE_SIZE = 16
DEQUANTIZED = ("mxfp4",)  # while they are loaded
DECAYS = (
    ".in_proj_ba",
    ".dt_proj",
    ".f_a_proj",
    ".f_b_proj",
    ".f_proj",
)  # layers that give the decays of recurrent states

TIME_STEPS = (".x_proj",)  # what the layers of decays read; states are written and read with the rest of it
NORM_GATES = ("norm.gate_in", "norm.gate_out")
COMPRESSORS = ("compressor.kv_proj", "compressor.score_proj")  # of what stands for several tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSettings:
    """How linear layers and experts are quantized; norms and routers never are, embeddings in some files."""

    kind: Quantization
    group_size: int = 64  # int4: weights that share a scale
    block_size: int = 0  # fp8 and codes: weights of a row that share a scale; 0: all
    table: tuple[float, ...] = ()  # codes of 4 bits: the numbers that they stand for; empty: weights are no codes
    lm_head: bool = False  # quantize the last layer too, unless it is tied to the embeddings
    time_steps: bool = False  # quantize what gives Mamba's time steps, too: files of other tools may have it so
    layers: frozenset[str] | None = None  # the only layers that are quantized, by name; None: all that can be
    wide_scales: bool = False  # integers: scales in float32 instead of bfloat16, for files that were made elsewhere
    groups: Mapping[str, Parts] = field(default_factory=dict)  # modules in layouts of their own; then only these

    def __post_init__(self) -> None:
        if self.kind not in get_args(Quantization):
            raise LLMError(f"quantization must be one of {', '.join(get_args(Quantization))}, not {self.kind!r}")
        if self.table and (len(self.table) != TABLE_SIZE or not self.block_size):
            raise LLMError(f"codes of 4 bits need a table of {TABLE_SIZE} numbers and a block_size")
        if self.group_size not in GROUP_SIZES:
            raise LLMError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, not {self.group_size!r}")

    @property
    def title(self) -> str:
        """The kinds of weights, in words."""
        if not self.groups:
            return CODES if self.table else self.kind
        return ", ".join(sorted({f"int{part.bits}" for parts in self.groups.values() for part in parts if part}))

    def to_config(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        settings = {"quant_method": METHOD, "kind": self.kind, "lm_head": self.lm_head}
        settings |= {"layers": sorted(self.layers)} if self.layers is not None else {}
        settings |= {"wide_scales": True} if self.wide_scales else {}
        settings |= {"block_size": self.block_size} if self.block_size else {}
        settings |= {"table": [*self.table]} if self.table else {}
        if self.groups:
            settings["groups"] = {name: [*map(to_list, parts)] for name, parts in self.groups.items()}
        return settings | ({"group_size": self.group_size} if self.kind == "int4" else {})

    def applies_to(self, name: str, linear: nn.Linear) -> bool:
        """Whether a layer is quantized. Routers, what gives decays and gates of norms are small, and need precision."""
        is_excluded = name.endswith((".gate", ".shared_expert_gate")) or (name == "lm_head" and not self.lm_head)
        small = (*DECAYS, *COMPRESSORS, *NORM_GATES, *(() if self.time_steps else TIME_STEPS))
        is_small = self.layers is None and name.endswith(small)
        return not is_excluded and not is_small and self.fits(name, linear.in_features)

    def fits(self, name: str, in_features: int) -> bool:
        """Whether the weights of this name and with this many inputs can be quantized."""
        if self.layers is not None:
            return name in self.layers  # a rank's part of the inputs may cut a group
        if self.table:
            return in_features % self.block_size == 0
        return self.kind != "int4" or any(in_features % size == 0 for size in GROUP_SIZES if size <= self.group_size)

    def group_size_for(self, in_features: int) -> int:
        """The group size, or the next smaller one that divides the inputs of a layer."""
        return math.gcd(self.group_size, in_features)

    def block_size_for(self, in_features: int) -> int:
        """The same for blocks: smaller only in a rank's part of a layer, whose border cuts a block."""
        return math.gcd(self.block_size, in_features)


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
            table=tuple(map(float, declared.get("table", ()))),
            lm_head=bool(declared.get("lm_head", False)),
            layers=frozenset(declared["layers"]) if "layers" in declared else None,
            wide_scales=bool(declared.get("wide_scales", False)),
            groups={name: tuple(map(from_list, parts)) for name, parts in declared.get("groups", {}).items()},
        )
    except (KeyError, TypeError, LLMError) as error:
        raise CheckpointError(f"the quantization_config of config.json is not understood: {error}") from error


def to_list(layout: PartLayout | None) -> list[Any] | None:
    """Codes begin with their table, integers with their bits."""
    if isinstance(layout, CodeLayout):
        return [[*layout.table], layout.size, layout.has_wide_scales]
    return None if layout is None else [layout.bits, layout.size, layout.has_minimums, layout.scale_bits]


def from_list(values: list[Any] | None) -> PartLayout | None:
    if values is None:
        return None
    return CodeLayout(tuple(values[0]), *values[1:]) if isinstance(values[0], list) else GroupLayout(*values)
