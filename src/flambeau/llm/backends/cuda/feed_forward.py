"""The feed-forward part of a layer with its norm, by the kernels: dense, or a router with experts.

Shapes: T rows · E hidden · S parts of a sum · A experts of a row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.experts import ExpertWeights, KernelExperts
from flambeau.llm.backends.cuda.linear import MAX_ROWS, KernelLinear
from flambeau.llm.backends.cuda.norm import normalize
from flambeau.llm.backends.cuda.router import can_route, route
from flambeau.llm.models.moe import Experts, SparseMLP
from flambeau.llm.quantize.quantizer import ExpertStack

Sums = tuple[Tensor, Tensor]  # the residual stream [T, E], and what is to be added: [T, E], or parts [S, T, E]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormParameters:
    """The norm before a part of a layer, and what sums are multiplied with before they are added."""

    gain: Tensor
    epsilon: float
    residual_scale: float = 1.0

    def __call__(self, x_TE: Tensor, sums: Tensor | None) -> Tensor:
        """[T, E] normalized, after the sums were added to x in place."""
        return normalize(x_TE, self.gain, self.epsilon, sums, self.residual_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A norm and a gated feed-forward layer."""

    norm: NormParameters
    gate_up: KernelLinear
    down: KernelLinear

    def __call__(self, x_TE: Tensor, sums: Tensor, counters_T: Tensor) -> Sums:
        return x_TE, self.down(self.gate_up(self.norm(x_TE, sums)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayer:
    """A norm, a router and its experts; there may be one more for all rows, with a gate or without."""

    norm: NormParameters
    mlp: SparseMLP
    experts: KernelExperts
    shared: tuple[KernelLinear, KernelLinear] | None  # gate_up and down

    def __call__(self, x_TE: Tensor, sums: Tensor | None, counters_T: Tensor) -> Sums:
        """`counters_T` are zeros, which are used up."""
        if len(x_TE) <= MAX_ROWS and can_route(self.mlp):
            norm = self.norm
            x_TE, y_TE, chosen_TA, weights_TA = route(
                x_TE, sums, norm.gain, norm.epsilon, self.mlp, counters_T, norm.residual_scale
            )
        else:
            y_TE = self.norm(x_TE, sums)
            weights_TA, chosen_TA = self.mlp.choose(y_TE)
            weights_TA, chosen_TA = weights_TA.float().contiguous(), chosen_TA.int()
        y = self.experts(y_TE, chosen_TA, weights_TA)
        if self.shared is None:
            return x_TE, y
        return x_TE, torch.cat((y.view(-1, *x_TE.shape), self._compute_shared(self.shared, y_TE)))

    def _compute_shared(self, shared: tuple[KernelLinear, KernelLinear], y_TE: Tensor) -> Tensor:
        """Parts [S, T, E] of the outputs of the expert for all rows."""
        gate_up, down = shared
        parts = down(gate_up(y_TE)).view(-1, *y_TE.shape)
        gate = self.mlp.shared_expert_gate
        return parts if gate is None else parts * torch.sigmoid(F.linear(y_TE, gate.weight))


def kernel_experts(experts: Experts) -> KernelExperts:
    matrices: list[Any] = [experts.gate_up_proj, experts.down_proj]
    gate_up, down = (
        expert_weights(matrix) if isinstance(matrix, ExpertStack) else ExpertWeights(weight=matrix)
        for matrix in matrices
    )
    return KernelExperts(gate_up=gate_up, down=down)


def expert_weights(stack: ExpertStack) -> ExpertWeights:
    tensors = dict(stack.named_buffers())
    weight = tensors["weight"]
    if "minimums" not in tensors:
        return ExpertWeights(weight=weight, scale=tensors["scale"])
    scales, minimums = tensors["scales"], tensors["minimums"]
    group_size = 2 * weight.shape[-1] // scales.shape[-1]
    return ExpertWeights(weight=weight, scale=scales, minimums=minimums, group_size=group_size)


def can_compute_experts(experts: Experts) -> bool:
    """Whether the kernels support the weights: all but those of 8 bits with scales of groups."""
    matrices: list[Any] = [experts.gate_up_proj, experts.down_proj]
    buffers = [dict(each.named_buffers()) for each in matrices if isinstance(each, ExpertStack)]
    return all("minimums" in each or each["scale"].dim() == 2 for each in buffers)
