"""Recurrence: the shape of recurrent layers, which have a state of fixed size instead of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RecurrentKind = Literal[
    "mamba", "mamba2", "short_conv", "delta_net", "kimi_delta", "lightning", "gated", "rwkv", "compressor"
]
HEADED = ("mamba2", "delta_net", "kimi_delta", "lightning", "gated")  # the kinds whose states belong to heads
InnerNorms = Literal["none", "learned", "plain"]  # with weights (Jamba), or without (Falcon Mamba)
MixerNorm = Literal["after_gate", "before_gate", "none"]  # Mamba 2
StateShapes = tuple[tuple[int, ...], ...]  # of one sequence: the window of the convolution, then the state matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The recurrent layers of a network, which are all of one kind; its other layers have attention, or all have."""

    kind: RecurrentKind
    layers: frozenset[int]
    inner_size: int  # channels of the recurrence; of a delta net, those of values
    conv_width: int = 4
    conv_bias: bool = True
    projection_bias: bool = False
    num_heads: int = 1
    head_size: int = 1
    state_size: int = 0  # Mamba: numbers per channel; delta net: the size of a key
    num_groups: int = 1  # Mamba 2: groups of heads with the same B and C; delta net: key heads
    time_step_rank: int = 0  # Mamba 1
    inner_norms: InnerNorms = "none"  # Mamba 1: of time steps, B and C
    inner_epsilon: float | None = None  # of norms inside of a layer; None: as everywhere
    time_step_limits: tuple[float, float] = (0.0, math.inf)  # Mamba 2
    is_grouped: bool = True  # delta net: the rows of its projections are grouped by key head (Qwen3-Next)
    has_sigmoid_gates: bool = False  # delta net: of its outputs, instead of SiLU (Qwen 4)
    max_beta: float = 1.0  # delta net: 2 allows states to change their sign (OLMo hybrid)
    gate_rank: int = 0  # Kimi: of the projections to decays and to gates; 0: these are one matrix each
    lowest_log_decay: float | None = None  # Kimi: of a token; None: there is no limit
    others: tuple[tuple[int, StateShapes], ...] = ()  # states of other parts, numbered after the layers
    # Lightning attention only:
    slope_factors: tuple[float, ...] = ()  # of each layer of the network; heads have the slopes of ALiBi
    activates_inputs: bool = False  # queries, keys and values
    normalizes_qk: bool = False  # queries and keys of each head
    rotary_size: int = 0  # of a head's queries and keys; 0: they are not rotated
    query_scale: float = 1.0
    # Falcon H1 only:
    is_beside_attention: bool = False  # a layer has both, and adds up what they say
    norm: MixerNorm = "after_gate"
    norm_groups: int = 1  # also of lightning attention
    input_scale: float = 1.0
    part_scales: tuple[float, ...] = ()  # of the gate, x, B, C and the time step
    output_scale: float = 1.0

    @property
    def conv_size(self) -> int:
        """The channels of the convolution."""
        more = self.kind in ("mamba2", "delta_net", "kimi_delta")
        return self.inner_size + (2 * self.num_groups * self.state_size if more else 0)

    @property
    def state_shapes(self) -> StateShapes:
        """The state of one sequence in one layer."""
        if self.kind == "compressor":  # sums of three numbers: for an entry, for the next one, and of the group before
            return ((9, self.inner_size + self.state_size),)
        window = self.conv_size, self.conv_width - 1
        if self.kind == "short_conv":
            return (window,)
        if self.kind == "mamba":
            return window, (self.inner_size, self.state_size)
        if self.kind == "rwkv":  # the last token, and a mean
            return (self.state_size,), *[(self.inner_size,)] * 3
        if self.kind == "gated":  # and whether it has begun
            return window, (self.inner_size,), (1,)
        if self.kind == "lightning":
            return ((self.num_heads, self.head_size, self.state_size),)
        if self.kind == "mamba2":
            return window, (self.num_heads, self.head_size, self.state_size)
        return window, (self.num_heads, self.state_size, self.head_size)

    @property
    def num_state_numbers(self) -> int:
        """How many numbers the state of one sequence has, in all layers."""
        return sum(math.prod(shape) for shapes in self.all_shapes.values() for shape in shapes)

    @property
    def all_shapes(self) -> dict[int, StateShapes]:
        """The states of one sequence in each layer, and those of other parts."""
        return {**dict.fromkeys(sorted(self.layers), self.state_shapes), **dict(self.others)}
