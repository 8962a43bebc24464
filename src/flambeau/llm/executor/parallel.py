"""Tensor parallelism: each rank has some of the heads and part of every feed-forward layer; ranks add up their sums.

Rank 0 leads. It alone has the scheduler and the sampler, and it broadcasts the inputs of each forward pass. The other
ranks follow until it sends the end. Sharding happens while a checkpoint is read, so no rank holds more than its part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.core.state_slots import StateCopy
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.executor.backend import AsyncDecoder, Backend, Greedy, run_prefill
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.rank_inputs import (
    COPY_STATES,
    DECODE,
    END,
    LOAD_ADAPTER,
    PREFILL,
    UNLOAD_ADAPTER,
    receive_header,
    receive_inputs,
    send_header,
    send_inputs,
)
from flambeau.llm.executor.rank_norms import share_groups, share_inner_norm, share_norms
from flambeau.llm.executor.rank_parts import MIXER_COLUMNS, check_sizes, local_recurrence, mixer_rows
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.compressed_attention import CompressedAttention
from flambeau.llm.models.decoder_layers import DecoderLayer
from flambeau.llm.models.families.layer_sizes import LayerSizes
from flambeau.llm.models.feed_forward import MixedMLP
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.lightning_attention import LightningAttention
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.tensor_names import apart_name, of_its_layer
from flambeau.llm.models.transformer import Transformer

IDLE = timedelta(days=365)  # followers wait as long as there are no requests; the ranks are ended as a group

_ROWS = (
    "inner_norm",
    "gate_proj",
    "up_proj",
    "q_proj",
    "q_b_proj",
    "kv_b_proj",
    "o_a_proj",
)  # each rank has some of the outputs …
_COLUMNS = ("o_proj", "o_b_proj", "down_proj", *MIXER_COLUMNS)  # … and some of the inputs of the next layer
_KV_ROWS = ("k_proj", "v_proj")
_SCALES = ("scale", "scales", "minimums", "factors")


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
    check_sizes(arch, size)
    return replace(
        arch,
        num_heads=max(1, arch.num_heads // size),  # of a network without attention
        num_kv_heads=max(1, arch.num_kv_heads // size),
        intermediate_size=max(1, arch.intermediate_size // size),
        expert_size=arch.expert_size // size,
        shared_expert_size=arch.shared_expert_size // size,
        shapes=tuple(local_shape(shape, size) for shape in arch.shapes),
        compression=None if arch.compression is None else arch.compression.part(size),
        recurrence=None if arch.recurrence is None else local_recurrence(arch.recurrence, size),
    )


def local_shape(shape: LayerSizes, size: int) -> LayerSizes:
    """The sizes of one rank's part of a layer."""
    return replace(
        shape,
        num_heads=max(1, shape.num_heads // size),
        num_kv_heads=max(1, shape.num_kv_heads // size),
        intermediate_size=max(1, shape.intermediate_size // size),
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Cuts one rank's part out of a checkpoint's tensors, by their Hugging Face names."""

    arch: Architecture
    rank: int
    size: int

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The rank's part of a tensor; all of it if every rank needs it."""
        name = apart_name(name)
        module, _, kind = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        if self.arch.recurrence is not None and ".mixer." in name and leaf not in MIXER_COLUMNS:
            own = name.rpartition(".mixer.")[2].partition(".")[0]
            return mixer_rows(self.arch.recurrence, own, tensor, self.rank, self.size)
        if leaf == "position_scale":
            return tensor if ".indexer." in name else tensor.chunk(self.size, dim=0)[self.rank]
        is_head_norm = leaf in ("q_norm", "k_norm") and (tensor.dim() == 2 or self.arch.wide_qk_norm)
        if leaf in _ROWS or kind == "sinks" or (is_head_norm and leaf == "q_norm"):
            return tensor.chunk(self.size, dim=0)[self.rank]
        if leaf in _KV_ROWS or is_head_norm:
            return self._kv_rows(tensor, of_its_layer(self.arch, name).num_kv_heads)
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
        """The scales [O, N, …] of smaller groups, if a border between ranks cuts a group; see `block_size_for`."""
        times = 1 if scales.dim() == 1 else self.size // math.gcd(self.size, scales.shape[1])
        return scales if times == 1 else scales.repeat_interleave(times, dim=1)

    def _kv_rows(self, tensor: Tensor, heads: int) -> Tensor:
        """The rows of this rank's key-value heads; with more ranks than heads, ranks share a head."""
        number = max(1, heads // self.size)
        first = self.rank * heads // self.size
        return tensor.view(heads, -1, *tensor.shape[1:])[first : first + number].flatten(0, 1)


class AllReduced(nn.Module):
    """A layer whose outputs are summed over all ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.inner(*inputs)
        dist.all_reduce(y)
        return y


def add_all_reduce(model: Transformer, shard: Shard) -> None:
    """Make a rank's part of a network compute what depends on the parts of the others, too."""
    for block in model.model.blocks or ():
        for name in ("o_proj", "down_proj"):
            block.add_module(name, AllReduced(getattr(block, name)))
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        parts = dict(layer.named_children())  # not every layer has all of them
        if "self_attn" in parts:
            join_attention(layer.self_attn, shard)
        if "mixer" in parts:
            join_mixer(parts["mixer"], shard)
        mlp = parts.get("mlp")
        if isinstance(mlp, MixedMLP):  # its norms need the sums
            mlp.add_module("down_proj", AllReduced(mlp.down_proj))
            mlp.add_module("sparse", AllReduced(mlp.sparse))
        elif mlp is not None:
            share_inner_norm(mlp, shard.rank, shard.size)
            layer.add_module("mlp", AllReduced(mlp))
        if "shortcut" in parts:
            sparse = parts["shortcut"]
            assert isinstance(sparse, SparseMLP)
            sparse.adds_inputs = sparse.adds_inputs and shard.rank == 0
            layer.add_module("shortcut", AllReduced(sparse))


def join_attention(attention: Attention | LatentAttention | CompressedAttention, shard: Shard) -> None:
    """Sum the outputs over all ranks; norms over all heads and the slopes of ALiBi depend on the others, too."""
    if isinstance(attention, CompressedAttention):
        attention.add_module("o_b_proj", AllReduced(attention.o_b_proj))
        return
    attention.add_module("o_proj", AllReduced(attention.o_proj))
    if not isinstance(attention, Attention):
        return
    if attention.is_wide and attention.q_norm is not None:
        share_norms(attention, shard.rank, shard.size)
    share_inner_norm(attention, shard.rank, shard.size)
    if attention.indexer is not None:
        first = shard.rank * shard.arch.num_kv_heads // shard.size
        choice = attention.indexer.choice
        attention.indexer.choice = choice._replace(num_heads=attention.num_kv_heads, first_head=first)
    if attention.alibi is not None:
        first = shard.rank * attention.num_heads
        attention.alibi = attention.alibi._replace(num_heads=shard.arch.num_heads, first_head=first)


def join_mixer(mixer: nn.Module, shard: Shard) -> None:
    """Sum what depends on all heads or channels of a recurrent layer over all ranks."""
    for name, layer in [*mixer.named_children()]:
        if name in MIXER_COLUMNS:
            mixer.add_module(name, AllReduced(layer))
    share_groups(mixer, shard.arch, shard.rank, shard.size)
    if isinstance(mixer, LightningAttention) and shard.arch.recurrence is not None:
        mixer.num_all_heads = shard.arch.recurrence.num_heads
        mixer.first_head = shard.rank * mixer.shape.num_heads


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

    def send_command(self, *numbers: int) -> None:
        """Send a header that begins with these numbers; what it needs follows."""
        self.check_in_step()
        send_header([*numbers], self._ranks.control)

    def _begin(self, kind: int, inputs: StepInputs, rows_N: Tensor | None) -> None:
        self.check_in_step()
        self._is_in_step = False
        send_inputs(kind, inputs, rows_N, self._ranks.control)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return self._inner.wait_until_compiled(timeout_s)

    def close(self) -> None:
        """Send the end to the other ranks. Ranks that wait inside a pass do not receive it and must be killed."""
        if self._is_in_step:
            send_header([END], self._ranks.control)
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
    states: StateCache | None = None,
) -> None:
    """Run a rank other than 0: compute the passes of rank 0 until it sends the end."""
    while (header := receive_header(ranks.control))[0] != END:
        if header[0] in (LOAD_ADAPTER, UNLOAD_ADAPTER):
            assert adapters is not None
            follow_adapter(ranks, header, adapters)
            continue
        if header[0] == COPY_STATES:
            assert states is not None
            follow_copies(ranks, header, states)
            continue
        inputs, rows_N = receive_inputs(header, device, ranks.control)
        if rows_N is None:
            backend.decode(inputs)
        else:
            run_prefill(backend, inputs, rows_N)
    backend.close()
    before_leaving()
    leave_group()


# ---- states of recurrent layers ----


class LeaderStates(StateCache):
    """Rank 0's part of the states: what is copied is copied on every rank, each of which has its own part."""

    def __init__(self, inner: StateCache, ranks: TensorParallelGroup, leader: LeaderBackend) -> None:
        vars(self).update(vars(inner))  # the same tensors
        self._ranks, self._leader = ranks, leader

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """Make copies between slots, one after the other."""
        pairs = [*copies]
        self._leader.send_command(COPY_STATES, len(pairs))
        dist.broadcast(torch.tensor(pairs, dtype=torch.int64), src=0, group=self._ranks.control)
        super().copy(pairs)


def follow_copies(ranks: TensorParallelGroup, header: list[int], states: StateCache) -> None:
    """Copy states as rank 0 does."""
    pairs = torch.zeros(header[1], 2, dtype=torch.int64)
    dist.broadcast(pairs, src=0, group=ranks.control)
    states.copy(StateCopy(source, target) for source, target in pairs.tolist())


# ---- adapters ----


class LeaderAdapters:
    """Rank 0's adapters: every rank loads its part of each."""

    def __init__(self, inner: AdapterStore, ranks: TensorParallelGroup, leader: LeaderBackend) -> None:
        self._inner, self._ranks, self._leader = inner, ranks, leader

    def load(self, number: int, folder: Path) -> None:
        """Read an adapter on all ranks, or on none."""
        name = str(folder).encode()
        self._leader.send_command(LOAD_ADAPTER, number, len(name))
        dist.broadcast(torch.tensor([*name], dtype=torch.int64), src=0, group=self._ranks.control)
        load_on_all(self._ranks, self._inner, number, folder)

    def unload(self, number: int) -> None:
        self._leader.send_command(UNLOAD_ADAPTER, number, 0)
        self._inner.unload(number)


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
