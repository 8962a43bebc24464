"""Muon: steps of equal size in every direction of a matrix, for the matrices of the layers.

Shapes: N matrices of one shape · R rows · C columns
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that drives singular values towards one


def orthogonalize(x_NRC: Tensor, *, rounds: int = 5) -> Tensor:
    """About the nearest matrices whose singular values are all one, by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    is_tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC.mT if is_tall else x_NRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(rounds):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal; weights decay towards zero beside it. Matrices of one shape are computed together."""

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Move every matrix."""
        for group in self.param_groups:
            for shape in dict.fromkeys(weight.shape for weight in group["params"]):
                weights = [weight for weight in group["params"] if weight.shape == shape]
                self._move(weights, group["lr"], group["momentum"], group["weight_decay"])

    def _move(self, weights: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        slope_NRC = torch.stack([weight.grad for weight in weights if weight.grad is not None])
        trend_NRC = self.state[weights[0]].setdefault("trend", torch.zeros_like(slope_NRC))
        trend_NRC.lerp_(slope_NRC, 1 - momentum)
        update_NRC = orthogonalize(slope_NRC.lerp(trend_NRC, momentum))
        scale = max(1.0, weights[0].shape[0] / weights[0].shape[1]) ** 0.5
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, list(update_NRC.unbind()), alpha=-lr * scale)
