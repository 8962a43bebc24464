"""Hyper-connections: layers read and change several streams of hidden states, by weights that depend on these.

A layer reads a weighted sum of the streams. What it gives is added to each stream with a factor. Before that, streams
may be mixed by a matrix whose rows and columns sum to one (DeepSeek V4: manifold-constrained hyper-connections).

All weights are found in float32. Shapes: … any leading dimensions · S streams · E hidden
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.norms import StreamNorm


class Joint(NamedTuple):
    """How what a layer gives is joined to the streams."""

    factors: Tensor  # […, S], of what the layer gives
    mixing: Tensor | None  # […, S, S], from streams to streams; None: they stay as they are


class StreamWeights(nn.Module):
    """Numbers that depend on the streams: a product with all of them, normalized."""

    def __init__(self, arch: Architecture, num_weights: int, num_scales: int) -> None:
        super().__init__()
        assert arch.hyper is not None
        self.shape, self.epsilon = arch.hyper, arch.norm_epsilon
        width = arch.hyper.num_streams * arch.hidden_size
        self.fn = nn.Parameter(torch.empty(num_weights, width, dtype=torch.float32))
        nn.init.normal_(self.fn, std=width**-0.5)
        self.base = nn.Parameter(torch.zeros(num_weights, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(num_scales, dtype=torch.float32))

    def products(self, x: Tensor) -> Tensor:
        """[…, S, E] to […, W], in float32."""
        flat = x.flatten(-2).float()
        return F.linear(F.rms_norm(flat, flat.shape[-1:], eps=self.epsilon), self.fn)


class HyperConnection(StreamWeights):
    """What a part of a layer reads, and how the streams get what it gives."""

    def __init__(self, arch: Architecture) -> None:
        assert arch.hyper is not None
        count, is_mixed = arch.hyper.num_streams, arch.hyper.num_rounds > 0
        super().__init__(arch, count * (2 + count) if is_mixed else 2 * count, 3 if is_mixed else 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Joint]:
        """The sum […, E] of the streams […, S, E], and how the result is joined to them."""
        shape, count = self.shape, self.shape.num_streams
        read, given, *mixed = torch.split(
            self.products(x), [count, count, *([count * count] if shape.num_rounds else [])], dim=-1
        )
        weights = torch.sigmoid(read * self.scale[0] + self.base[:count]) + shape.epsilon
        factors = torch.sigmoid(given * self.scale[1] + self.base[count : 2 * count]) * shape.largest + shape.offset
        one = (weights.unsqueeze(-1) * x).sum(dim=-2).to(x.dtype)
        if not mixed:
            return one, Joint(factors, None)
        scores = mixed[0] * self.scale[2] + self.base[2 * count :]
        matrix = balanced(torch.unflatten(scores, -1, (count, count)), shape.num_rounds, shape.epsilon)
        return one, Joint(factors, matrix)

    def join(self, x: Tensor, y: Tensor, joint: Joint) -> Tensor:
        """The streams […, S, E] with what the layer gives […, E]."""
        if joint.mixing is None:
            wide = joint.factors.unsqueeze(-1) * y.unsqueeze(-2).float() + x.float()
            return wide.to(x.dtype)
        kept = joint.mixing.to(x.dtype).transpose(-1, -2) @ x
        return joint.factors.to(x.dtype).unsqueeze(-1) * y.unsqueeze(-2) + kept


def balanced(scores: Tensor, num_rounds: int, epsilon: float) -> Tensor:
    """Positive numbers […, S, S] whose rows and columns sum to about one (Sinkhorn and Knopp)."""
    matrix = scores.softmax(dim=-1) + epsilon
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + epsilon)
    for _ in range(num_rounds - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + epsilon)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + epsilon)
    return matrix


class MixedStreams(nn.Module):
    """One hidden state of all streams: a mean of their normalized numbers, each of which has a weight (Qwen 4)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        assert arch.hyper is not None
        self.count, width = arch.hyper.num_streams, arch.hyper.num_streams * arch.hidden_size
        self.norm = StreamNorm(arch, self.count)
        self.mix_in = nn.Linear(width, arch.hyper.rank, bias=False)
        self.mix_out = nn.Linear(arch.hyper.rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[…, S, E] to […, E]."""
        return self.mixed(self.norm(x))

    def mixed(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.mix_out(F.silu(self.mix_in(x.flatten(-2)) / self.count)))
        return (torch.unflatten(weights, -1, (self.count, -1)) * x).mean(dim=-2)


class MixedConnection(MixedStreams):
    """What a part of a layer reads, and how the streams get what it gives."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.factors = nn.Linear(self.count * arch.hidden_size, self.count, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Joint]:  # type: ignore[override]
        """[…, S, E] to […, E], normalized, and how the result is joined to the streams."""
        x = self.norm(x)
        return self.mixed(x), Joint(2 * torch.sigmoid(self.factors(x.flatten(-2)) / self.count), None)

    def join(self, x: Tensor, y: Tensor, joint: Joint) -> Tensor:
        return x + joint.factors.unsqueeze(-1) * y.unsqueeze(-2)


def make_connection(arch: Architecture) -> HyperConnection | MixedConnection:
    assert arch.hyper is not None
    return MixedConnection(arch) if arch.hyper.rank else HyperConnection(arch)


class HyperHead(StreamWeights):
    """One hidden state of all streams, after the last layer."""

    def __init__(self, arch: Architecture) -> None:
        assert arch.hyper is not None
        super().__init__(arch, arch.hyper.num_streams, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[…, S, E] to […, E]."""
        weights = torch.sigmoid(self.products(x) * self.scale + self.base) + self.shape.epsilon
        return (weights.unsqueeze(-1) * x).sum(dim=-2).to(x.dtype)


def make_head(arch: Architecture) -> HyperHead | MixedStreams:
    assert arch.hyper is not None
    return MixedStreams(arch) if arch.hyper.rank else HyperHead(arch)


class HyperStreams(nn.Module):
    """Equal streams of the embeddings, and one of what the last layer leaves."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        assert arch.hyper is not None
        self.count = arch.hyper.num_streams
        self.head = make_head(arch) if arch.hyper.has_head else None

    def spread(self, x: Tensor) -> Tensor:
        """[…, E] to […, S, E]."""
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.count, x.shape[-1])

    def merge(self, x: Tensor) -> Tensor:
        """[…, S, E] to […, E]."""
        return x.mean(dim=-2) if self.head is None else self.head(x)
