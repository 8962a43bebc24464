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
from dataclasses import replace
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
from flambeau.llm.backends.cuda.lora_steps import LoraSteps, WithAdapter
from flambeau.llm.backends.cuda.parts import compared_parts, compared_weights, unknown_parts
from flambeau.llm.backends.cuda.prompt_graphs import CapturedPrompts
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.backend import PLAIN_PYTORCH, UNKNOWN_PARTS, AsyncDecoder, Greedy, StartedTokens
from flambeau.llm.executor.background_compiler import BackgroundCompiler, Decode, summary
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.executor.part_words import part_words
from flambeau.llm.models.attention import Attend
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.sampling.logits_processors import argmax_tokens
from flambeau.llm.sampling.row_groups import RowSettings

if TYPE_CHECKING:
    from flambeau.llm.backends.cuda.lora_network import LoraNetwork
    from flambeau.llm.backends.cuda.network import CudaNetwork

log = logging.getLogger(__name__)

KERNELS = "kernels"
WRONG_KERNELS = "%s: the GPU kernels are not used, Inductor is, as they are wrong here: %s. Please report this"
PROMPT_LENGTHS = (1, 8, 16, 32, 64, 96, 128, 192)  # each of these compiles different kernels
EXPERT_LENGTHS = (256, 512, 1024, 2048)  # these too, if there are experts


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
        self._adapters = adapters
        self._lora = None if adapters is None else LoraSteps(adapters, model, self.device)
        self._lora_networks: dict[int, LoraNetwork] = {}  # by generation of the slots
        self._states = states
        self._eager = EagerBackend(model, cache, adapters=adapters, states=states)
        self._compiler = BackgroundCompiler[Decode]()
        self._max_blocks = max_blocks
        self._max_size = size_for(max_num_seqs) or SIZES[-1]
        self._network: CudaNetwork | None = None
        # (query_len, batch size) → graph; with adapters, (query_len, batch size, generation of their slots)
        self._captured: dict[tuple[int, ...], CapturedStep] = {}
        self._captured_prompts: dict[tuple[int, ...], CapturedPrompts] = {}  # (number of tokens, generation if any)
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
            graph, given = self._find(inputs)
            return None if graph is None else graph.start(given, settings)

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        with torch.cuda.device(self.device):
            graph, given = self._find(inputs)
            return self._eager.decode(inputs) if graph is None else graph.run(given)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        with torch.cuda.device(self.device):
            given, generations = self._placed(inputs)
            if given is None or self._network is None:
                return self._eager.prefill(inputs, rows_N)
            network = self._lora_networks[generations[0]] if generations else self._network
            graph = self._find_prompts(network, given, rows_N, generations)
            if graph is None:
                return network.prefill(given, rows_N)
            return graph.run(given, rows_N, network.tiles(given))

    @torch.inference_mode()
    def argmax(self, inputs: StepInputs) -> Tensor:
        with torch.cuda.device(self.device):
            graph, given = self._find(inputs)
            return argmax_tokens(self._eager.decode(inputs)).cpu() if graph is None else graph.argmax(given)

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

    def _placed(self, inputs: StepInputs) -> tuple[StepInputs | None, tuple[int, ...]]:
        """The inputs for the kernels, with places in slots as adapters, and the generation of these slots, if any.

        None: plain PyTorch computes the step: it has files, or adapters that the kernels cannot add, or not yet.
        """
        if inputs.media is not None:
            return None, ()
        if inputs.state_ends_T is not None and inputs.query_len == 1:
            return None, ()  # a draft's, whose states go from slot to slot: not what is captured for one token
        if self._lora is None or inputs.adapters_T is None:
            return inputs, ()
        places_T = None if self._network is None else self._lora.place(inputs.adapters_T)
        if places_T is None:
            return None, ()
        generation = self._lora.generation
        if generation not in self._lora_networks:
            self._forget_slots_before(generation)
            self._compiler.find(("adapters", generation), self._lora_builder(generation))
            return None, ()
        return replace(inputs, adapters_T=places_T), (generation,)

    def _forget_slots_before(self, generation: int) -> None:
        """Free what was captured with fewer or smaller slots."""
        self._captured = {key: graph for key, graph in self._captured.items() if key[2:] in ((), (generation,))}
        prompts = self._captured_prompts.items()
        self._captured_prompts = {key: graph for key, graph in prompts if key[1:] in ((), (generation,))}
        for old in [old for old in [*self._lora_networks] if old < generation]:
            del self._lora_networks[old]

    def _find(self, inputs: StepInputs) -> tuple[CapturedStep | None, StepInputs]:
        """The graph for such a step, and its inputs; captured here if its step was compiled since the last call."""
        given, generations = self._placed(inputs)
        if given is None:
            return None, inputs
        size = size_for(inputs.context_lens_S.shape[0])
        if size is None or size > self._max_size or inputs.block_tables_SB.shape[1] > self._max_blocks:
            return None, inputs
        key = (inputs.query_len, size, *generations)
        graph = self._captured.get(key)
        if graph is None and key not in self._graphs.failed:
            step = self._compiler.find(key, lambda: self._compile(*key))
            graph = None if step is None else self._capture(key, step)
        if graph is None:  # use a larger one meanwhile
            larger = min(self._sizes_of(inputs.query_len, size, generations), default=0)
            graph = self._captured.get((inputs.query_len, larger, *generations))
        return graph, given

    def _find_prompts(
        self, network: CudaNetwork, inputs: StepInputs, rows_N: Tensor, generations: tuple[int, ...]
    ) -> CapturedPrompts | None:
        """The graph for such prompts, captured here if it is the first of its size; None if there is none."""
        size = prompt_graphs.size_for(inputs, rows_N)
        if size is None or inputs.block_tables_SB.shape[1] > self._max_blocks:
            return None
        key = (size, *generations)
        if ("prompts", *key) in self._graphs.failed:
            return None
        if key not in self._captured_prompts:
            num_tiles = network.max_tiles(size, prompt_graphs.MAX_SEQUENCES)
            captured = self._graphs.capture(
                ("prompts", *key),
                f"prompts of {size} tokens",
                lambda pool: CapturedPrompts(
                    network.run,
                    size,
                    num_tiles,
                    self._max_blocks,
                    self.device,
                    pool,
                    self._states,
                    has_adapters=bool(generations),
                    has_states=self.cache.states.has_layers,
                ),
            )
            if captured is not None:
                self._captured_prompts[key] = captured
        return self._captured_prompts.get(key)

    def _capture(self, key: tuple[int, ...], step: Decode) -> CapturedStep | None:
        captured = self._graphs.capture(
            key,
            f"steps of {key[1]} sequences",
            lambda pool: CapturedStep(step, self._dummy_inputs(*key), pool, self._chooser(*key[:2]), self._states),
        )
        if captured is not None:
            self._captured[key] = captured
            self._switch()
        return captured

    def _sizes_of(self, query_len: int, min_size: int, generations: tuple[int, ...] = ()) -> list[int]:
        """The batch sizes of captured graphs with this query length, of these slots or without adapters."""
        keys = [key for key in self._captured if key[0] == query_len and key[2:] == generations]
        return [key[1] for key in keys if key[1] >= min_size]

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
            from flambeau.llm.backends.cuda.network import CudaNetwork
            from flambeau.llm.backends.cuda.supported_networks import can_compute

            if can_compute(self.model, self.cache):
                with torch.inference_mode(), self._on_side_stream():
                    self._network = self._build_network(CudaNetwork)
            elif parts := unknown_parts(self.model.arch):
                log.info(UNKNOWN_PARTS, self._name, "GPU", part_words(parts))
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
            has_states = self.cache.states.has_layers
            prompt = inductor.dummy_inputs(1, length, self._max_blocks, torch.device("cpu"), has_states=has_states)
            prompt.query_len = 0  # as prompts have it
            network.prefill(prompt, torch.zeros(length, dtype=torch.int64))
        return network

    def _find_difference(self, build: Callable[..., CudaNetwork]) -> str | None:
        """What the kernels do differently from plain PyTorch, if the network has parts that need a comparison."""
        parts = compared_parts(self.model.arch) + compared_weights(self.model)
        if not parts:
            return None
        # A step of a long sequence may replace the tables of longrope meanwhile: its network has a second chance.
        for _ in range(1 if self.model.arch.switch_length is None else 2):
            reason = find_difference(self.model, self.cache, lambda cache: build(self.model, cache))
            if reason is None:
                return None
        return f"{reason}; parts beyond Llama's: {', '.join(parts)}"

    def _lora_builder(self, generation: int) -> Callable[[], Decode]:
        """For the background thread: the network for these slots, if its kernels are right."""
        lora = self._lora
        assert lora is not None
        assert self._adapters is not None
        slots, store, held = lora.slots, self._adapters.snapshot(), lora.holdable()
        assert slots is not None

        def build() -> Decode:
            reason: str | None
            try:
                from flambeau.llm.backends.cuda.lora_check import find_error
                from flambeau.llm.backends.cuda.lora_network import LoraNetwork

                number, place = next(iter(held)), 1
                with torch.inference_mode(), self._on_side_stream():
                    own = slots.alone(held[number], number)  # steps may give its slot to another adapter meanwhile
                    reason = find_error(slots, self.model) or find_difference(
                        self.model,
                        self.cache,
                        lambda cache: WithAdapter(LoraNetwork(self.model, cache, own), place),
                        lambda cache: WithAdapter(EagerBackend(self.model, cache, adapters=store), number),
                    )
                    if reason is None:
                        network = LoraNetwork(self.model, self.cache, slots, self._states)
                        for length in PROMPT_LENGTHS:
                            prompt = inductor.dummy_inputs(1, length, self._max_blocks, torch.device("cpu"))
                            prompt = replace(prompt, adapters_T=torch.full((length,), place))
                            network.prefill(prompt, torch.zeros(length, dtype=torch.int64))
                        if generation == lora.generation:  # else it would keep the memory of slots that were replaced
                            self._lora_networks[generation] = network
            except Exception as error:
                reason = summary(error)
                log.debug("the kernels for adapters failed", exc_info=True)
            if reason is not None:
                log.warning("%s: the kernels for adapters are not used, their steps are slower: %s", self._name, reason)
            return self._eager.decode

        return build

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
    def _compile(self, query_len: int, size: int, generation: int = 0) -> Decode:
        """The step to capture, run once so that everything it needs is compiled."""
        with self._on_side_stream():
            dummy = self._dummy_inputs(query_len, size, generation)
            buffers = InputBuffers(dummy)  # kernels depend on the alignment
            buffers.fill(dummy)
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
            if generation:
                self._lora_networks[generation].run(example)
                return self._lora_networks[generation].run
            expected = self._network.run(example)
            one_row = self._build_one_row(example, expected) if len(example.ids_T) == 1 else None
            return one_row or self._network.run

    def _build_one_row(self, example: StepInputs, expected: Tensor) -> Decode | None:
        """A step of one sequence by its own kernels; None if they are not faster here, or wrong."""
        from flambeau.llm.backends.cuda import one_row_step, persistent_step

        if self._states is not None or self.cache.states.has_layers:  # they keep hidden states to themselves
            return None
        if isinstance(
            self.model.model.embed_tokens, RowEmbedding
        ):  # they would keep a copy in 16 bits of all embeddings
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

    def _dummy_inputs(self, query_len: int, size: int, generation: int = 0) -> StepInputs:
        has_states = self.cache.states.has_layers
        inputs = inductor.dummy_inputs(size, query_len, self._max_blocks, self.device, has_states=has_states)
        return replace(inputs, adapters_T=torch.zeros_like(inputs.ids_T)) if generation else inputs


def triton_attention(cache: KVCache, inputs: StepInputs) -> Attend:
    from flambeau.llm.backends.cuda.attention import TritonAttention  # Triton may not be installed

    return TritonAttention(cache, inputs)
