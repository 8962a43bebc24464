"""TensorParallelGroup: the processes that compute one network together, and the numbers that they agree on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.llm.errors import CheckpointError, LLMError

IDLE = timedelta(days=365)  # followers wait as long as there are no requests; the ranks are ended as a group


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """The processes that compute one network together, as one of them sees it."""

    rank: int
    size: int
    control: dist.ProcessGroup  # for inputs and control messages; always on the host

    @classmethod
    def join(cls, device: torch.device) -> TensorParallelGroup:
        """Connect to the other ranks as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say."""
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError):
            raise LLMError(
                "tensor parallelism needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment; start the "
                "ranks with torchrun, or serve the model with parallelType: tp"
            ) from None
        backend = "nccl" if device.type == "cuda" else "gloo"
        if not dist.is_initialized():
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=IDLE)
        control = dist.new_group(backend="gloo", timeout=IDLE)
        return cls(rank, size, control)


def leave_group() -> None:
    """Destroy the process groups: their threads would abort a process that exits."""
    if dist.is_initialized():
        dist.destroy_process_group()


def minimum_of_ranks(number: int, ranks: TensorParallelGroup) -> int:
    box = torch.tensor([number])
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=ranks.control)
    return int(box)


def sum_over_ranks(numbers: Tensor, ranks: TensorParallelGroup) -> Tensor:
    total = numbers.to("cpu", torch.float32, copy=True)
    dist.all_reduce(total, group=ranks.control)
    return total.to(numbers.device)


class RankSum:
    """A sum over ranks while an adapter is loaded. Each takes part, also one that has failed or has nothing to add."""

    def __init__(self, ranks: TensorParallelGroup) -> None:
        self._ranks, self._is_over = ranks, False

    def __call__(self, numbers: Tensor) -> Tensor:
        """The sum of the ranks' numbers; raises CheckpointError if another rank has none, or more."""
        self._compare(len(numbers))
        return sum_over_ranks(numbers, self._ranks)

    def skip(self, *, has_failed: bool) -> None:
        """Have nothing to add; raises CheckpointError if another rank has."""
        if not self._is_over:
            self._compare(-1 if has_failed else 0)

    def _compare(self, size: int) -> None:
        self._is_over = True
        low, high = minimum_of_ranks(size, self._ranks), -minimum_of_ranks(-size, self._ranks)
        if low != high:
            raise CheckpointError("the adapter could not be read on all ranks, or is not the same; see their logs")
