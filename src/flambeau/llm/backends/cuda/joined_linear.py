"""Linear layers whose projections are stored in several forms: one product for each form.

Shapes: T rows · N outputs · K inputs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.backends.cuda import group_scaled, linear
from flambeau.llm.backends.cuda.group_scaled import GroupScaledLinear
from flambeau.llm.backends.cuda.linear import KernelLinear, activate


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedKernelLinear(KernelLinear):
    """A linear layer in parts, whose outputs follow each other; `weight` is that of the first part."""

    parts: tuple[KernelLinear, ...]  # without gates, activation and bias

    @property
    def width(self) -> int:
        """The number of outputs without gates."""
        return sum(part.width for part in self.parts) // (2 if self.gates else 1)

    @property
    def size(self) -> int:
        """The number of inputs."""
        return self.parts[0].size

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]; a gated layer has half as many outputs."""
        y = one_row(x, self) if len(x) == 1 else torch.cat([whole(part(x), x) for part in self.parts], dim=-1)
        y = y if self.bias is None else y + self.bias
        return y if self.activation is None else activate(y, self)


def one_row(x: Tensor, joined: JoinedKernelLinear) -> Tensor:
    """[1, K] to [1, N] without a bias; the parts of a row follow each other in memory."""
    sizes = [part.width for part in joined.parts]
    y = torch.empty((1, sum(sizes)), dtype=x.dtype, device=x.device)
    for part, out in zip(joined.parts, torch.split(y, sizes, dim=1), strict=True):
        if isinstance(part, GroupScaledLinear):
            group_scaled.one_row(x, part, out)
        else:
            linear.one_row(x, part, out)
    return y


def whole(y: Tensor, x: Tensor) -> Tensor:
    """[T, N], or parts [S, T, N] of it, as [T, N] in the type of the inputs."""
    return y.sum(0).to(x.dtype) if y.dim() == 3 else y
