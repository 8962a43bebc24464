"""EagerForward: one step of the network, operation by operation, over the blocks of a cache.

Shapes: T tokens of the step, one sequence after another · N rows of them · S sequences · J tokens of each that follow
the step · V vocabulary
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.kernels.native import choose_attention
from flambeau.llm.models.transformer import Transformer


class Greedy(Protocol):
    """Chooses the likeliest tokens by itself: nobody sees the logits, and several steps are one call."""

    def choose(self, inputs: StepInputs) -> Tensor:
        """The likeliest token after each [T], the first of equal ones; -1 where its logits are no numbers."""

    def go_ahead(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        """The likeliest token after each sequence, the likeliest after that one, and so on: [J + 1, S]."""


class Forward(Protocol):
    """Computes steps; what it keeps between them is the cache."""

    @property
    def greedy(self) -> Greedy | None:
        """What chooses tokens in place of the sampler, where they are the likeliest ones; None: nothing does."""

    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of every token, where each sequence has `inputs.query_len` of them."""

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of these tokens of a step whose sequences have any number of them."""

    def close(self) -> None:
        """Let go of whatever runs beside the steps."""


class EagerForward:
    """Every operation is run as it is written."""

    greedy: Greedy | None = None

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model = model
        self._cache = cache
        self.device = cache.keys[0].device

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of every token, where each sequence has `inputs.query_len` of them."""
        return self.model.logits(self._hidden(inputs))

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of these tokens of a step whose sequences have any number of them."""
        return self.model.logits(self._hidden(inputs)[rows_N.to(self.device)])

    def close(self) -> None:
        """Nothing runs beside the steps."""

    def _hidden(self, inputs: StepInputs) -> Tensor:
        inputs = inputs.to(self.device)
        attend = choose_attention(self._cache, inputs)
        return self.model(inputs.ids_T, inputs.positions_T, attend)  # type: ignore[no-any-return]
