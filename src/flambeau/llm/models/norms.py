"""The norms of a network, and of its queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture

MeanSquare = Callable[[Tensor], Tensor]  # of the numbers […, C] that this rank has and those of others: […, 1]


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class PlainRMSNorm(nn.Module):
    """An RMSNorm without weights."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.size, self.epsilon = size, epsilon
        self.weight: nn.Parameter
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.size,), eps=self.epsilon).to(x.dtype)


class NoNorm(nn.Identity):
    """In the place of a norm that a layer does not have."""


class SharedRMSNorm(RMSNorm):
    """An RMSNorm over numbers of which this rank has some."""

    def __init__(self, own: RMSNorm, mean_square: MeanSquare) -> None:
        nn.Module.__init__(self)
        self.weight, self.epsilon = own.weight, own.epsilon
        self.mean_square = mean_square

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (normalized(wide, self.epsilon, self.mean_square) * self.weight.float()).to(x.dtype)


def normalized(x: Tensor, epsilon: float, mean_square: MeanSquare | None = None) -> Tensor:
    """Numbers […, C] in float32 divided by the root of their mean square."""
    if mean_square is None:
        return F.rms_norm(x, x.shape[-1:], eps=epsilon)
    return x * torch.rsqrt(mean_square(x) + epsilon)


class OffsetRMSNorm(RMSNorm):
    """An RMSNorm whose weights are stored as their difference from a number."""

    def __init__(self, size: int, epsilon: float, offset: float) -> None:
        super().__init__(size, epsilon)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), weight.shape, weight, self.epsilon).to(x.dtype)


class SelfGatedNorm(RMSNorm):
    """An RMSNorm whose results are gated by themselves, through two small layers (A.X-K2)."""

    def __init__(self, size: int, epsilon: float, rank: int) -> None:
        super().__init__(size, epsilon)
        self.gate_in, self.gate_out = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y * torch.sigmoid(self.gate_out(F.silu(self.gate_in(y))).float())).to(y.dtype)


class StreamNorm(OffsetRMSNorm):
    """A norm of each of several streams […, S, E], with weights of its own."""

    def __init__(self, arch: Architecture, num_streams: int) -> None:
        super().__init__(num_streams * arch.hidden_size, arch.norm_epsilon, arch.norm_offset)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.float() + self.offset).view(x.shape[-2:])
        return (F.rms_norm(x.float(), x.shape[-1:], eps=self.epsilon) * weight).to(x.dtype)


class CenteredNorm(nn.Module):
    """Subtracts the mean and divides by the deviation, in float32."""

    def __init__(self, size: int, epsilon: float, *, weight: bool = True, bias: bool, offset: float = 0.0) -> None:
        super().__init__()
        self.size, self.epsilon, self.offset = size, epsilon, offset
        self.has_weight = weight
        self.weight: nn.Parameter
        self.register_parameter("weight", nn.Parameter(torch.ones(size)) if weight else None)
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.has_weight else None
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), (self.size,), weight, bias, self.epsilon).to(x.dtype)


class HeadNorm(nn.Module):
    """A layer norm per head; each head has its own weights."""

    def __init__(self, num_heads: int, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[…, H, D] to […, H, D]."""
        y = F.layer_norm(x.float(), self.weight.shape[-1:], eps=self.epsilon)
        return (y * self.weight.float()).to(x.dtype)


class PositionScale(nn.Module):
    """Factors of the queries of each head, which grow with the logarithm of the position (Mistral Large 4)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(num_heads)), nn.Parameter(torch.ones(num_heads))

    def forward(self, q: Tensor, log_positions: Tensor) -> Tensor:
        """[…, H, D] to […, H, D], by logarithms […, 1]."""
        scales = log_positions * self.weight.float() + self.bias.float()
        return (q * scales.unsqueeze(-1)).to(q.dtype)


def make_input_norm(arch: Architecture, *, is_gated: bool = True) -> RMSNorm | PlainRMSNorm | CenteredNorm:
    """The norm of what a part of a layer reads."""
    has_gate = is_gated and arch.norm_gate_rank > 0
    return SelfGatedNorm(arch.hidden_size, arch.norm_epsilon, arch.norm_gate_rank) if has_gate else make_norm(arch)


def make_norm(arch: Architecture, size: int | None = None) -> RMSNorm | PlainRMSNorm | CenteredNorm:
    """A norm over the hidden state, or over so many numbers."""
    size = size or arch.hidden_size
    if arch.norm == "layer":
        return CenteredNorm(
            size, arch.norm_epsilon, weight=arch.has_norm_weight, bias=arch.norm_bias, offset=arch.norm_offset
        )
    if not arch.has_norm_weight:
        return PlainRMSNorm(size, arch.norm_epsilon)
    if arch.norm_offset:
        return OffsetRMSNorm(size, arch.norm_epsilon, arch.norm_offset)
    return RMSNorm(size, arch.norm_epsilon)
