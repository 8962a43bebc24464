"""Graphs: decode steps as CUDA graphs, one for each of a few numbers of sequences; others are filled up to the next.

A graph is compiled beside the steps and captured between two of them, by the thread that runs the steps.

Shapes: T tokens of the step · S sequences · Q tokens of each · B blocks of the longest one · V vocabulary
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels import inductor
from flambeau.llm.models.transformer import Attend, Transformer

if TYPE_CHECKING:
    from flambeau.llm.compute.compiled import Decode, Workshop

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def size_for(num_sequences: int) -> int | None:
    """The smallest size that holds so many sequences; None: there is none."""
    return next((size for size in SIZES if size >= num_sequences), None)


def attention_on_gpu(cache: KVCache, inputs: StepInputs) -> Attend:
    """The Triton kernel; imported where it is used, as a machine without a GPU has no Triton."""
    from flambeau.llm.kernels.triton_paged import TritonAttention

    return TritonAttention(cache, inputs)


class Graphs:
    """What is captured so far; graphs share one pool of memory, and inputs of one shape their buffers."""

    def __init__(self, model: Transformer, cache: KVCache, *, max_num_seqs: int, max_blocks: int) -> None:
        self._model, self._cache = model, cache
        self._max_blocks = max_blocks
        self._device = cache.keys[0].device
        self._largest = size_for(max_num_seqs) or SIZES[-1]
        self._captured: dict[tuple[int, int], Graph] = {}
        self._pool: Any = None

    def find(self, workshop: Workshop, inputs: StepInputs) -> Decode | None:
        """The graph for such a step; captured here if it has been compiled since the last one."""
        size = size_for(inputs.context_lens_S.shape[0])
        if size is None or size > self._largest or inputs.block_tables_SB.shape[1] > self._max_blocks:
            return None
        key = (inputs.query_len, size)
        graph = self._captured.get(key)
        if graph is None:
            made: Any = workshop.find(key, lambda: self._compile(*key))
            if made is None:
                return None
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = self._captured[key] = Graph(made, self._trash(*key), self._pool)
        return graph.run

    def _trash(self, query_len: int, size: int) -> StepInputs:
        return inductor.trash_inputs(size, query_len, self._max_blocks, self._device)

    def _compile(self, query_len: int, size: int) -> Any:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            example = self._trash(query_len, size)
            step = inductor.compile_step(self._model, self._cache, query_len, attention_on_gpu, example)
            stream.synchronize()
        return step


class Graph:
    """One captured step with its input buffers."""

    def __init__(self, step: inductor.Step, buffers: StepInputs, pool: Any) -> None:
        self._buffers = buffers
        arguments = inductor.tensors_of(buffers)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once more than the compiler did: on this thread nothing is warm yet
            step(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread only: another may be compiling, and allocate.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits_TV = step(*arguments)

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V]; rows that fill up are read and written in the trash block."""
        fill(self._buffers, inputs)
        self._graph.replay()
        return self._logits_TV[: len(inputs.ids_T)].clone()  # the next step writes over them


def fill(buffers: StepInputs, inputs: StepInputs) -> None:
    """Put a step's inputs into larger buffers; the rest is padding, which nothing else reads."""
    num_tokens, (num_sequences, num_blocks) = len(inputs.ids_T), inputs.block_tables_SB.shape
    buffers.ids_T[:num_tokens].copy_(inputs.ids_T)
    buffers.positions_T[:num_tokens].copy_(inputs.positions_T)
    buffers.slots_T[:num_tokens].copy_(inputs.slots_T)
    buffers.context_lens_S[:num_sequences].copy_(inputs.context_lens_S)
    buffers.block_tables_SB[:num_sequences, :num_blocks].copy_(inputs.block_tables_SB)
    if num_tokens < len(buffers.ids_T):
        buffers.positions_T[num_tokens:].zero_()
        buffers.slots_T[num_tokens:].zero_()
