"""CausalModel: a network of transformers as the backends call it; SequenceState: what it keeps for one sequence.

Shapes: B rows · Q tokens of each · N of them · T tokens of a sequence so far · V vocabulary
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

# Under these names networks return what they keep for the next tokens.
CACHE_NAMES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
OLD_CACHE_NAMES = {"mems": "past_key_values", "past_buckets_states": "past_key_values"}  # → the names they take it by


class CausalModel:
    """Gives the logits of chosen tokens, in float32."""

    def __init__(self, model: Any) -> None:
        self.network: Any = model
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._takes_rows = "logits_to_keep" in parameters

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.network
        return module

    @property
    def device(self) -> torch.device:
        device: torch.device = self.network.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.network.dtype
        return dtype

    def run(self, inputs: dict[str, Any], rows_N: Tensor | None = None) -> tuple[Tensor, Any]:
        """The logits [B, N, V] of the tokens at `rows_N`, by default of all, and all that the network returns."""
        if rows_N is not None and self._takes_rows:
            inputs = {**inputs, "logits_to_keep": rows_N}
        outputs = self.network(**inputs, return_dict=True)
        logits_BNV: Tensor = outputs.logits
        if rows_N is not None and not self._takes_rows:
            logits_BNV = logits_BNV[:, rows_N]
        return logits_BNV.float(), outputs

    def new_cache(self) -> dict[str, Any]:
        """An empty cache by the name that the network takes it by; nothing for networks that make their own."""
        if not self.network._supports_default_dynamic_cache():
            return {}
        from transformers import DynamicCache

        return {self.cache_name: DynamicCache(config=self.network.config.get_text_config(decoder=True))}


class SequenceState:
    """The tokens of one sequence and the cache of transformers for them, used as `generate` uses it."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.cache: dict[str, Any] = model.new_cache()
        self._ids_1T = torch.empty(1, 0, dtype=torch.int64, device=model.device)

    @property
    def length(self) -> int:
        return self._ids_1T.shape[1]

    def run(self, ids_Q: Tensor, rows_N: Tensor | None = None) -> Tensor:
        """The logits [N, V] of the next tokens at `rows_N`, by default of all; the cache has them afterwards."""
        model, number, is_first = self._model, len(ids_Q), self.length == 0
        ids_1T = self._ids_1T = torch.cat((self._ids_1T, ids_Q[None].to(self._ids_1T.device)), dim=1)
        options: dict[str, Any] = {**self.cache, "use_cache": True, "attention_mask": torch.ones_like(ids_1T)}
        if model.takes_positions:
            options["position_ids"] = torch.arange(ids_1T.shape[1], device=ids_1T.device)[None]
        # Without a cache every pass computes all tokens.
        new = number if self.cache or is_first else ids_1T.shape[1]
        inputs = model.network.prepare_inputs_for_generation(
            ids_1T, next_sequence_length=new, is_first_iteration=is_first, **options
        )
        rows_N = torch.arange(number, device=ids_1T.device) if rows_N is None else rows_N.to(ids_1T.device)
        num_computed = inputs["input_ids"].shape[1]  # more where the network begins again (longrope)
        logits_1NV, outputs = model.run(inputs, rows_N + (num_computed - number))
        self.cache = kept_by(outputs) or self.cache
        if is_first and not cached_bytes(self.cache):  # the network ignores caches (GPT-1)
            self.cache = {}
        return logits_1NV[0]


def kept_by(outputs: Any) -> dict[str, Any]:
    """What a network wants back with the next tokens, by the name that it takes it by."""
    for name in CACHE_NAMES:
        if outputs.get(name) is not None:
            return {OLD_CACHE_NAMES.get(name, name): outputs[name]}
    return {}


def cached_bytes(kept: object, seen: set[int] | None = None) -> int:
    """The memory of all tensors in a cache, whatever its classes are."""
    seen = set() if seen is None else seen
    if id(kept) in seen or isinstance(kept, nn.Module):
        return 0
    seen.add(id(kept))
    if isinstance(kept, Tensor):
        return kept.numel() * kept.itemsize
    if isinstance(kept, dict):
        return sum(cached_bytes(value, seen) for value in kept.values())
    if isinstance(kept, list | tuple):
        return sum(cached_bytes(value, seen) for value in kept)
    return cached_bytes(vars(kept), seen) if hasattr(kept, "__dict__") and not isinstance(kept, type) else 0
