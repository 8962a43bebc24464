"""LayerSizes: what differs between the layers of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GateKind = Literal["sigmoid", "softplus", "sigmoid_per_head", "softplus_per_head"]  # of the outputs of attention


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer, in a network whose layers differ."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rotary_size: int | None = None  # the dimensions of a head that are rotated; None: all, 0 with a latent: none
