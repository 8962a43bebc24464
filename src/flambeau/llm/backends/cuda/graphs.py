"""CapturedStep: a decode step with its sampling as a CUDA graph with fixed input buffers.

Inputs are copied to the GPU at once, and the chosen tokens back at once: a step is two copies and a launch. Nothing
waits: the tokens of one step can be the inputs of the next before the host has read them.

Where grammars say which tokens may follow, the host makes their masks while the step runs. A second, small graph then
chooses from the same logits, and the tokens that the step chose by itself are overwritten.

Shapes: T tokens of the step · S sequences · V vocabulary · B blocks of the longest sequence, or words of 32 tokens
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.executor.background_compiler import Decode, summary
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.sampling.grammar_masks import Bits
from flambeau.llm.sampling.logits_processors import argmax_tokens
from flambeau.llm.sampling.row_groups import RowSettings

log = logging.getLogger(__name__)

Captured = TypeVar("Captured")
COMPILING = threading.Lock()  # process-wide: Inductor synchronizes the device, which is not allowed during a capture
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def size_for(num_sequences: int) -> int | None:
    """The smallest size for this many sequences; None if there are too many."""
    return next((size for size in SIZES if size >= num_sequences), None)


class GraphCapture:
    """Captures graphs that share a pool of memory; what could not be captured once is not tried again."""

    def __init__(self) -> None:
        self.failed: set[Hashable] = set()
        self._pool: Any = None

    def capture(self, key: Hashable, what: str, make: Callable[[Any], Captured]) -> Captured | None:
        """What `make` makes of the pool; None if that is not possible now, or not at all."""
        if not COMPILING.acquire(blocking=False):
            return None
        stream = torch.cuda.current_stream()
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            return make(self._pool)
        except RuntimeError as error:  # for example out of memory
            torch.cuda.set_stream(stream)  # a failed capture may leave its own stream set
            self.failed.add(key)
            log.warning("%s are not captured and stay slower: %s", what, summary(error))
            return None
        finally:
            COMPILING.release()


class SideStream:
    """A stream of a background thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run on the stream, and wait for it at the end."""
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


def capture_graph(run: Callable[[], Captured], pool: Any) -> tuple[Any, Captured]:
    """A graph of what `run` does, and where its results will be; it runs once before."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a warm-up on this thread; the background thread has compiled the kernels
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": another thread may compile, and allocate, at the same time.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        found = run()
    return graph, found


class TokenChooser(Protocol):
    """Sampling that can be captured (`sampling_kernel.TokenChoice`)."""

    chosen_T: Tensor

    def set(self, settings: RowSettings | None) -> None:
        """Use these settings from the next run on; None: the best tokens."""

    def run(self, logits_TV: Tensor, positions_T: Tensor, next_T: Tensor) -> None:
        """Tokens, or NO_TOKEN, into `chosen_T`; into `next_T` those that the next step can compute."""

    def set_masks(self, bits_SB: Bits) -> None:
        """Use these masks in the next masked run."""

    def run_masked(self, logits_TV: Tensor, positions_T: Tensor, next_T: Tensor) -> None:
        """As `run`, from the tokens that the masks allow; it may change the logits."""


@dataclass(slots=True)
class CapturedTokens:
    """The tokens of a started step."""

    step: CapturedStep
    next_ids: Tensor
    host_S: Tensor
    is_copied: Any  # an event
    is_chosen: bool = True

    def choose(self, bits_SB: Bits) -> None:
        assert not self.is_chosen
        self.step.choose(bits_SB, self)
        self.is_chosen = True

    def wait(self) -> list[int]:
        assert self.is_chosen, "the step waits for its masks"
        self.is_copied.synchronize()
        found: list[int] = self.host_S.tolist()
        return found


class CapturedStep:
    """One captured step with its input buffers. Without a chooser it gives logits, or the most likely tokens."""

    def __init__(
        self,
        step: Decode,
        buffers: StepInputs,
        pool: Any,
        chooser: TokenChooser | None = None,
        states: HiddenStates | None = None,
    ) -> None:
        self._buffers = InputBuffers(buffers)
        self._states = states
        self._chooser = chooser
        self._settings: RowSettings | None = None
        num_tokens, is_on_gpu = len(buffers.ids_T), buffers.ids_T.is_cuda
        # Two steps may run or wait to be read.
        self._results: list[tuple[Tensor, Any]] = [
            (torch.empty(num_tokens, dtype=torch.int64, pin_memory=is_on_gpu), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        self._chosen_T = torch.zeros(num_tokens, dtype=torch.int64, device=buffers.ids_T.device)
        self._graph, (self._logits_TV, self._states_TX) = capture_graph(lambda: self._compute(step), pool)
        self._masked_graph = None
        if chooser is not None:
            self._masked_graph, _ = capture_graph(lambda: self._choose_masked(chooser), pool)

    def _compute(self, step: Decode) -> tuple[Tensor, Tensor | None]:
        inputs = self._buffers.inputs
        logits_TV = step(inputs)
        states_TX = None if self._states is None else self._states.take()
        if self._chooser is None:
            self._chosen_T.copy_(argmax_tokens(logits_TV))
        else:
            self._chooser.run(logits_TV, inputs.positions_T, inputs.ids_T)
        return logits_TV, states_TX

    def _choose_masked(self, chooser: TokenChooser) -> None:
        inputs = self._buffers.inputs
        chooser.run_masked(self._logits_TV, inputs.positions_T, inputs.ids_T)

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V]; padding rows read and write block 0."""
        self._buffers.fill(inputs)
        self._replay(len(inputs.ids_T))
        return self._logits_TV[: len(inputs.ids_T)].clone()  # the next step overwrites them

    def _replay(self, num_tokens: int) -> None:
        self._graph.replay()
        if self._states is not None and self._states_TX is not None:
            self._states.set(self._states_TX[:num_tokens].clone())

    def argmax(self, inputs: StepInputs) -> Tensor:
        """The most likely tokens [T], on the host."""
        tokens = self._start(inputs, None)
        tokens.is_copied.synchronize()
        return tokens.host_S.clone()

    def start(self, inputs: StepInputs, settings: RowSettings | None) -> CapturedTokens | None:
        """Start the step without waiting for its tokens; None if it has no chooser."""
        return None if self._chooser is None else self._start(inputs, settings)

    def _start(self, inputs: StepInputs, settings: RowSettings | None) -> CapturedTokens:
        self._buffers.fill(inputs)
        if self._chooser is not None and settings is not self._settings:
            self._chooser.set(settings)
            self._settings = settings
        num_tokens = len(inputs.ids_T)
        self._replay(num_tokens)
        host_T, is_copied = self._results[0]
        self._results.reverse()
        tokens = CapturedTokens(self, self._buffers.inputs.ids_T[:num_tokens], host_T[:num_tokens], is_copied)
        if settings is not None and settings.is_constrained:
            tokens.is_chosen = False
        else:
            self._copy_chosen(tokens)
        return tokens

    def choose(self, bits_SB: Bits, tokens: CapturedTokens) -> None:
        """Choose the tokens of the step that was started last from those that the masks allow."""
        assert self._chooser is not None
        assert self._masked_graph is not None
        self._chooser.set_masks(bits_SB)
        self._masked_graph.replay()
        self._copy_chosen(tokens)

    def _copy_chosen(self, tokens: CapturedTokens) -> None:
        chosen_T = self._chosen_T if self._chooser is None else self._chooser.chosen_T
        tokens.host_S.copy_(chosen_T[: len(tokens.host_S)], non_blocking=True)
        tokens.is_copied.record()


class InputBuffers:
    """The inputs of a step at fixed addresses. One copy fills all but the block tables, which change rarely."""

    NUMBERS = (
        *("ids_T", "positions_T", "slots_T", "context_lens_S"),
        *("state_slots_S", "state_ends_T", "adapters_T"),
    )

    def __init__(self, example: StepInputs) -> None:
        device = example.ids_T.device
        is_on_gpu = device.type == "cuda"
        names = [name for name in self.NUMBERS if getattr(example, name) is not None]
        sizes = [len(getattr(example, name)) for name in names]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._views = dict(zip(names, torch.split(self._numbers, sizes), strict=True))
        self._tables = torch.zeros_like(example.block_tables_SB)
        # Pinned memory, from which the GPU copies asynchronously.
        self._host_numbers = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_on_gpu)
        host_views = (view.numpy() for view in torch.split(self._host_numbers, sizes))
        self._host_views = dict(zip(names, host_views, strict=True))
        self._host_tables = torch.zeros(self._tables.shape, dtype=torch.int64, pin_memory=is_on_gpu)
        self._copied: Any = torch.cuda.Event() if is_on_gpu else None  # type: ignore[no-untyped-call]
        self.inputs = StepInputs(
            **self._views,  # type: ignore[arg-type]
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
        # The ids may be in place: a step writes its tokens where the next step reads them.
        first = 0 if inputs.ids_T.is_cpu else len(self._views["ids_T"])
        self._numbers[first:].copy_(self._host_numbers[first:], non_blocking=True)
        for buffer, given in on_device:
            if given.data_ptr() != buffer.data_ptr():
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
