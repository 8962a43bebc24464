"""CapturedStep: a decode step as a CUDA graph with fixed input buffers.

Inputs are copied to the GPU at once, and the most likely tokens back at once: a step is two copies and a launch.

Shapes: T tokens of the step · S sequences · B blocks of the longest one · V vocabulary
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.executor.background_compiler import Decode
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.sampling.sampler import argmax_tokens

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def size_for(num_sequences: int) -> int | None:
    """The smallest size for this many sequences; None if there are too many."""
    return next((size for size in SIZES if size >= num_sequences), None)


class CapturedStep:
    """One captured step with its input buffers."""

    def __init__(self, step: Decode, buffers: StepInputs, pool: Any) -> None:
        self._buffers = InputBuffers(buffers)
        self._tokens = torch.empty(len(buffers.ids_T), dtype=torch.int64, pin_memory=True)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a warm-up on this thread; the background thread has compiled the kernels
            argmax_tokens(step(self._buffers.inputs))
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": another thread may compile, and allocate, at the same time.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._logits_TV = step(self._buffers.inputs)
            self._tokens.copy_(argmax_tokens(self._logits_TV), non_blocking=True)

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V]; padding rows read and write block 0."""
        self._buffers.fill(inputs)
        self._graph.replay()
        return self._logits_TV[: len(inputs.ids_T)].clone()  # the next step overwrites them

    def argmax(self, inputs: StepInputs) -> Tensor:
        """The most likely tokens [T], on the host."""
        self._buffers.fill(inputs)
        self._graph.replay()
        torch.cuda.current_stream().synchronize()
        return self._tokens[: len(inputs.ids_T)].clone()


class InputBuffers:
    """The inputs of a step at fixed addresses. One copy fills all but the block tables, which change rarely."""

    NUMBERS = ("ids_T", "positions_T", "slots_T", "context_lens_S")

    def __init__(self, example: StepInputs) -> None:
        device = example.ids_T.device
        is_on_gpu = device.type == "cuda"
        sizes = [len(getattr(example, name)) for name in self.NUMBERS]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._views = dict(zip(self.NUMBERS, torch.split(self._numbers, sizes), strict=True))
        self._tables = torch.zeros_like(example.block_tables_SB)
        # Pinned memory, from which the GPU copies asynchronously.
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
        """Copy the inputs of a step into the larger buffers; the rest is padding."""
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
        current_SB = self._host_tables.numpy()[: len(tables_SB), : tables_SB.shape[1]]
        changed = (current_SB != tables_SB).any(1).nonzero()[0]
        if len(changed):
            current_SB[:] = tables_SB
            rows = slice(changed[0], changed[-1] + 1)
            self._tables[rows].copy_(self._host_tables[rows], non_blocking=True)
