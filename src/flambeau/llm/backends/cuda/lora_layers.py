"""Layers of a network with adapters: where their products with A and B are computed.

Each product may have a launch of its own, or be a part of the kernel before or after the layer. A launch costs more
than what it computes in decode steps.

Shapes: T rows · E hidden · I inputs · N outputs · S parts of a sum · P parts of the inner sums · X ranks of all of a
layer's segments
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flambeau.llm.backends.cuda import decode_attention_kernel
from flambeau.llm.backends.cuda.decode_attention import MAX_ADAPTER_RANK, ProjectionAdapters
from flambeau.llm.backends.cuda.feed_forward import DenseLayer
from flambeau.llm.backends.cuda.layers import CudaLayer, HeadAttention, Projected
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.lora_activation import expand_active
from flambeau.llm.backends.cuda.lora_kernel import shrink
from flambeau.llm.backends.cuda.lora_norm import Unexpanded, can_expand, normalize
from flambeau.llm.backends.cuda.lora_slots import LayerSlots
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.architecture import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """Which products of adapters are parts of other kernels in decode steps; the benchmark measures each."""

    norms: bool = True  # norms expand what comes before them, and shrink for what comes after
    attention: bool = True  # attention expands queries, keys and values
    activations: bool = True  # activations shrink for the layer after them
    # Where the outputs of attention are shrunk: in the next norm, before the product, or beside it on another stream.
    attended: Literal["norm", "launch", "stream"] = "norm"


NO_FUSIONS = Fusions(norms=False, attention=False, activations=False, attended="launch")


class LoraStep(threading.local):
    """What the layers need to know of a thread's step: the slots of its rows. Steps may run at the same time."""

    def __init__(self, fusions: Fusions) -> None:
        self.fusions = fusions
        self.places_T: Tensor | None = None

    def places(self) -> Tensor:
        """[T]"""
        assert self.places_T is not None
        return self.places_T


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLinear:
    """A linear layer, without an activation, and what adapters add to it."""

    linear: KernelLinear
    slots: LayerSlots
    step: LoraStep

    def __call__(self, x_TI: Tensor, inner_PTX: Tensor | None = None) -> Unexpanded:
        """[T, I] to [T, N], or to parts; `inner_PTX` are parts of x times A, if they were computed before."""
        x_TI = x_TI.contiguous()
        if inner_PTX is None:  # first: the product after it reads its weights meanwhile
            inner_PTX = shrink(x_TI, self.step.places(), self.slots)
        return self.product(x_TI, inner_PTX)

    def product(self, x_TI: Tensor, inner_PTX: Tensor | None) -> Unexpanded:
        places_T = self.step.places()
        return Unexpanded(y=self.linear(x_TI), x_TI=x_TI, inner_PTX=inner_PTX, slots=self.slots, places_T=places_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOut(LoraLinear):
    """The linear layer after attention, with a norm after it or without."""

    has_norm: bool

    def __call__(self, x_TI: Tensor, inner_PTX: Tensor | None = None) -> Any:
        """[T, I] to [T, N], or to parts; with a norm after it, that adds the adapters."""
        x_TI, fusions = x_TI.contiguous(), self.step.fusions
        if not self.has_norm:
            return LoraLinear.__call__(self, x_TI).expanded()
        if fusions.attended == "norm" and can_expand(self.slots, len(x_TI), shrinks=True):
            return self.product(x_TI, None)
        if fusions.attended == "stream" and x_TI.is_cuda and can_expand(self.slots, len(x_TI), shrinks=False):
            return self._beside(x_TI)
        return LoraLinear.__call__(self, x_TI)

    def _beside(self, x_TI: Tensor) -> Unexpanded:
        """The product with A on another stream: in a captured graph, nothing but the next norm waits for it."""
        current, other = torch.cuda.current_stream(), side_stream(x_TI.device)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            inner_PTX = shrink(x_TI, self.step.places(), self.slots)
        found = self.product(x_TI, inner_PTX)
        current.wait_stream(other)
        return found


@functools.cache
def side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAttention:
    """Attention whose projections may have adapters that are not added yet."""

    attention: HeadAttention
    step: LoraStep

    def __call__(
        self, qkv: Unexpanded, dtype: torch.dtype, inputs: StepInputs, tiles: Tensor | None, counters_GT: Tensor
    ) -> Tensor:
        """As `HeadAttention`."""
        if not self._can_expand(qkv, dtype, inputs, tiles):
            return self.attention(qkv.expanded(), dtype, inputs, tiles, counters_GT)
        assert qkv.inner_PTX is not None
        adapters = ProjectionAdapters(qkv.inner_PTX[0], qkv.slots.b_LRO, qkv.places_T)
        return self.attention.attend(qkv.y, dtype, inputs, tiles, counters_GT, adapters)

    def _can_expand(self, qkv: Unexpanded, dtype: torch.dtype, inputs: StepInputs, tiles: Tensor | None) -> bool:
        """Whether the kernel of decode steps adds the adapters: the one in Triton can, the one in CUDA cannot."""
        layer, module = self.attention, self.attention.module
        if not self.step.fusions.attention or tiles is not None or inputs.query_len != 1:
            return False
        if module.has_gates or (module.is_wide and module.q_norm is not None):
            return False
        if qkv.inner_PTX is None or len(qkv.inner_PTX) > 1 or qkv.slots.rank > MAX_ADAPTER_RANK:
            return False
        return not decode_attention_kernel.is_supported(
            layer.keys, module.num_heads, len(inputs.positions_T), layer.heads, layer.scores, dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDense(DenseLayer):
    """A norm and a feed-forward layer with adapters; of `gate_up`, the activation is apart."""

    gate_up: Any  # LoraLinear
    down: Any
    activation: Activation
    step: LoraStep

    def __call__(self, x_TE: Tensor, sums: Any, counters_T: Tensor) -> Any:
        """The residual stream, and `Unexpanded` sums."""
        fuses = self.step.fusions.norms
        found = normalize(self.norm, x_TE, sums, self.gate_up.slots, self.step.places(), fuses=fuses)
        return found.x_TE, self._compute(found.y_TE, found.inner_PTX)

    def compute(self, y_TE: Tensor) -> Tensor:
        """What normalized rows add to the residual stream."""
        return self._compute(y_TE, None).expanded()

    def _compute(self, y_TE: Tensor, inner_PTX: Tensor | None) -> Unexpanded:
        up: Unexpanded = self.gate_up(y_TE, inner_PTX)
        assert up.inner_PTX is not None
        fusions, slots = self.step.fusions, self.down.slots
        shrinks = fusions.norms and fusions.activations and can_expand(slots, len(y_TE), shrinks=False)
        active, down_PTX = expand_active(
            up.y, up.inner_PTX, up.places_T, up.slots, self.activation, y_TE.dtype, slots if shrinks else None
        )
        found: Unexpanded = self.down(active, down_PTX)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayer(CudaLayer):
    """A layer whose norms compute products of adapters."""

    qkv: Any  # LoraLinear
    step: LoraStep

    def project(self, x_TE: Tensor, sums: Any) -> Projected:
        fuses = self.step.fusions.norms
        found = normalize(self.norm, x_TE, sums, self.qkv.slots, self.step.places(), fuses=fuses)
        return Projected(found.x_TE, found.y_TE, self.qkv(found.y_TE, found.inner_PTX))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraNorm:
    """The last norm."""

    norm: NormParameters
    step: LoraStep

    def __call__(self, x_TE: Tensor, sums: Any) -> Tensor:
        return normalize(self.norm, x_TE, sums, None, self.step.places(), fuses=self.step.fusions.norms).y_TE
