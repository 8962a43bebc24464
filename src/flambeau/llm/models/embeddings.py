"""Embeddings of tokens in a narrower type than the network, or in packed rows.

Shapes: … any leading dimensions (tokens, or batch and tokens) · E hidden · V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NarrowEmbedding(nn.Embedding):
    """Embeddings in the type of their file, for a network whose type represents it exactly."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight.detach(), _freeze=True)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[…] to […, E], in the type of the network."""
        return super().forward(ids).to(self.dtype)


ROWS_AT_ONCE = 4096  # of embeddings that are widened


def tied_logits(hidden: Tensor, weight_VE: Tensor) -> Tensor:
    """Hidden states […, E] to […, V] by embeddings, which may be narrower: some of them are widened at a time."""
    if weight_VE.dtype == hidden.dtype:
        return F.linear(hidden, weight_VE)
    return torch.cat([F.linear(hidden, rows.to(hidden.dtype)) for rows in torch.split(weight_VE, ROWS_AT_ONCE)], dim=-1)


class RowEmbedding(nn.Module):
    """Embeddings as a linear layer whose outputs are the tokens: it computes the logits where these are tied."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.dtype = torch.get_default_dtype()
        self.rows: Any = rows  # has read_rows(ids), too

    @property
    def weight(self) -> Tensor:
        """All of them [V, E], dequantized."""
        return self.rows.dequantize(self.dtype)  # type: ignore[no-any-return]

    @property
    def like(self) -> Tensor:
        """Nothing, in the type and on the device of what they give."""
        return torch.empty(0, dtype=self.dtype, device=next(self.rows.buffers()).device)

    def forward(self, ids: Tensor) -> Tensor:
        """[…] to […, E]."""
        return self.rows.read_rows(ids).to(self.dtype)  # type: ignore[no-any-return]


def like_embeddings(embeddings: Any) -> Tensor:
    """A tensor in the type and on the device of the embeddings, whose numbers do not matter."""
    found: Tensor = embeddings.like if isinstance(embeddings, RowEmbedding) else embeddings.weight
    return found
