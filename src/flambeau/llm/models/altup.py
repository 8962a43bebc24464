"""AltUp: layers read and change several streams of hidden states, of which they compute one (Gemma 3n).

Shapes: … any leading dimensions · S streams · E hidden
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.norms import make_norm

SMALLEST = 1e-5  # mean square of a stream


class Streams(nn.Module):
    """One hidden state to several, and back."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        others, size = range(1, arch.num_streams), arch.hidden_size
        self.projections = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in others)
        self.unembed_projections = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in others)

    def spread(self, x: Tensor) -> Tensor:
        """[…, E] to […, S, E]."""
        return torch.stack((x, *(as_large(project(x), x) for project in self.projections)), dim=-2)

    def merge(self, x: Tensor) -> Tensor:
        """[…, S, E] to […, E]."""
        first, *others = x.unbind(dim=-2)
        pairs = zip(self.unembed_projections, others, strict=True)
        return torch.stack((first, *(as_large(project(other), first) for project, other in pairs))).mean(dim=0)


def as_large(x: Tensor, like: Tensor) -> Tensor:
    """x with the mean square of another tensor."""
    size = like.square().mean(dim=-1, keepdim=True).sqrt()
    return x * size / x.square().mean(dim=-1, keepdim=True).clamp(min=SMALLEST).sqrt()


class AltUp(nn.Module):
    """Predicts what the streams are after a layer, and corrects it when one of them was computed."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        count = arch.num_streams
        self.active, self.scales, self.input_scale = arch.active_stream, arch.scales_stream, 1.0 / arch.hidden_size
        self.correct_output_scale = nn.Parameter(torch.zeros(arch.hidden_size))
        self.correction_coefs = nn.Linear(count, count, bias=False)
        self.prediction_coefs = nn.Linear(count, count * count, bias=False)
        self.modality_router = nn.Linear(arch.hidden_size, count, bias=False)
        self.router_norm = make_norm(arch)

    def modalities(self, x: Tensor) -> Tensor:
        """[…, E] to […, S]."""
        return torch.tanh(self.modality_router(self.router_norm(x) * self.input_scale).float()).to(x.dtype)

    def predict(self, x: Tensor) -> Tensor:
        """[…, S, E] to […, S, E]."""
        factors = self.prediction_coefs(self.modalities(x[..., self.active, :]))
        return x + factors.unflatten(-1, (x.shape[-2], -1)) @ x  # type: ignore[no-any-return]

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """[…, S, E] and the stream […, E] that was computed to […, S, E]."""
        error = computed - predicted[..., self.active, :]
        factors = self.correction_coefs(self.modalities(computed)) + 1.0
        return predicted + error.unsqueeze(-2) * factors.unsqueeze(-1)  # type: ignore[no-any-return]

    def scaled(self, x: Tensor) -> Tensor:
        """The computed stream […, E] of […, S, E], as the embeddings of the layer read it."""
        y = x[..., self.active, :]
        return y * self.correct_output_scale if self.scales else y


class Laurel(nn.Module):
    """A residual connection of low rank."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.linear_left = nn.Linear(arch.hidden_size, arch.laurel_size, bias=False)
        self.linear_right = nn.Linear(arch.laurel_size, arch.hidden_size, bias=False)
        self.norm = make_norm(arch)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return x + self.norm(self.linear_right(self.linear_left(x)))  # type: ignore[no-any-return]


def threshold_of(sparsity: float) -> float:
    """What that part of normally distributed numbers does not reach, in deviations; compilers cannot trace this."""
    return NormalDist().inv_cdf(sparsity)


def above_threshold(x: Tensor, threshold: float) -> Tensor:
    """How far numbers lie above a threshold, which is so many deviations from their mean."""
    factor = torch.tensor(threshold, dtype=x.dtype)  # rounded as the network's numbers are
    return F.relu(x - (x.mean(dim=-1, keepdim=True) + x.std(dim=-1, keepdim=True, unbiased=False) * factor))
