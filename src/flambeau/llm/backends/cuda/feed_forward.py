"""The feed-forward part of a layer with its norm, by the kernels: dense, or a router with experts.

Shapes: T rows · E hidden · S parts of a sum · A experts of a row
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.experts import ExpertWeights, KernelExperts
from flambeau.llm.backends.cuda.group_scaled_experts import GroupScaledExperts, group_scaled_experts, is_group_scaled
from flambeau.llm.backends.cuda.linear import MAX_ROWS, KernelLinear, one_row
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.backends.cuda.router import can_route, route
from flambeau.llm.backends.cuda.scaled_gates import gate_scaled
from flambeau.llm.models.architecture import Activation
from flambeau.llm.models.moe import Experts, SparseMLP
from flambeau.llm.quantize.quantizer import ExpertStack

Sums = tuple[Tensor, Tensor]  # the residual stream [T, E], and what is to be added: [T, E], or parts [S, T, E]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A norm and a feed-forward layer, with gates or without."""

    norm: NormParameters
    gate_up: KernelLinear
    down: KernelLinear

    def __call__(self, x_TE: Tensor, sums: Tensor, counters_T: Tensor) -> Sums:
        return x_TE, self.compute(self.norm(x_TE, sums))

    def compute(self, y_TE: Tensor) -> Tensor:
        """What normalized rows add to the residual stream."""
        return self.down(self.gate_up(y_TE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledDenseLayer(DenseLayer):
    """A feed-forward layer with a factor of the gates and one of the outputs."""

    activation: Activation
    scales: tuple[float, float]

    def compute(self, y_TE: Tensor) -> Tensor:
        """What normalized rows add to the residual stream."""
        # A factor of the inputs of `down` spares one of its outputs, unless it has a bias.
        gate_scale, scale = self.scales
        before, after = (scale, 1.0) if self.down.bias is None else (1.0, scale)
        sums = self.down(gate_scaled(self.gate_up(y_TE), self.activation, gate_scale, before, y_TE.dtype))
        return sums if after == 1.0 else sums * after


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayer:
    """A norm, a router and its experts; there may be one more for all rows, with a gate or without."""

    norm: NormParameters
    mlp: SparseMLP
    experts: KernelExperts | GroupScaledExperts
    shared: tuple[KernelLinear, KernelLinear] | None  # gate_up and down

    def __call__(self, x_TE: Tensor, sums: Tensor | None, counters_T: Tensor) -> Sums:
        """`counters_T` are zeros, which are used up."""
        norm = self.norm
        if len(x_TE) > MAX_ROWS or not norm.is_plain or not can_route(self.mlp):
            return x_TE, self.compute(norm(x_TE, sums))
        assert norm.gain is not None
        x_TE, y_TE, chosen_TA, weights_TA = route(
            x_TE, sums, norm.gain, norm.epsilon, self.mlp, counters_T, norm.residual_scale
        )
        return x_TE, self._compute_routed(y_TE, chosen_TA, weights_TA)

    def compute(self, y_TE: Tensor) -> Tensor:
        """What normalized rows add to the residual stream; PyTorch chooses their experts."""
        weights_TA, chosen_TA = self.mlp.choose(y_TE)
        return self._compute_routed(y_TE, chosen_TA.int(), weights_TA.float().contiguous())

    def _compute_routed(self, y_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        if self.shared is None:
            return self.experts(y_TE, chosen_TA, weights_TA)
        gate_up, down = self.shared
        if len(y_TE) == 1 and self.mlp.shared_expert_gate is None and type(down) is KernelLinear:
            parts = y_TE.new_empty(2, *y_TE.shape)
            self.experts(y_TE, chosen_TA, weights_TA, parts[0])
            one_row(gate_up(y_TE), down, parts[1])
            return parts
        y = self.experts(y_TE, chosen_TA, weights_TA)
        return joined(y, self._compute_shared(self.shared, y_TE), y_TE)

    def _compute_shared(self, shared: tuple[KernelLinear, KernelLinear], y_TE: Tensor) -> Tensor:
        """Parts [S, T, E] of the outputs of the expert for all rows."""
        gate_up, down = shared
        parts = down(gate_up(y_TE)).view(-1, *y_TE.shape)
        gate = self.mlp.shared_expert_gate
        return parts if gate is None else parts * torch.sigmoid(F.linear(y_TE, gate.weight))


def joined(first: Tensor, second: Tensor, like_TE: Tensor) -> Tensor:
    """Two outputs [T, E], or parts [S, T, E] of them, as parts of their sum."""
    return torch.cat((first.view(-1, *like_TE.shape), second.view(-1, *like_TE.shape)))


def kernel_experts(experts: Experts) -> KernelExperts | GroupScaledExperts:
    matrices: list[Any] = [experts.gate_up_proj, experts.down_proj]
    if is_group_scaled(matrices[0]):
        return group_scaled_experts(experts)
    gate_up, down = (
        replace(expert_weights(matrix) if isinstance(matrix, ExpertStack) else ExpertWeights(weight=matrix), bias=bias)
        for matrix, bias in zip(matrices, experts.biases(slice(None)), strict=True)
    )
    limits = {} if experts.limit is None else {"limit": experts.limit.size, "alpha": experts.limit.alpha}
    return KernelExperts(gate_up=gate_up, down=down, scales_inputs=experts.scales_inputs, **limits)


def expert_weights(stack: ExpertStack) -> ExpertWeights:
    tensors = dict(stack.named_buffers())
    weight = tensors["weight"]
    if "minimums" not in tensors:
        return ExpertWeights(weight=weight, scale=tensors["scale"])
    scales, minimums = tensors["scales"], tensors["minimums"]
    group_size = 2 * weight.shape[-1] // scales.shape[-1]
    return ExpertWeights(weight=weight, scale=scales, minimums=minimums, group_size=group_size)


def can_compute_experts(experts: Experts) -> bool:
    """Whether the kernels support the weights: with scales of groups in both matrices, or in neither."""
    return is_group_scaled(experts.gate_up_proj) == is_group_scaled(experts.down_proj)
