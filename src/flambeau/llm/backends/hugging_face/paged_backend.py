"""PagedBackend: all sequences of a step in one pass through a network of transformers, over the blocks of a cache.

Shapes: T tokens of the step · N rows of them · V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.hugging_face.attention import PAGED, AttentionLayer, LayerCache, PagedLayers
from flambeau.llm.backends.hugging_face.causal_model import CausalModel
from flambeau.llm.executor.backend import AsyncDecoder, Greedy
from flambeau.llm.executor.inputs import StepInputs

MANY = 100_000  # tokens that a cache claims to have
NO_CACHE = {"use_cache": False}


class PagedBackend:
    """Runs the network on the tokens of all sequences, one after another in a single row."""

    greedy: Greedy | None = None
    async_decoder: AsyncDecoder | None = None

    def __init__(self, model: CausalModel, layers: list[AttentionLayer], cache: LayerCache) -> None:
        self._model = model
        self._attention = PagedLayers(layers, cache)
        self.model: nn.Module = model.module
        self.cache = cache
        self.device = model.device
        self.decode_path = f"transformers ({type(model.network).__name__}) with paged attention"
        model.network.set_attn_implementation(PAGED)

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        return self._logits(inputs, None)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        return self._logits(inputs, rows_N.to(self.device))

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing runs in the background."""

    def counts_cached_tokens(self, inputs: StepInputs) -> bool:
        """Whether logits depend on how many tokens a cache of transformers has, which is none here (Llama 4)."""
        from flambeau.llm.backends.hugging_face.state_cache import NoKeys, without_keys  # imports transformers

        found = []
        for length in (0, MANY):
            kept = without_keys(self._model.new_cache())
            for layer in (layer for cache in kept.values() for layer in cache.layers if isinstance(layer, NoKeys)):
                layer.length = length
            found.append(self._logits(inputs, None, {**kept, "use_cache": True}))
        return not torch.equal(*found)

    def _logits(self, inputs: StepInputs, rows_N: Tensor | None, options: Mapping[str, Any] = NO_CACHE) -> Tensor:
        inputs = self._attention.inputs = inputs.to(self.device)
        passed: dict[str, Any] = {"input_ids": inputs.ids_T[None], "position_ids": inputs.positions_T[None]}
        try:
            logits_1NV, _ = self._model.run({**passed, **options}, rows_N)
        finally:
            self._attention.inputs = None
        return logits_1NV[0]
