"""PackedStack: the linear layers of all experts in the order in which the C++ kernels read them.

Shapes: N experts · O outputs · I inputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cpu.bindings import KINDS, CMatrix
from flambeau.llm.backends.cpu.packed_linear import (
    FLOATS,
    PANEL,
    PackedLinear,
    has_whole_vectors,
    multiply,
    pack_codes,
    pack_floats,
    pack_fp8,
    pack_int4_layer,
    pack_int8,
    pack_levels,
)
from flambeau.llm.mapped_files import trim_heap
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.moe import ExpertLayers, Experts
from flambeau.llm.quantize.coded import CodeLayout
from flambeau.llm.quantize.groups import GroupLayout
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import FP8

LEAVES = ("gate_up_proj", "down_proj")


class PackedStack(ExpertLayers):
    """The outputs of all experts as one packed layer; those of each expert begin with a panel."""

    def __init__(self, rows: PackedLinear, num_experts: int) -> None:
        super().__init__()
        self.rows, self.num_experts = rows, num_experts

    def __len__(self) -> int:
        return self.num_experts

    def matrix(self, expert: int) -> CMatrix:
        """The structure of one expert for the kernels."""
        count = self.rows.out_features // self.num_experts
        return self.rows.part(expert * count, count)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        return multiply(self.matrix(expert), x)

    def multiply_chosen(self, x_TAI: Tensor, chosen_TA: Tensor) -> Tensor:
        rows = self.rows
        kind, width = KINDS.index(rows.kind), rows.out_features // self.num_experts
        y_TAO: Tensor = torch.ops.flambeau.packed_experts(
            x_TAI, chosen_TA, rows.panels, self.num_experts, kind, width, rows.group_size
        )
        return y_TAO


def pack_experts(model: nn.Module, *, packs_float32: bool) -> None:
    """Replace the weights of experts, one layer after the other; a network can be used meanwhile."""
    for module in model.modules():
        if isinstance(module, Experts):
            pack_experts_of(module, packs_float32=packs_float32)
            trim_heap()  # as in pack_layers


def pack_experts_of(experts: Experts, *, packs_float32: bool, dtype: torch.dtype | None = None) -> None:
    """Replace the weights of one layer, if the kernels know them; `dtype` as for `pack_floats`."""
    if not can_pack(experts):
        return
    for leaf in LEAVES:
        if (stack := packed_stack(getattr(experts, leaf), packs_float32=packs_float32, dtype=dtype)) is not None:
            experts._modules[leaf] = stack  # before the parameter goes: a step may run at the same time
            experts._parameters.pop(leaf, None)


@torch.inference_mode()
def packed_stack(weights: Any, *, packs_float32: bool, dtype: torch.dtype | None = None) -> PackedStack | None:
    """The weights of all experts for the kernels; None: they would need 32 bits each."""
    if isinstance(weights, PackedStack):
        return weights
    if isinstance(weights, ExpertStack):
        return PackedStack(pack_quantized_stack(weights), len(weights))
    rows = pack_floats(weights.flatten(0, 1), packs_float32=packs_float32, dtype=dtype)
    return None if rows is None else PackedStack(rows, len(weights))


def pack_quantized_stack(stack: ExpertStack) -> PackedLinear:
    buffers = {name: buffer.flatten(0, 1) for name, buffer in stack.named_buffers()}
    if buffers["weight"].dtype == FP8:
        return pack_fp8(buffers["weight"], buffers["scale"])
    if isinstance(stack.layout, CodeLayout):
        return pack_codes(buffers["weight"], buffers["scales"], stack.layout)
    if stack.layout is not None:
        levels, scales, layout = buffers["weight"], buffers["scales"], stack.layout
        return pack_levels(lambda rows: levels[rows], scales, buffers.get("minimums"), layout.bits, layout.size)
    if "minimums" not in buffers:
        return pack_int8(buffers["weight"], buffers["scale"])
    return pack_int4_layer(int4_layer(**buffers))


def int4_layer(weight: Tensor, scales: Tensor, minimums: Tensor) -> Int4Linear:
    out_features, in_features = len(weight), 2 * weight.shape[1]
    with torch.device("meta"):
        layer = Int4Linear(in_features, out_features, group_size=in_features // scales.shape[1])
    layer.weight, layer.scales, layer.minimums = weight, scales, minimums
    return layer


def has_whole_panels(arch: Architecture) -> bool:
    """Whether the outputs of each expert fill panels."""
    rows = 2 * arch.expert_size if arch.has_gate else arch.expert_size
    return rows % PANEL == 0 and (arch.expert_latent_size or arch.hidden_size) % PANEL == 0


def can_pack(experts: Experts) -> bool:
    """Whether the kernels know the weights: floats, fp8 or integers, in whole panels."""
    return all(is_known(getattr(experts, leaf)) for leaf in LEAVES)


def is_known(weights: Any) -> bool:
    if isinstance(weights, PackedStack):
        return True
    if not isinstance(weights, ExpertStack):
        return weights.dtype in FLOATS and weights.shape[1] % PANEL == 0
    buffers = dict(weights.named_buffers())
    if isinstance(weights.layout, GroupLayout) and not has_whole_vectors(weights.layout.size):
        return False
    if weights.layout is None and "minimums" in buffers:
        group_size = 2 * buffers["weight"].shape[2] // buffers["scales"].shape[2]
        if not has_whole_vectors(group_size):
            return False
    return buffers["weight"].dtype in (torch.int8, torch.uint8, FP8) and buffers["weight"].shape[1] % PANEL == 0
