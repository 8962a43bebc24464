"""Caches of transformers that hold the states of layers only: keys and values are in the blocks of the engine.

States of several sequences are stacked along their first dimension, so that one pass computes them.
Import this module only where transformers is used.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

STATES = ("conv_states", "recurrent_states")  # of a layer: tensors by number


class NoKeys(CacheLayerMixin):  # type: ignore[misc]
    """A layer that hands keys and values on to attention, which keeps them."""

    length = 0  # how many tokens it claims to have

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def without_keys(kept: dict[str, Any]) -> dict[str, Any]:
    """The same caches, whose layers keep states but no keys and values."""
    for cache in kept.values():
        if isinstance(cache, Cache):
            cache.layers = [keep_states(layer) for layer in cache.layers]
    return kept


def keep_states(layer: Any) -> Any:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return NoKeys()
    if isinstance(layer, CacheLayerMixin):  # a layer with both, whose methods for keys are replaced
        for name in ("update", "get_mask_sizes", "get_seq_length"):
            setattr(layer, name, getattr(NoKeys(), name))
    return layer


def stack(kept: Sequence[Any]) -> Any:
    """One cache for several sequences."""
    first = kept[0]
    if isinstance(first, Tensor):
        return torch.cat([*kept])
    if isinstance(first, dict):
        return {key: stack([one[key] for one in kept]) for key in first}
    if isinstance(first, list | tuple):
        return [stack([one[i] for one in kept]) for i in range(len(first))]
    if isinstance(first, Cache):
        return with_parts(first, layers=stack([one.layers for one in kept]))
    if isinstance(first, LinearAttentionCacheLayerMixin):
        return with_parts(first, **{name: stack([getattr(one, name) for one in kept]) for name in STATES})
    return first


def take(kept: Any, row: int) -> Any:
    """The cache of one of the sequences in a stacked one; it shares no memory with that."""
    if isinstance(kept, Tensor):
        return kept[row : row + 1].clone()
    if isinstance(kept, dict):
        return {key: take(value, row) for key, value in kept.items()}
    if isinstance(kept, list | tuple):
        return [take(value, row) for value in kept]
    if isinstance(kept, Cache):
        return with_parts(kept, layers=take(kept.layers, row))
    if isinstance(kept, LinearAttentionCacheLayerMixin):
        return with_parts(kept, **{name: take(getattr(kept, name), row) for name in STATES})
    return kept


def with_parts(kept: Any, **parts: Any) -> Any:
    """A copy with other parts, whose other dictionaries are its own."""
    other = copy.copy(kept)
    for name, value in vars(kept).items():
        if isinstance(value, dict):
            setattr(other, name, dict(value))
    for name, value in parts.items():
        setattr(other, name, value)
    return other
