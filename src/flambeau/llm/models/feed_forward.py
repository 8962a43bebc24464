"""Feed-forward layers: with gates or without, with norms, limits or factors inside, or beside experts.

Shapes: … any leading dimensions (tokens, or batch and tokens) · E hidden · F intermediate
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.activations import ACTIVATIONS, gated
from flambeau.llm.models.altup import above_threshold, threshold_of
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.gate_limits import GateLimit
from flambeau.llm.models.moe import HashedMLP, SparseMLP
from flambeau.llm.models.norms import make_norm


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(arch.hidden_size, 2 * arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activate(gate) * up)  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """A feed-forward layer without a gate."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return self.down_proj(self.activate(self.up_proj(x)))  # type: ignore[no-any-return]


class XieluMLP(PlainMLP):
    """A feed-forward layer without a gate, whose activation has parameters (Apertus)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.alpha_p, self.alpha_n = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.beta, self.eps = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        y, (positive, negative) = self.up_proj(x), self.factors()
        below = (torch.expm1(torch.minimum(y, self.eps)) - y) * negative
        return self.down_proj(torch.where(y > 0, positive * y * y, below) + self.beta * y)  # type: ignore[no-any-return]

    def factors(self) -> tuple[Tensor, Tensor]:
        """Of numbers above 0 and of those below it."""
        return F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)


class InnerNormMLP(MLP):
    """A gated feed-forward layer with a norm before its last layer (BitNet)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.inner_norm = make_norm(arch, arch.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.inner_norm(self.activate(gate) * up))  # type: ignore[no-any-return]


class CutMLP(MLP):
    """A gated feed-forward layer of whose gates only the largest count (Gemma 3n)."""

    def __init__(self, arch: Architecture, sparsity: float) -> None:
        super().__init__(arch)
        self.threshold = threshold_of(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activate(above_threshold(gate, self.threshold)) * up)  # type: ignore[no-any-return]


class MixedMLP(MLP):
    """A feed-forward layer beside experts, each with norms of its own (Gemma 4)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.sparse = SparseMLP(arch)
        self.dense_norm, self.sparse_norm = make_norm(arch), make_norm(arch)
        self.expert_norm, self.router_norm = make_norm(arch), make_norm(arch)
        self.router_scale = arch.hidden_size**-0.5

    def forward(self, x: Tensor, raw: Tensor | None = None) -> Tensor:
        """[…, E] to […, E]; experts and their router read what the layer has not normalized."""
        assert raw is not None
        sparse = self.sparse(self.expert_norm(raw), self.router_norm(raw) * self.router_scale)
        return self.dense_norm(super().forward(x)) + self.sparse_norm(sparse)  # type: ignore[no-any-return]


class LimitedMLP(MLP):
    """A gated feed-forward layer whose gates, and what they gate, are within a limit."""

    def __init__(self, arch: Architecture, limit: GateLimit) -> None:
        super().__init__(arch)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return self.down_proj(gated(self.gate_up_proj(x), self.activate, self.limit))  # type: ignore[no-any-return]


class ScaledMLP(MLP):
    """A gated feed-forward layer with a factor of the gate and one of the output."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.scales = arch.mlp_scales

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activate(gate * self.scales[0]) * up) * self.scales[1]  # type: ignore[no-any-return]


def make_mlp(arch: Architecture, layer: int) -> nn.Module:
    arch = arch.of_layer(layer)
    if arch.experts_beside_mlp:
        return MixedMLP(arch)
    if layer in arch.hashed_layers:
        return HashedMLP(arch, layer)
    if arch.has_experts(layer):
        return SparseMLP(arch, layer)
    if (limit := arch.mlp_limit(layer)) is not None:
        return LimitedMLP(arch, limit)
    if arch.mlp_scales != (1.0, 1.0):
        return ScaledMLP(arch)
    if arch.sparsity and arch.sparsity[layer]:
        return CutMLP(arch, arch.sparsity[layer])
    if arch.activation == "xielu":
        return XieluMLP(arch)
    if arch.inner_norms:
        return InnerNormMLP(arch)
    return MLP(arch) if arch.has_gate else PlainMLP(arch)
