"""Muon: steps of equal size in every direction of a matrix, for the matrices of the layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that drives singular values towards one


def orthogonalise(matrix: Tensor, *, rounds: int = 5) -> Tensor:
    """About the nearest matrix whose singular values are all one, by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal; weights decay towards zero beside it."""

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                self._move(weight, group)

    def _move(self, weight: Tensor, group: dict[str, float]) -> None:
        trend = self.state[weight].setdefault("trend", torch.zeros_like(weight))
        trend.lerp_(weight.grad, 1 - group["momentum"])
        update = orthogonalise(weight.grad.lerp(trend, group["momentum"]))
        scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
