"""CudaBackend: runs eagerly until CUDA graphs of a faster step can be captured, then replays those.

The captured step is the Triton kernels', which also compute prompts, for a network that they know, else what Inductor
compiles.
Steps are compiled in the background and captured between two steps by the thread that runs them. There is a graph for
each of a few batch sizes; other batches are padded to the next size.

Shapes: T tokens of the step · N rows of them · S sequences · J further tokens of each · V vocabulary
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.backends import inductor
from flambeau.llm.backends.cuda import prompt_graphs
from flambeau.llm.backends.cuda.comparison import MAX_DIFFERENCE, difference, find_difference
from flambeau.llm.backends.cuda.graphs import (
    COMPILING,
    SIZES,
    CapturedStep,
    GraphCapture,
    InputBuffers,
    SideStream,
    TokenChooser,
    size_for,
)
from flambeau.llm.backends.cuda.parts import compared_parts, unknown_parts
from flambeau.llm.backends.cuda.prompt_graphs import CapturedPrompts
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.backend import PLAIN_PYTORCH, UNKNOWN_PARTS, AsyncDecoder, Greedy, StartedTokens
from flambeau.llm.executor.background_compiler import BackgroundCompiler, Decode, summary
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.attention import Attend
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.sampling.logits_processors import argmax_tokens
from flambeau.llm.sampling.row_groups import RowSettings

if TYPE_CHECKING:
    from flambeau.llm.backends.cuda.network import CudaNetwork

log = logging.getLogger(__name__)

KERNELS = "kernels"
WRONG_KERNELS = "%s: the GPU kernels are not used, Inductor is, as they are wrong here: %s. Please report this"
PROMPT_LENGTHS = (1, 16, 32, 64, 96)  # each of these compiles different kernels
EXPERT_LENGTHS = (128, 256, 512, 1024, 2048)  # these too, if there are experts


class CudaBackend:
    """Decode steps by the graphs captured so far; every other step by EagerBackend."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_seqs: int = 64,
        max_blocks: int = 1,
        name: str = "the model",
        adapters: AdapterStore | None = None,
        states: HiddenStates | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.device = cache.keys[0].device
        self.decode_path = PLAIN_PYTORCH
        self._name = name  # in log lines
        self._has_adapters = adapters is not None
        self._states = states
        self._eager = EagerBackend(model, cache, adapters=adapters, states=states)
        self._compiler = BackgroundCompiler[Decode]()
        self._max_blocks = max_blocks
        self._max_size = size_for(max_num_seqs) or SIZES[-1]
        self._network: CudaNetwork | None = None
        self._captured: dict[tuple[int, int], CapturedStep] = {}  # (query_len, batch size) → graph
        self._captured_prompts: dict[int, CapturedPrompts] = {}  # number of tokens → graph
        self._graphs = GraphCapture()
        self._side_stream = SideStream(self.device)
        self._samples_in_graph = True
        self._compiler.find(KERNELS, self._build_kernels)

    @property
    def greedy(self) -> Greedy:
        return self

    @property
    def async_decoder(self) -> AsyncDecoder:
        return self

    @torch.inference_mode()
    def start(self, inputs: StepInputs, settings: RowSettings | None) -> StartedTokens | None:
        with torch.cuda.device(self.device):
            graph = self._find(inputs)
            return None if graph is None else graph.start(inputs, settings)

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        with torch.cuda.device(self.device):
            graph = self._find(inputs)
            return self._eager.decode(inputs) if graph is None else graph.run(inputs)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        network = None if self._needs_eager(inputs) else self._network
        with torch.cuda.device(self.device):
            if network is None:
                return self._eager.prefill(inputs, rows_N)
            graph = self._find_prompts(network, inputs, rows_N)
            if graph is None:
                return network.prefill(inputs, rows_N)
            return graph.run(inputs, rows_N, network.tiles(inputs))

    @torch.inference_mode()
    def argmax(self, inputs: StepInputs) -> Tensor:
        with torch.cuda.device(self.device):
            graph = self._find(inputs)
            return argmax_tokens(self._eager.decode(inputs)).cpu() if graph is None else graph.argmax(inputs)

    def argmax_steps(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        num_sequences = len(first.context_lens_S)
        starts = torch.arange(num_sequences + 1)
        found = [self.argmax(first).view(num_sequences, -1)[:, -1].clamp_(min=0)]
        for positions_S, slots_S in zip(positions_JS, slots_JS, strict=True):
            places = positions_S, slots_S, starts, positions_S + 1, first.block_tables_SB
            found.append(self.argmax(StepInputs(found[-1], *places, query_len=1)).clamp_(min=0))
        return torch.stack(found)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return self._compiler.wait(timeout_s)

    def close(self) -> None:
        self._compiler.close()

    def _needs_eager(self, inputs: StepInputs) -> bool:
        """Whether tokens have adapters, which only plain PyTorch adds, or there are images."""
        return inputs.images is not None or (self._has_adapters and inputs.adapters_T is not None)

    def _find(self, inputs: StepInputs) -> CapturedStep | None:
        """The graph for such a step; captured here if its step was compiled since the last call."""
        if self._needs_eager(inputs):
            return None
        size = size_for(inputs.context_lens_S.shape[0])
        if size is None or size > self._max_size or inputs.block_tables_SB.shape[1] > self._max_blocks:
            return None
        key = (inputs.query_len, size)
        graph = self._captured.get(key)
        if graph is None and key not in self._graphs.failed:
            step = self._compiler.find(key, lambda: self._compile(*key))
            graph = None if step is None else self._capture(key, step)
        if graph is None:  # use a larger one meanwhile
            graph = self._captured.get((inputs.query_len, min(self._sizes_of(inputs.query_len, size), default=0)))
        return graph

    def _find_prompts(self, network: CudaNetwork, inputs: StepInputs, rows_N: Tensor) -> CapturedPrompts | None:
        """The graph for such prompts, captured here if it is the first of its size; None if there is none."""
        size = prompt_graphs.size_for(inputs, rows_N)
        if size is None or size in self._graphs.failed or inputs.block_tables_SB.shape[1] > self._max_blocks:
            return None
        if size not in self._captured_prompts:
            num_tiles = network.max_tiles(size, prompt_graphs.MAX_SEQUENCES)
            captured = self._graphs.capture(
                size,
                f"prompts of {size} tokens",
                lambda pool: CapturedPrompts(
                    network.run, size, num_tiles, self._max_blocks, self.device, pool, self._states
                ),
            )
            if captured is not None:
                self._captured_prompts[size] = captured
        return self._captured_prompts.get(size)

    def _capture(self, key: tuple[int, int], step: Decode) -> CapturedStep | None:
        captured = self._graphs.capture(
            key,
            f"steps of {key[1]} sequences",
            lambda pool: CapturedStep(step, self._dummy_inputs(*key), pool, self._chooser(*key), self._states),
        )
        if captured is not None:
            self._captured[key] = captured
            self._switch()
        return captured

    def _sizes_of(self, query_len: int, min_size: int) -> list[int]:
        """The batch sizes of captured graphs with this query length."""
        return [size for length, size in self._captured if length == query_len and size >= min_size]

    def _switch(self) -> None:
        """Log the new decode path once; other shapes of a step follow as they are captured."""
        if self.decode_path == PLAIN_PYTORCH:
            self.decode_path = f"CUDA graphs of {'Inductor' if self._network is None else 'GPU kernels'}"
            log.info("%s: decoding runs on %s", self._name, self.decode_path)

    # ---- in the background thread ----

    def _build_kernels(self) -> Decode:
        """Compile the Triton kernels; if this GPU cannot use them, Inductor is used."""
        inductor.use_persistent_cache()
        try:
            # Triton may not be installed.
            from flambeau.llm.backends.cuda.network import CudaNetwork, can_compute

            if can_compute(self.model, self.cache):
                with torch.inference_mode(), self._on_side_stream():
                    self._network = self._build_network(CudaNetwork)
            elif parts := unknown_parts(self.model.arch):
                log.info(UNKNOWN_PARTS, self._name, "GPU", ", ".join(parts))
        except ImportError as error:
            log.warning("decoding is slower without Triton: pip install triton (%s)", error)
        except Exception as error:
            log.warning("the GPU kernels cannot be used here, Inductor is used: %s", summary(error))
            log.debug("the GPU kernels failed", exc_info=True)
        self._check_sampling()
        return self._eager.decode

    def _build_network(self, build: Callable[..., CudaNetwork]) -> CudaNetwork | None:
        """The network for the kernels, all of them compiled; None if they differ from plain PyTorch."""
        if (reason := self._find_difference(build)) is not None:
            log.warning(WRONG_KERNELS, self._name, reason)
            return None
        network = build(self.model, self.cache, self._states)
        for length in PROMPT_LENGTHS + (EXPERT_LENGTHS if self.model.arch.num_experts else ()):
            prompt = inductor.dummy_inputs(1, length, self._max_blocks, torch.device("cpu"))
            network.prefill(prompt, torch.zeros(length, dtype=torch.int64))
        return network

    def _find_difference(self, build: Callable[..., CudaNetwork]) -> str | None:
        """What the kernels do differently from plain PyTorch, if the network has parts that need a comparison."""
        parts = compared_parts(self.model.arch)
        if not parts:
            return None
        # A step of a long sequence may replace the tables of longrope meanwhile: its network has a second chance.
        for _ in range(1 if self.model.arch.switch_length is None else 2):
            reason = find_difference(self.model, self.cache, lambda cache: build(self.model, cache))
            if reason is None:
                return None
        return f"{reason}; parts beyond Llama's: {', '.join(parts)}"

    @torch.inference_mode()
    def _check_sampling(self) -> None:
        """Compare the sampling kernels with the sampler; if they differ, tokens are chosen outside of the graphs."""
        if self._chooser(1, 1) is None:
            return
        from flambeau.llm.backends.cuda.sampling_kernel import is_exact

        try:
            with self._on_side_stream(), COMPILING:
                self._samples_in_graph = is_exact(self.model.arch.vocab_size, self.device)
            reason = "its tokens are not those of the sampler"
        except Exception as error:
            self._samples_in_graph, reason = False, summary(error)
            log.debug("the sampling kernels failed", exc_info=True)
        if not self._samples_in_graph:
            log.warning("sampling cannot be a part of the CUDA graphs here, steps are slower: %s", reason)

    @torch.inference_mode()
    def _compile(self, query_len: int, size: int) -> Decode:
        """The step to capture, run once so that everything it needs is compiled."""
        with self._on_side_stream():
            buffers = InputBuffers(self._dummy_inputs(query_len, size))  # kernels depend on the alignment
            buffers.fill(self._dummy_inputs(query_len, size))
            example = buffers.inputs
            if (chooser := self._chooser(query_len, size)) is not None:
                logits_TV = torch.zeros(size, self.model.arch.vocab_size, device=self.device)
                chooser.run(logits_TV, example.positions_T, example.ids_T)
                chooser.run_masked(logits_TV, example.positions_T, example.ids_T)
            if self._network is None:
                with COMPILING:
                    return inductor.compile_step(
                        self.model, self.cache, query_len, triton_attention, example, self._states
                    )
            expected = self._network.run(example)
            one_row = self._build_one_row(example, expected) if len(example.ids_T) == 1 else None
            return one_row or self._network.run

    def _build_one_row(self, example: StepInputs, expected: Tensor) -> Decode | None:
        """A step of one sequence by its own kernels; None if they are not faster here, or wrong."""
        from flambeau.llm.backends.cuda import one_row_step, persistent_step

        if self._states is not None:  # they keep hidden states to themselves
            return None
        kinds: list[tuple[Any, Any]] = [
            (one_row_step.is_faster, one_row_step.OneRowStep),
            (persistent_step.is_faster, persistent_step.PersistentStep),
        ]
        build = next((build for is_faster, build in kinds if is_faster(self.model, self.cache)), None)
        if build is None:
            return None
        try:
            with COMPILING:
                step = build(self.model, self.cache)
                off = difference(step.run(example), expected)
            if off <= MAX_DIFFERENCE:
                run: Decode = step.run
                return run
            reason = f"its logits are off by {off:.0%}"
        except Exception as error:
            reason = summary(error)
            log.debug("the kernels for one sequence failed", exc_info=True)
        log.warning("the kernels for one sequence cannot be used here, its steps are slower: %s", reason)
        return None

    def _chooser(self, query_len: int, size: int) -> TokenChooser | None:
        """Sampling for a captured step; None if several places of a sequence are verified, or without Triton."""
        if query_len > 1 or self.device.type != "cuda" or not self._samples_in_graph:
            return None
        try:
            from flambeau.llm.backends.cuda.sampling_kernel import TokenChoice  # Triton may not be installed
        except ImportError:
            return None
        return TokenChoice(size, self.model.arch.vocab_size, self.device)

    def _on_side_stream(self) -> AbstractContextManager[None]:
        return self._side_stream.running()

    def _dummy_inputs(self, query_len: int, size: int) -> StepInputs:
        has_states = self.cache.states.has_layers
        return inductor.dummy_inputs(size, query_len, self._max_blocks, self.device, has_states=has_states)


def triton_attention(cache: KVCache, inputs: StepInputs) -> Attend:
    from flambeau.llm.backends.cuda.attention import TritonAttention  # Triton may not be installed

    return TritonAttention(cache, inputs)
