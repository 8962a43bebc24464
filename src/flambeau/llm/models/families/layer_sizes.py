"""LayerSizes: what differs between the layers of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

GateKind = Literal["sigmoid", "softplus", "sigmoid_per_head", "softplus_per_head"]  # of the outputs of attention


class LatentSizes(NamedTuple):
    """Those of latent attention in one layer."""

    latent_size: int
    query_latent_size: int
    unrotated_size: int
    value_size: int
    latent_scale: float
    attention_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer, in a network whose layers differ."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rotary_size: int | None = None  # the dimensions of a head that are rotated; None: all, 0 with a latent: none
    latents: LatentSizes | None = None  # None: those of all layers
