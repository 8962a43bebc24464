"""StateCache: the states of recurrent layers, one slot for each running sequence; and how many slots there are.

A state has the same size however long its sequence is. It is kept in float32: errors would add up over its tokens.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError, NoRoom
from flambeau.llm.models.architecture import Architecture

logger = logging.getLogger(__name__)

Slots = tuple[Tensor, ...]  # [slots, …]: windows of convolutions, and state matrices if there are any


class StateCache:
    """Tensors of the states of every recurrent layer. Slot 0 is for padding and belongs to no sequence."""

    def __init__(self, arch: Architecture, num_slots: int, *, device: torch.device | str = "cpu") -> None:
        shapes = arch.recurrence.state_shapes if arch.recurrence is not None else ()
        self.layers: dict[int, Slots] = {
            layer: tuple(torch.zeros(1 + num_slots, *shape, device=device) for shape in shapes)
            for layer in sorted(arch.recurrent_layers)
        }

    @property
    def has_layers(self) -> bool:
        return bool(self.layers)


def state_bytes(arch: Architecture) -> int:
    """The size of a sequence's state in all layers."""
    return 0 if arch.recurrence is None else arch.recurrence.num_state_numbers * torch.float32.itemsize


def num_slots_for(arch: Architecture, config: EngineConfig, available_bytes: int) -> int:
    """As many slots as sequences may run, if their states fit; 0 for a network without states.

    A network with attention too leaves half of the memory to its blocks.
    """
    size = state_bytes(arch)
    if not size:
        return 0
    has_blocks = len(arch.recurrent_layers) < arch.num_layers
    affordable = available_bytes // size // (2 if has_blocks else 1)
    if affordable < 1 and config.kv_cache_bytes is not None:
        raise LLMError(
            f"kv_cache_bytes is {config.kv_cache_bytes}, and the state of one sequence takes {size}; raise it"
        )
    if affordable < 1:
        raise NoRoom(
            f"no memory is left for the state of a single sequence, which takes {size / 1e6:.0f} MB; use a smaller "
            "model, quantization, or fewer models on this device"
        )
    if affordable < config.max_num_seqs:
        logger.info(
            "at most %d sequences run at a time, not max_num_seqs: %d: each has a state of %.1f MB; raise "
            "kv_cache_bytes for more",
            affordable,
            config.max_num_seqs,
            size / 1e6,
        )
    return min(config.max_num_seqs, affordable)
