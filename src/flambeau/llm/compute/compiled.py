"""CompiledForward: answers at once, operation by operation, and by something quicker from the step after it is ready.

What is quicker on a CPU: the kernels' whole step for a plain network, else what Inductor makes of it.

Shapes: T tokens of the step · N rows of them · V vocabulary
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable

import torch
from torch import Tensor

from flambeau.llm.compute.forward import EagerForward, Greedy
from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.compute.workshop import Decode, Workshop
from flambeau.llm.kernels import inductor
from flambeau.llm.kernels.binding import kernels
from flambeau.llm.kernels.native import LONGEST_PROMPT, choose_attention
from flambeau.llm.kernels.network import NativeNetwork, can_compute
from flambeau.llm.models.transformer import Transformer

log = logging.getLogger(__name__)

# Compiling takes half a minute of a CPU that also serves: only what runs for long is worth it.
STEPS_WORTH_COMPILING = 500


class CompiledForward:
    """Decode steps of what the workshop has made so far, and every other step as EagerForward computes it."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        patience: int = STEPS_WORTH_COMPILING,
        name: str = "the model",
    ) -> None:
        self.model, self._cache = model, cache
        self._eager = EagerForward(model, cache)
        self._workshop = Workshop()
        self._patience = patience  # plain steps of a shape before the CPU's compiler is asked for it
        self._num_plain: Counter[Hashable] = Counter()
        self.device = cache.keys[0].device
        self.quicker = ""  # what computes decode steps, where it is no longer PyTorch, operation by operation
        self._name = name  # in logs
        self._native: NativeNetwork | None = None
        self._is_plain = can_compute(model, cache)
        if self._is_plain:
            self._workshop.find("native", self._make_native)

    @property
    def greedy(self) -> Greedy | None:
        """The kernels' whole step, once it is there."""
        return self._native

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of every token, where each sequence has `inputs.query_len` of them."""
        if self._native is not None:
            return self._native.run(inputs)
        quick = self._find(inputs)
        if quick is None:
            return self._eager.decode(inputs)
        if not self.quicker:
            self._tell("Inductor")
        return quick(inputs)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of these tokens of a step whose sequences have any number of them."""
        num_tokens, num_sequences = inputs.ids_T.shape[0], inputs.context_lens_S.shape[0]
        if self._native is not None and num_tokens <= LONGEST_PROMPT * num_sequences:
            return self._native.run(inputs, rows_N)
        return self._eager.prefill(inputs, rows_N)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """Wait for what steps have asked for so far: for measuring, and for tests."""
        return self._workshop.wait(timeout_s)

    def close(self) -> None:
        """Compile nothing more."""
        self._workshop.close()

    def _find(self, inputs: StepInputs) -> Decode | None:
        num_sequences = inputs.context_lens_S.shape[0]
        if self._is_plain:
            return None  # the kernels are on their way, or cannot be built here
        # One sequence is a shape of its own to the compiler; all other numbers share one.
        number = min(num_sequences, 2)
        key = (inputs.query_len, number)
        self._num_plain[key] += 1
        if self._num_plain[key] <= self._patience:
            return None
        return self._workshop.find(key, lambda: self._make_inductor(inputs.query_len, number))

    def _make_native(self) -> Decode:
        if not kernels.load():
            return self._eager.decode
        self._native = NativeNetwork(self.model, self._cache)
        self._tell("CPU kernels")
        return self._native.run

    def _tell(self, quicker: str) -> None:
        """Say once what decodes from now on; other shapes of a step follow as they are asked for."""
        self.quicker = quicker
        log.info("%s is decoded by %s from now on", self._name, quicker)

    def _make_inductor(self, query_len: int, num_sequences: int) -> Decode:
        kernels.load()
        example = inductor.trash_inputs(num_sequences, query_len, 2, self.device)
        return inductor.compile_step(self.model, self._cache, query_len, choose_attention, example)
