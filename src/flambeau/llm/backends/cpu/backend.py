"""CpuBackend: runs eagerly until a faster decode path is ready, then switches between two steps.

The faster path is the whole step of the C++ kernels for a network that they know, else what Inductor compiles.

Shapes: T tokens of the step · N rows of them · V vocabulary
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.backends import inductor
from flambeau.llm.backends.cpu.attention import choose_attention
from flambeau.llm.backends.cpu.bindings import kernels
from flambeau.llm.backends.cpu.network import (
    QUANTIZED_LAYERS,
    CpuNetwork,
    can_compute,
    can_pack_float32,
    has_layers,
    quantize_last_layer,
    unknown_heads,
    unknown_parts,
)
from flambeau.llm.backends.cpu.packed_experts import pack_experts
from flambeau.llm.backends.cpu.packed_linear import PackedLinear, forget_plain_layers, pack_layers
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.backend import (
    CPU_KERNELS,
    PLAIN_PYTORCH,
    UNKNOWN_PARTS,
    UNTIL_INDUCTOR,
    AsyncDecoder,
    Greedy,
)
from flambeau.llm.executor.background_compiler import BackgroundCompiler, Decode
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.executor.part_words import part_words
from flambeau.llm.mapped_files import release_weight_files, trim_heap
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import ExpertStack

log = logging.getLogger(__name__)

# Inductor takes half a minute of a CPU that also serves: only shapes that run for long are compiled.
STEPS_BEFORE_COMPILING = 500


class CpuBackend:
    """Decode steps by what is compiled so far; every other step by EagerBackend."""

    async_decoder: AsyncDecoder | None = None

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        steps_before_compiling: int = STEPS_BEFORE_COMPILING,
        name: str = "the model",
        adapters: AdapterStore | None = None,
        states: HiddenStates | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.device = cache.keys[0].device
        self.decode_path = PLAIN_PYTORCH
        self._name = name  # in log lines
        self._adapters, self._states = adapters, states
        self._eager = EagerBackend(model, cache, choose_attention, adapters=adapters, states=states)
        self._compiler = BackgroundCompiler[Decode]()
        self._steps_before_compiling = steps_before_compiling  # per shape
        self._num_eager: Counter[Hashable] = Counter()
        self._network: CpuNetwork | None = None
        self._has_kernels = can_compute(model, cache)
        is_packed = has_layers(model, (PackedLinear,)) and not has_layers(model, (ExpertStack,))
        if self._has_kernels and kernels.library is not None and is_packed:
            self._make_network()  # quickly: all layers but the last are packed
        elif self._has_kernels:
            self._compiler.find("kernels", self._build_kernels)
        else:
            if parts := [*unknown_parts(model.arch), *unknown_heads(model.arch)]:
                log.info(UNKNOWN_PARTS, name, "CPU", part_words(parts))
            self.decode_path = UNTIL_INDUCTOR
            if has_layers(model, QUANTIZED_LAYERS):
                self._compiler.find("layers", self._build_layers)

    @property
    def greedy(self) -> Greedy | None:
        return self._network

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        if self._network is not None:
            return self._network.run(inputs)
        compiled = self._find(inputs)
        if compiled is None:
            return self._eager.decode(inputs)
        if self.decode_path == UNTIL_INDUCTOR:
            self._switch_to("Inductor")
        return compiled(inputs)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        if self._network is not None and inputs.media is None:  # of which the kernels know nothing
            return self._network.run(inputs, rows_N)
        return self._eager.prefill(inputs, rows_N)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return self._compiler.wait(timeout_s)

    def close(self) -> None:
        self._compiler.close()

    def _find(self, inputs: StepInputs) -> Decode | None:
        if inputs.state_ends_T is not None and inputs.query_len == 1:
            return None  # a draft's, whose states go from slot to slot
        if self._has_kernels or inputs.adapters_T is not None:
            return None  # they are being built, or cannot be built here; adapters are added in plain PyTorch
        # Inductor compiles one sequence as a shape of its own; all other numbers share one.
        number = min(inputs.context_lens_S.shape[0], 2)
        key = (inputs.query_len, number)
        self._num_eager[key] += 1
        if self._num_eager[key] <= self._steps_before_compiling:
            return None
        return self._compiler.find(key, lambda: self._compile_with_inductor(inputs.query_len, number))

    def _switch_to(self, path: str) -> None:
        """Log the new decode path once; other shapes of a step follow as they are compiled."""
        self.decode_path = path
        log.info("%s: decoding runs on %s", self._name, path)

    # ---- in the background thread ----

    def _build_kernels(self) -> Decode:
        decode = self._make_network()
        if self._network is not None:
            self._switch_to(CPU_KERNELS)
        return decode

    def _make_network(self) -> Decode:
        if not kernels.load():
            forget_plain_layers(self.model)
            return self._eager.decode
        packs_float32 = can_pack_float32(self.model)
        quantize_last_layer(self.model)  # before it is packed as it is
        pack_layers(self.model, (nn.Linear, *QUANTIZED_LAYERS), packs_float32=packs_float32)
        pack_experts(self.model, packs_float32=packs_float32)
        self._network = CpuNetwork(self.model, self.cache, self._adapters, self._states)
        release_weight_files()  # the kernels have copies of most of them
        trim_heap()
        self.decode_path = CPU_KERNELS
        return self._network.run

    def _build_layers(self) -> Decode:
        """In a network that the kernels do not know as a whole, they compute its quantized layers one by one."""
        if kernels.load():
            pack_layers(self.model, QUANTIZED_LAYERS)
        else:
            forget_plain_layers(self.model)
        return self._eager.decode

    def _compile_with_inductor(self, query_len: int, num_sequences: int) -> Decode:
        kernels.load()
        log.info("%s: compiling a decode step with Inductor; this may take a minute or more", self._name)
        has_states = self.cache.states.has_layers
        example = inductor.dummy_inputs(num_sequences, query_len, 2, self.device, has_states=has_states)
        return inductor.compile_step(self.model, self.cache, query_len, choose_attention, example, self._states)
