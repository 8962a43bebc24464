"""Tokens of several sequences ↔ one tensor.

Shapes: B sequences · T tokens of the longest, the others filled up with PAD at their end
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flambeau.errors import HandlerError

PAD = -1  # no token


def to_tensor(rows: Sequence[Sequence[int]], device: torch.device | None) -> Tensor:
    """A tensor [B, T] of these sequences."""
    length = max(map(len, rows))
    padded = [[*row, *[PAD] * (length - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device)


def rows_of(ids: Tensor) -> list[list[int]]:
    """The tokens of each row of [T] or [B, T], without what fills them up."""
    if ids.dim() not in (1, 2):
        raise HandlerError(f"tokens are a tensor [T] or [B, T], not one with {ids.dim()} dimensions")
    rows: list[list[int]] = (ids if ids.dim() == 2 else ids[None]).tolist()
    return [[token for token in row if token != PAD] for row in rows]
