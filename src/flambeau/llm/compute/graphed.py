"""GraphedForward: steps on a GPU, operation by operation at first, and as CUDA graphs as soon as those can be captured.

What is captured: the kernels' whole step for a dense network, which also computes prompts, else what Inductor makes of
the network. It is made beside the steps, and captured between two of them by the thread that runs the steps. There is a
graph for each of a few numbers of sequences; others are filled up to the next.

Shapes: T tokens of the step · N rows of them · S sequences · Q tokens of each · B blocks of the longest one · J tokens
of each that follow the step · V vocabulary
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flambeau.llm.compute.forward import EagerForward, Greedy
from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.compute.workshop import Decode, Workshop, summary
from flambeau.llm.kernels import inductor
from flambeau.llm.kernels.gpu.graphs import SIZES, Buffers, Graph, size_for
from flambeau.llm.models.transformer import Attend, Transformer
from flambeau.llm.sampling.sampler import chosen

if TYPE_CHECKING:
    from flambeau.llm.kernels.gpu.network import GpuNetwork

log = logging.getLogger(__name__)

KERNELS = "kernels"
COMPILING = threading.Lock()  # of the whole process: Inductor waits for the device, which must not be captured then
PROMPT_LENGTHS = (1, 16, 32, 64, 96)  # those for which the kernels are not the same


class GraphedForward:
    """Decode steps of what the workshop has made so far, and every other step as EagerForward computes it."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_seqs: int = 64,
        max_blocks: int = 1,
        name: str = "the model",
    ) -> None:
        self.model, self._cache = model, cache
        self.device = cache.keys[0].device
        self.quicker = ""  # what computes decode steps, where it is no longer PyTorch, operation by operation
        self._name = name  # in logs
        self._eager = EagerForward(model, cache)
        self._workshop = Workshop()
        self._max_blocks = max_blocks
        self._largest = size_for(max_num_seqs) or SIZES[-1]
        self._network: GpuNetwork | None = None
        self._captured: dict[tuple[int, int], Graph] = {}
        self._refused: set[tuple[int, int]] = set()  # could not be captured
        self._pool: Any = None  # of memory, which the graphs share
        self._side: Any = None  # the workshop's stream
        self._workshop.find(KERNELS, self._make_network)

    @property
    def greedy(self) -> Greedy:
        """Itself."""
        return self

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of every token, where each sequence has `inputs.query_len` of them."""
        with torch.cuda.device(self.device):
            graph = self._find(inputs)
            return self._eager.decode(inputs) if graph is None else graph.run(inputs)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of these tokens of a step whose sequences have any number of them."""
        forward = self._network or self._eager
        with torch.cuda.device(self.device):
            return forward.prefill(inputs, rows_N)

    @torch.inference_mode()
    def choose(self, inputs: StepInputs) -> Tensor:
        """The likeliest token after each [T], the first of equal ones; -1 where its logits are no numbers."""
        with torch.cuda.device(self.device):
            graph = self._find(inputs)
            return chosen(self._eager.decode(inputs)).cpu() if graph is None else graph.choose(inputs)

    def go_ahead(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        """The likeliest token after each sequence, the likeliest after that one, and so on: [J + 1, S]."""
        num_sequences = len(first.context_lens_S)
        starts = torch.arange(num_sequences + 1)
        found = [self.choose(first).view(num_sequences, -1)[:, -1].clamp_(min=0)]
        for positions_S, slots_S in zip(positions_JS, slots_JS, strict=True):
            where = positions_S, slots_S, starts, positions_S + 1, first.block_tables_SB
            found.append(self.choose(StepInputs(found[-1], *where, query_len=1)).clamp_(min=0))
        return torch.stack(found)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """Wait for what steps have asked for so far: for measuring, and for tests."""
        return self._workshop.wait(timeout_s)

    def close(self) -> None:
        """Compile nothing more."""
        self._workshop.close()

    def _find(self, inputs: StepInputs) -> Graph | None:
        """The graph for such a step; captured here if it has been made since the last one."""
        size = size_for(inputs.context_lens_S.shape[0])
        if size is None or size > self._largest or inputs.block_tables_SB.shape[1] > self._max_blocks:
            return None
        key = (inputs.query_len, size)
        graph = self._captured.get(key)
        if graph is None and key not in self._refused:
            made = self._workshop.find(key, lambda: self._make(*key))
            graph = None if made is None else self._capture(key, made)
        if graph is None:  # a larger one will do meanwhile
            graph = self._captured.get((inputs.query_len, min(self._sizes_of(inputs.query_len, size), default=0)))
        return graph

    def _capture(self, key: tuple[int, int], step: Decode) -> Graph | None:
        """Make a graph of a step, between two steps; None: not now, or not at all."""
        if not COMPILING.acquire(blocking=False):
            return None
        stream = torch.cuda.current_stream()
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._captured[key] = Graph(step, self._trash(*key), self._pool)
        except RuntimeError as error:  # there is no memory for it, say
            torch.cuda.set_stream(stream)  # a capture that fails may leave its own behind
            self._refused.add(key)
            log.warning("steps of %d sequences are not captured, and slower for it: %s", key[1], summary(error))
            return None
        finally:
            COMPILING.release()
        self._tell()
        return self._captured[key]

    def _sizes_of(self, query_len: int, least: int) -> list[int]:
        """The sizes of the graphs for steps of so many tokens each that hold so many sequences."""
        return [size for length, size in self._captured if length == query_len and size >= least]

    def _tell(self) -> None:
        """Say once what decodes from now on; other shapes of a step follow as they are asked for."""
        if not self.quicker:
            self.quicker = f"CUDA graphs of {'Inductor' if self._network is None else 'GPU kernels'}"
            log.info("%s is decoded by %s from now on", self._name, self.quicker)

    # ---- in the workshop ----

    def _make_network(self) -> Decode:
        """The kernels, compiled; where this GPU has no use for them, Inductor has to do."""
        inductor.keep_compiled_code()
        try:
            from flambeau.llm.kernels.gpu.network import GpuNetwork, can_compute  # not every machine has Triton

            if can_compute(self.model, self._cache):
                network = GpuNetwork(self.model, self._cache)
                with torch.inference_mode(), self._beside():
                    for length in PROMPT_LENGTHS:
                        prompt = inductor.trash_inputs(1, length, self._max_blocks, torch.device("cpu"))
                        network.prefill(prompt, torch.zeros(length, dtype=torch.int64))
                self._network = network
        except ImportError as error:
            log.warning("decoding is slower without Triton: pip install triton (%s)", error)
        except Exception as error:
            log.warning("the GPU kernels cannot be used here, Inductor is: %s", summary(error))
            log.debug("the GPU kernels failed", exc_info=True)
        return self._eager.decode

    @torch.inference_mode()
    def _make(self, query_len: int, size: int) -> Decode:
        """What to capture, run once: whatever is compiled at the first call is compiled here."""
        with self._beside():
            example = Buffers(self._trash(query_len, size)).inputs  # as it will be: kernels look at addresses
            if self._network is None:
                with COMPILING:
                    return inductor.compile_step(self.model, self._cache, query_len, attention_on_gpu, example)
            self._network.run(example)
            return self._network.run

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a stream of its own, whose work is done at the end."""
        self._side = self._side or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            yield
            self._side.synchronize()

    def _trash(self, query_len: int, size: int) -> StepInputs:
        return inductor.trash_inputs(size, query_len, self._max_blocks, self.device)


def attention_on_gpu(cache: KVCache, inputs: StepInputs) -> Attend:
    """The Triton kernel."""
    from flambeau.llm.kernels.gpu.attention import TritonAttention

    return TritonAttention(cache, inputs)
