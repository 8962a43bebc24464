"""Graphs: decode steps as CUDA graphs, one for each of a few numbers of sequences; others are filled up to the next.

What a graph captures is made beside the steps, and captured between two of them, by the thread that runs the steps. Its
inputs go to the GPU in one piece, and the likeliest tokens come back in one: a step is two copies and a launch.

Shapes: T tokens of the step · S sequences · Q tokens of each · B blocks of the longest one · J tokens of each that
follow the step · V vocabulary
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.compute.forward import EagerForward
from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels import inductor
from flambeau.llm.models.transformer import Attend, Transformer
from flambeau.llm.sampling.sampler import chosen

if TYPE_CHECKING:
    from flambeau.llm.compute.compiled import Decode, Workshop

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def size_for(num_sequences: int) -> int | None:
    """The smallest size that holds so many sequences; None: there is none."""
    return next((size for size in SIZES if size >= num_sequences), None)


def attention_on_gpu(cache: KVCache, inputs: StepInputs) -> Attend:
    """The Triton kernel; imported where it is used, as a machine without a GPU has no Triton."""
    from flambeau.llm.kernels.gpu.attention import TritonAttention

    return TritonAttention(cache, inputs)


def kernels_for(model: Transformer, cache: KVCache) -> Decode | None:
    """The step by kernels alone, for a network that they can compute."""
    from flambeau.llm.kernels.gpu.network import GpuNetwork, can_compute

    return GpuNetwork(model, cache).run if can_compute(model, cache) else None


class Graphs:
    """What is captured so far; graphs share one pool of memory, and inputs of one shape their buffers."""

    def __init__(
        self, eager: EagerForward, cache: KVCache, workshop: Workshop, *, max_num_seqs: int, max_blocks: int
    ) -> None:
        self._eager, self._model, self._cache, self._workshop = eager, eager.model, cache, workshop
        self._max_blocks = max_blocks
        self._device = cache.keys[0].device
        self._largest = size_for(max_num_seqs) or SIZES[-1]
        self._captured: dict[tuple[int, int], Graph] = {}
        self._kernels: Decode | None = None
        self._is_known = False
        self._pool: Any = None

    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V]."""
        graph = self._find(inputs)
        return self._eager.decode(inputs) if graph is None else graph.run(inputs)

    def choose(self, inputs: StepInputs) -> Tensor:
        """The likeliest token after each [T], the first of equal ones; -1 where its logits are no numbers."""
        graph = self._find(inputs)
        return chosen(self._eager.decode(inputs)).cpu() if graph is None else graph.choose(inputs)

    def go_ahead(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        """The likeliest token after each sequence, the likeliest after that one, and so on: [J + 1, S]."""
        num_sequences = len(first.context_lens_S)
        found = [self.choose(first).view(num_sequences, -1)[:, -1].clamp_(min=0)]
        starts_S = torch.arange(num_sequences + 1)
        for positions_S, slots_S in zip(positions_JS, slots_JS, strict=True):
            step = StepInputs(
                found[-1], positions_S, slots_S, starts_S, positions_S + 1, first.block_tables_SB, query_len=1
            )
            found.append(self.choose(step).clamp_(min=0))
        return torch.stack(found)

    def _find(self, inputs: StepInputs) -> Graph | None:
        """The graph for such a step; captured here if it has been made since the last one."""
        size = size_for(inputs.context_lens_S.shape[0])
        if size is None or size > self._largest or inputs.block_tables_SB.shape[1] > self._max_blocks:
            return None
        key = (inputs.query_len, size)
        graph = self._captured.get(key)
        if graph is None:
            made: Any = self._workshop.find(key, lambda: self._make(*key))
            if made is None:
                return None
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = self._captured[key] = Graph(made, self._trash(*key), self._pool)
        return graph

    def _trash(self, query_len: int, size: int) -> StepInputs:
        return inductor.trash_inputs(size, query_len, self._max_blocks, self._device)

    @torch.inference_mode()
    def _make(self, query_len: int, size: int) -> Decode:
        """What to capture, run once: whatever is compiled at the first call is compiled here."""
        if not self._is_known:
            self._kernels, self._is_known = kernels_for(self._model, self._cache), True
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            example = self._trash(query_len, size)
            if self._kernels is None:
                step = inductor.compile_step(self._model, self._cache, query_len, attention_on_gpu, example)
            else:
                step = self._kernels
                step(example)
            stream.synchronize()
        return step


class Graph:
    """One captured step with its input buffers."""

    def __init__(self, step: Decode, buffers: StepInputs, pool: Any) -> None:
        self._buffers = Buffers(buffers)
        self._chosen = torch.empty(len(buffers.ids_T), dtype=torch.int64, pin_memory=True)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once more than its maker did: on this thread nothing is warm yet
            chosen(step(self._buffers.inputs))
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread only: another may be compiling, and allocate.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits_TV = step(self._buffers.inputs)
            self._chosen.copy_(chosen(self._logits_TV), non_blocking=True)

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V]; rows that fill up are read and written in the trash block."""
        self._buffers.fill(inputs)
        self._graph.replay()
        return self._logits_TV[: len(inputs.ids_T)].clone()  # the next step writes over them

    def choose(self, inputs: StepInputs) -> Tensor:
        """The likeliest tokens [T], on the host."""
        self._buffers.fill(inputs)
        self._graph.replay()
        torch.cuda.current_stream().synchronize()
        return self._chosen[: len(inputs.ids_T)].clone()


class Buffers:
    """A step's inputs where a graph looks for them: one copy fills all but the block tables, which change rarely."""

    NUMBERS = ("ids_T", "positions_T", "slots_T", "context_lens_S")

    def __init__(self, example: StepInputs) -> None:
        device = example.ids_T.device
        is_on_gpu = device.type == "cuda"
        sizes = [len(getattr(example, name)) for name in self.NUMBERS]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._views = dict(zip(self.NUMBERS, torch.split(self._numbers, sizes), strict=True))
        self._tables = torch.zeros_like(example.block_tables_SB)
        # What is on the host is where the GPU copies from by itself, which it may do later.
        self._host_numbers = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_on_gpu)
        host_views = (view.numpy() for view in torch.split(self._host_numbers, sizes))
        self._host_views = dict(zip(self.NUMBERS, host_views, strict=True))
        self._host_tables = torch.zeros(self._tables.shape, dtype=torch.int64, pin_memory=is_on_gpu)
        self._copied: Any = torch.cuda.Event() if is_on_gpu else None  # type: ignore[no-untyped-call]
        self.inputs = StepInputs(
            **self._views,
            query_starts=example.query_starts,
            block_tables_SB=self._tables,
            query_len=example.query_len,
        )

    def fill(self, inputs: StepInputs) -> None:
        """Put a step's inputs into larger buffers; the rest is padding, which nothing else reads."""
        if self._copied is not None:
            self._copied.synchronize()
        on_device = []
        for name, view in self._host_views.items():
            given = getattr(inputs, name)
            if given.is_cpu:
                view[: len(given)] = given.numpy()
            else:
                on_device.append((self._views[name][: len(given)], given))
            view[len(given) :] = 0
        self._numbers.copy_(self._host_numbers, non_blocking=True)
        for buffer, given in on_device:
            buffer.copy_(given)
        self._fill_tables(inputs.block_tables_SB.cpu().numpy())
        if self._copied is not None:
            self._copied.record()

    def _fill_tables(self, tables_SB: NDArray[np.int64]) -> None:
        kept_SB = self._host_tables.numpy()[: len(tables_SB), : tables_SB.shape[1]]
        changed = (kept_SB != tables_SB).any(1).nonzero()[0]
        if len(changed):
            kept_SB[:] = tables_SB
            rows = slice(changed[0], changed[-1] + 1)
            self._tables[rows].copy_(self._host_tables[rows], non_blocking=True)
