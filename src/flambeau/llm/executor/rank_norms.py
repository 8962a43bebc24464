"""Norms over numbers that ranks share: each rank sums the squares of its own, and the sums are added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.lightning_attention import LightningAttention
from flambeau.llm.models.norms import MeanSquare, RMSNorm, SharedRMSNorm
from flambeau.llm.models.recurrent import GatedNorm, Mamba2


@dataclass(frozen=True, slots=True)
class SharedMeanSquare:
    """The mean square of the numbers of a group of ranks; several ranks may have the same numbers."""

    num_groups: int
    group: int  # of this rank
    count: int  # of the group's numbers, as often as ranks have them

    def __call__(self, x: Tensor) -> Tensor:
        """Of float32 […, C] to […, 1]."""
        squares = x.new_zeros(*x.shape[:-1], self.num_groups)
        squares[..., self.group] = x.square().sum(dim=-1)
        dist.all_reduce(squares)
        return squares[..., self.group, None] / self.count


def mean_square_of(num_groups: int, own: int, rank: int, size: int) -> MeanSquare:
    """For groups of ranks, each of which has `own` numbers."""
    return SharedMeanSquare(num_groups, rank * num_groups // size, own * size // num_groups)


def share_norms(attention: Attention, rank: int, size: int) -> None:
    """Normalize queries over the heads of all ranks, and keys, which several ranks may have."""
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name)
        assert type(norm) is RMSNorm
        attention.add_module(name, SharedRMSNorm(norm, mean_square_of(1, len(norm.weight), rank, size)))


def share_inner_norm(module: nn.Module, rank: int, size: int) -> None:
    """Normalize what the last layer of attention or of a feed-forward layer reads over all ranks."""
    norm = getattr(module, "inner_norm", None)
    if isinstance(norm, RMSNorm):
        module.add_module("inner_norm", SharedRMSNorm(norm, mean_square_of(1, len(norm.weight), rank, size)))


def share_groups(mixer: nn.Module, arch: Architecture, rank: int, size: int) -> None:
    """Normalize the channels of Mamba 2 or lightning attention over all ranks that have some of a group."""
    recurrence = arch.recurrence
    if (
        not isinstance(mixer, Mamba2 | LightningAttention)
        or not isinstance(mixer.norm, GatedNorm)
        or recurrence is None
    ):
        return
    if recurrence.norm_groups < size:
        mixer.norm.mean_square = mean_square_of(recurrence.norm_groups, len(mixer.norm.weight), rank, size)
