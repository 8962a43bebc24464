"""Rank 0 leads: it alone has the scheduler and the sampler, and it broadcasts the inputs of each forward pass.

The other ranks follow until it sends the end. It also sends which states are copied and which adapters are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.executor.tensor_parallel import (
    RankSum,
    TensorParallelGroup,
    leave_group,
    minimum_of_ranks,
)


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
