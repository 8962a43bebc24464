"""Tensor parallelism: each rank has some of the heads and some of every feed-forward part, and they add up their sums.

Rank 0 leads: it alone has the scheduler and the sampler, and tells the others the inputs of each forward pass; they
follow until it says the end. Sharding is applied while a checkpoint is read, so that no rank holds more than its part.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flambeau.llm.compute.forward import Forward, Greedy
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.errors import LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import Layer, Transformer

IDLE = timedelta(days=365)  # followers wait as long as nobody asks for anything; whoever dies takes them along
END, DECODE, PREFILL = 0, 1, 2
HEADER_SIZE = 6

_ROWS = ("gate_proj", "up_proj", "q_proj")  # each rank has some of the outputs …
_COLUMNS = ("o_proj", "down_proj")  # … and of the inputs of what comes after
_KV_ROWS = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that compute one network together, seen from one of them."""

    rank: int
    size: int
    control: dist.ProcessGroup  # for what is said between passes; always on the host

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Meet the others where the environment says (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
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


def least(number: int, ranks: Ranks) -> int:
    """The smallest of the numbers that the ranks have."""
    box = torch.tensor([number])
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=ranks.control)
    return int(box)


def local_architecture(arch: Architecture, size: int) -> Architecture:
    """The shape of one rank's part of a network."""
    if arch.num_heads % size or arch.intermediate_size % size or arch.expert_size % size:
        raise LLMError(
            f"{arch.num_heads} heads and an intermediate size of {arch.intermediate_size} cannot be split among {size} "
            f"ranks; use a number of ranks that divides both"
        )
    if arch.num_kv_heads % size and size % arch.num_kv_heads:
        raise LLMError(f"{arch.num_kv_heads} key-value heads cannot be split among {size} ranks")
    return replace(
        arch,
        num_heads=arch.num_heads // size,
        num_kv_heads=max(1, arch.num_kv_heads // size),
        intermediate_size=arch.intermediate_size // size,
        expert_size=arch.expert_size // size,
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the tensors of a checkpoint, by their Hugging Face names."""

    arch: Architecture
    rank: int
    size: int

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The rank's part of a tensor; all of it where every rank needs it."""
        module, _, kind = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        if leaf in _ROWS:
            return tensor.chunk(self.size, dim=0)[self.rank]
        if leaf in _KV_ROWS:
            return self._kv_rows(tensor)
        if leaf in _COLUMNS:
            if kind == "bias":  # added once, by rank 0
                return tensor if self.rank == 0 else torch.zeros_like(tensor)
            if kind == "scale":  # of quantized weights: one for each output
                return tensor
            return tensor.chunk(self.size, dim=1)[self.rank]
        return tensor

    def _kv_rows(self, tensor: Tensor) -> Tensor:
        """The rows of this rank's key-value heads; where there are more ranks than heads, several have the same."""
        heads = self.arch.num_kv_heads
        number = max(1, heads // self.size)
        first = self.rank * heads // self.size
        return tensor.view(heads, -1, *tensor.shape[1:])[first : first + number].flatten(0, 1)


class Summed(nn.Module):
    """A layer whose outputs are added up over all ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what every rank has computed."""
        y: Tensor = self.inner(x)
        dist.all_reduce(y)
        return y


def connect(model: Transformer) -> None:
    """Let the ranks add up what each has computed of attention and of the feed-forward part."""
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        layer.self_attn.add_module("o_proj", Summed(layer.self_attn.o_proj))
        layer.add_module("mlp", Summed(layer.mlp))


class LeadingForward:
    """Rank 0's forward pass: the others are told the same inputs first."""

    greedy: Greedy | None = None

    def __init__(self, inner: Forward, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks
        self._is_in_step = True  # not while a pass is computed, nor after one that failed here alone
        self.model = getattr(inner, "model", None)

    def decode(self, inputs: StepInputs) -> Tensor:
        """As the inner one's."""
        self._begin(DECODE, inputs, None)
        logits_TV = self._inner.decode(inputs)
        self._is_in_step = True
        return logits_TV

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """As the inner one's."""
        self._begin(PREFILL, inputs, rows_N)
        logits_NV = self._inner.prefill(inputs, rows_N)
        self._is_in_step = True
        return logits_NV

    def _begin(self, kind: int, inputs: StepInputs, rows_N: Tensor | None) -> None:
        if not self._is_in_step:  # the others wait for the sums of a pass that will never be finished
            raise LLMError("the ranks are out of step since a forward pass has failed on rank 0; start them all anew")
        self._is_in_step = False
        tell(self._ranks, kind, inputs, rows_N)

    def close(self) -> None:
        """Let the others go; those that wait for something else would not hear it, and have to be ended."""
        if self._is_in_step:
            dist.broadcast(torch.zeros(HEADER_SIZE, dtype=torch.int64), src=0, group=self._ranks.control)
            leave()
        self._inner.close()


def leave() -> None:
    """Part from the other ranks: threads of the groups that are still there abort a process that ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def follow(forward: Forward, ranks: Ranks, device: torch.device) -> None:
    """Another rank's life: compute whatever rank 0 computes, until it says the end."""
    while (told := listen(ranks, device)) is not None:
        inputs, rows_N = told
        if rows_N is None:
            forward.decode(inputs)
        else:
            forward.prefill(inputs, rows_N)
    forward.close()
    leave()


def tell(ranks: Ranks, kind: int, inputs: StepInputs, rows_N: Tensor | None) -> None:
    """Say what the next pass computes: a header with the sizes, then all numbers in a row."""
    tables = inputs.block_tables_SB
    parts = [inputs.ids_T, inputs.positions_T, inputs.slots_T, inputs.query_starts, inputs.context_lens_S]
    parts += [tables.flatten(), *(() if rows_N is None else (rows_N,))]
    sizes = [kind, len(inputs.ids_T), *tables.shape, 0 if rows_N is None else len(rows_N), inputs.query_len]
    dist.broadcast(torch.tensor(sizes), src=0, group=ranks.control)
    dist.broadcast(torch.cat([part.to("cpu", torch.int64) for part in parts]), src=0, group=ranks.control)


def listen(ranks: Ranks, device: torch.device) -> tuple[StepInputs, Tensor | None] | None:
    """What rank 0 says; None at the end."""
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    dist.broadcast(header, src=0, group=ranks.control)
    kind, num_tokens, num_seqs, num_blocks, num_rows, query_len = header.tolist()
    if kind == END:
        return None
    sizes = [num_tokens, num_tokens, num_tokens, num_seqs + 1, num_seqs, num_seqs * num_blocks, num_rows]
    numbers = torch.zeros(int(np.sum(sizes)), dtype=torch.int64)
    dist.broadcast(numbers, src=0, group=ranks.control)
    ids, positions, slots, starts, lengths, tables, rows = torch.split(numbers.to(device), sizes)
    inputs = StepInputs(ids, positions, slots, starts, lengths, tables.view(num_seqs, num_blocks), query_len=query_len)
    return inputs, rows if kind == PREFILL else None
