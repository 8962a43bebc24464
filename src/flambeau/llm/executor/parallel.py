"""Tensor parallelism: each rank has some of the heads and part of every feed-forward layer; ranks add up their sums.

Rank 0 leads. It alone has the scheduler and the sampler, and it broadcasts the inputs of each forward pass. The other
ranks follow until it sends the end. Sharding happens while a checkpoint is read, so no rank holds more than its part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.executor.backend import AsyncDecoder, Backend, Greedy, run_prefill
from flambeau.llm.executor.inputs import StepImages, StepInputs
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import DecoderLayer, Transformer

IDLE = timedelta(days=365)  # followers wait as long as there are no requests; the ranks are ended as a group
END, DECODE, PREFILL, LOAD_ADAPTER, UNLOAD_ADAPTER = 0, 1, 2, 3, 4
HEADER_SIZE = 10

_ROWS = ("gate_proj", "up_proj", "q_proj", "q_b_proj", "kv_b_proj")  # each rank has some of the outputs …
_COLUMNS = ("o_proj", "down_proj")  # … and some of the inputs of the next layer
_KV_ROWS = ("k_proj", "v_proj")
_SCALES = ("scale", "scales", "minimums")


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


def minimum_of_ranks(number: int, ranks: TensorParallelGroup) -> int:
    box = torch.tensor([number])
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=ranks.control)
    return int(box)


def local_architecture(arch: Architecture, size: int) -> Architecture:
    """The shape of one rank's part of a network."""
    if arch.recurrence is not None:
        raise LLMError("recurrent layers cannot be split among ranks; use one rank")
    if (
        arch.num_heads % size
        or arch.intermediate_size % size
        or arch.expert_size % size
        or arch.shared_expert_size % size
    ):
        raise LLMError(
            f"{arch.num_heads} heads and an intermediate size of {arch.intermediate_size} cannot be split among {size} "
            f"ranks; use a number of ranks that divides both"
        )
    if arch.wide_qk_norm:
        raise LLMError("queries and keys are normalized over all heads, which ranks cannot share; use one rank")
    if arch.alibi is not None:
        raise LLMError("ALiBi's slopes depend on the number of heads, which ranks share; use one rank")
    if arch.num_kv_heads % size and size % arch.num_kv_heads:
        raise LLMError(f"{arch.num_kv_heads} key-value heads cannot be split among {size} ranks")
    return replace(
        arch,
        num_heads=arch.num_heads // size,
        num_kv_heads=max(1, arch.num_kv_heads // size),
        intermediate_size=arch.intermediate_size // size,
        expert_size=arch.expert_size // size,
        shared_expert_size=arch.shared_expert_size // size,
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Cuts one rank's part out of a checkpoint's tensors, by their Hugging Face names."""

    arch: Architecture
    rank: int
    size: int

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The rank's part of a tensor; all of it if every rank needs it."""
        module, _, kind = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        is_head_norm = leaf in ("q_norm", "k_norm") and tensor.dim() == 2
        if leaf in _ROWS or kind == "sinks" or (is_head_norm and leaf == "q_norm"):
            return tensor.chunk(self.size, dim=0)[self.rank]
        if leaf in _KV_ROWS or is_head_norm:
            return self._kv_rows(tensor)
        if leaf in _COLUMNS:
            if kind == "bias":  # added once, by rank 0; zeros on the meta device would import a compiler
                return tensor if self.rank == 0 or tensor.is_meta else torch.zeros_like(tensor)
            if kind in _SCALES:  # of quantized weights
                tensor = self._whole_groups(tensor)
            if tensor.dim() == 1:  # scales of whole rows
                return tensor
            if tensor.shape[1] % self.size:
                raise LLMError(
                    f"{module} has rows of {tensor.shape[1]} numbers or bytes, which {self.size} ranks cannot share "
                    "evenly; use a number of ranks that divides it, or one rank"
                )
            return tensor.chunk(self.size, dim=1)[self.rank]
        return tensor

    def _whole_groups(self, scales: Tensor) -> Tensor:
        """The scales [O, N] of smaller groups, if a border between ranks cuts a group; see `block_size_for`."""
        times = 1 if scales.dim() == 1 else self.size // math.gcd(self.size, scales.shape[1])
        return scales if times == 1 else scales.repeat_interleave(times, dim=1)

    def _kv_rows(self, tensor: Tensor) -> Tensor:
        """The rows of this rank's key-value heads; with more ranks than heads, ranks share a head."""
        heads = self.arch.num_kv_heads
        number = max(1, heads // self.size)
        first = self.rank * heads // self.size
        return tensor.view(heads, -1, *tensor.shape[1:])[first : first + number].flatten(0, 1)


class AllReduced(nn.Module):
    """A layer whose outputs are summed over all ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        dist.all_reduce(y)
        return y


def add_all_reduce(model: Transformer) -> None:
    """Sum the outputs of attention and of the feed-forward layers over all ranks."""
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.self_attn.add_module("o_proj", AllReduced(layer.self_attn.o_proj))
        layer.add_module("mlp", AllReduced(layer.mlp))


class LeaderBackend:
    """Rank 0's backend: broadcasts the inputs of a pass, then computes its own part."""

    greedy: Greedy | None = None
    async_decoder: AsyncDecoder | None = None

    def __init__(self, inner: Backend, ranks: TensorParallelGroup) -> None:
        self._inner = inner
        self._ranks = ranks
        self._is_in_step = True  # False during a pass, and after one that failed on this rank only

    @property
    def model(self) -> nn.Module:
        return self._inner.model

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def decode_path(self) -> str:
        return self._inner.decode_path

    def decode(self, inputs: StepInputs) -> Tensor:
        self._begin(DECODE, inputs, None)
        logits_TV = self._inner.decode(inputs)
        self._is_in_step = True
        return logits_TV

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        self._begin(PREFILL, inputs, rows_N)
        logits_NV = self._inner.prefill(inputs, rows_N)
        self._is_in_step = True
        return logits_NV

    def check_in_step(self) -> None:
        """Raise if the other ranks wait for the sums of a pass that never ends."""
        if not self._is_in_step:
            raise LLMError("the ranks are out of step since a forward pass has failed on rank 0; start them all anew")

    def _begin(self, kind: int, inputs: StepInputs, rows_N: Tensor | None) -> None:
        self.check_in_step()
        self._is_in_step = False
        send_inputs(self._ranks, kind, inputs, rows_N)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return self._inner.wait_until_compiled(timeout_s)

    def close(self) -> None:
        """Send the end to the other ranks. Ranks that wait inside a pass do not receive it and must be killed."""
        if self._is_in_step:
            dist.broadcast(torch.zeros(HEADER_SIZE, dtype=torch.int64), src=0, group=self._ranks.control)
            leave_group()
        self._inner.close()


def leave_group() -> None:
    """Destroy the process groups: their threads would abort a process that exits."""
    if dist.is_initialized():
        dist.destroy_process_group()


def follow(
    backend: Backend,
    ranks: TensorParallelGroup,
    device: torch.device,
    adapters: AdapterStore | None = None,
    before_leaving: Callable[[], None] = lambda: None,
) -> None:
    """Run a rank other than 0: compute the passes of rank 0 until it sends the end."""
    while (header := receive_header(ranks))[0] != END:
        if header[0] in (LOAD_ADAPTER, UNLOAD_ADAPTER):
            assert adapters is not None
            follow_adapter(ranks, header, adapters)
            continue
        inputs, rows_N = receive_inputs(ranks, header, device)
        if rows_N is None:
            backend.decode(inputs)
        else:
            run_prefill(backend, inputs, rows_N)
    backend.close()
    before_leaving()
    leave_group()


def send_inputs(ranks: TensorParallelGroup, kind: int, inputs: StepInputs, rows_N: Tensor | None) -> None:
    """Broadcast the inputs of the next pass: a header with the sizes, then all numbers in one tensor.

    The embeddings of images follow, if there are any.
    """
    tables, adapters_T, images = inputs.block_tables_SB, inputs.adapters_T, inputs.images
    parts = [inputs.ids_T, inputs.positions_T, inputs.slots_T, inputs.query_starts, inputs.context_lens_S]
    parts += [tables.flatten(), *(() if rows_N is None else (rows_N,)), *(() if adapters_T is None else (adapters_T,))]
    parts += [] if images is None else [images.rows_M, images.last_seen_T]
    sizes = [kind, len(inputs.ids_T), *tables.shape, 0 if rows_N is None else len(rows_N), inputs.query_len]
    image_shape = (0, 0) if images is None else images.features_ME.shape
    header = [*sizes, int(adapters_T is not None), *image_shape, inputs.longest]
    dist.broadcast(torch.tensor(header), src=0, group=ranks.control)
    dist.broadcast(torch.cat([part.to("cpu", torch.int64) for part in parts]), src=0, group=ranks.control)
    if images is not None:
        dist.broadcast(images.features_ME.to("cpu", torch.float32).contiguous(), src=0, group=ranks.control)


def receive_header(ranks: TensorParallelGroup) -> list[int]:
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    dist.broadcast(header, src=0, group=ranks.control)
    numbers: list[int] = header.tolist()
    return numbers


def receive_inputs(
    ranks: TensorParallelGroup, header: list[int], device: torch.device
) -> tuple[StepInputs, Tensor | None]:
    """Receive the numbers behind a header that rank 0 has sent."""
    kind, num_tokens, num_seqs, num_blocks, num_rows, query_len, has_adapters, num_image_rows, width, longest = header
    sizes = [num_tokens, num_tokens, num_tokens, num_seqs + 1, num_seqs, num_seqs * num_blocks, num_rows]
    more = [has_adapters * num_tokens, num_image_rows, num_tokens if num_image_rows else 0]
    numbers = torch.zeros(int(np.sum([*sizes, *more])), dtype=torch.int64)
    dist.broadcast(numbers, src=0, group=ranks.control)
    *_, adapters_T, image_rows_M, last_seen_T = torch.split(numbers, [*sizes, *more])
    images = None
    if num_image_rows:
        features_ME = torch.zeros(num_image_rows, width)
        dist.broadcast(features_ME, src=0, group=ranks.control)
        images = StepImages(image_rows_M, features_ME, last_seen_T).to(device)
    moved = numbers[: int(np.sum(sizes))].to(device)
    ids, positions, slots, starts, lengths, tables, rows = torch.split(moved, sizes)
    inputs = StepInputs(
        *(ids, positions, slots, starts, lengths, tables.view(num_seqs, num_blocks)),
        query_len=query_len,
        adapters_T=adapters_T if has_adapters else None,
        images=images,
        longest=longest,
    )
    return inputs, rows if kind == PREFILL else None


# ---- adapters ----


class LeaderAdapters:
    """Rank 0's adapters: every rank loads its part of each."""

    def __init__(self, inner: AdapterStore, ranks: TensorParallelGroup, leader: LeaderBackend) -> None:
        self._inner, self._ranks, self._leader = inner, ranks, leader

    def load(self, number: int, folder: Path) -> None:
        """Read an adapter on all ranks, or on none."""
        name = str(folder).encode()
        self._send(LOAD_ADAPTER, number, len(name))
        dist.broadcast(torch.tensor([*name], dtype=torch.int64), src=0, group=self._ranks.control)
        load_on_all(self._ranks, self._inner, number, folder)

    def unload(self, number: int) -> None:
        self._send(UNLOAD_ADAPTER, number, 0)
        self._inner.unload(number)

    def _send(self, kind: int, number: int, size: int) -> None:
        self._leader.check_in_step()
        header = [kind, number, size]
        dist.broadcast(torch.tensor([*header, *[0] * (HEADER_SIZE - len(header))]), src=0, group=self._ranks.control)


def follow_adapter(ranks: TensorParallelGroup, header: list[int], adapters: AdapterStore) -> None:
    """Load or unload an adapter as rank 0 does."""
    kind, number, size = header[:3]
    if kind == UNLOAD_ADAPTER:
        adapters.unload(number)
        return
    name = torch.zeros(size, dtype=torch.int64)
    dist.broadcast(name, src=0, group=ranks.control)
    try:
        load_on_all(ranks, adapters, number, Path(bytes(name.tolist()).decode()))
    except LLMError:
        pass  # rank 0 has an error too, and reports it


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


def sum_over_ranks(numbers: Tensor, ranks: TensorParallelGroup) -> Tensor:
    total = numbers.to("cpu", torch.float32, copy=True)
    dist.all_reduce(total, group=ranks.control)
    return total.to(numbers.device)


def load_on_all(ranks: TensorParallelGroup, adapters: AdapterStore, number: int, folder: Path) -> None:
    """Load an adapter; if a rank fails, all forget it and raise."""
    failure: LLMError | None = None
    total = RankSum(ranks)
    try:
        adapters.load(number, folder, total)
    except LLMError as error:
        failure = error
    except Exception as error:
        failure = CheckpointError(f"{folder} cannot be loaded: {error!r}")
    try:
        total.skip(has_failed=failure is not None)
    except CheckpointError as error:
        failure = failure or error
    if not minimum_of_ranks(int(failure is None), ranks):
        adapters.unload(number)
        raise failure or CheckpointError(f"{folder} cannot be loaded on another rank; see its log")
