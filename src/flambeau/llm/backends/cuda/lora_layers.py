"""Layers of a network with adapters: where their products with A and B are computed.

Each product may have a launch of its own, or be a part of the layer's kernel or of the one before or after it. A launch
costs more than what it computes in decode steps.

Shapes: T rows · E hidden · I inputs · N outputs · S parts of a sum · P parts of the inner sums · L slots · X ranks of
all of a layer's segments
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.backends.cuda import decode_attention_kernel, lora_products
from flambeau.llm.backends.cuda.decode_attention import MAX_ADAPTER_RANK, ProjectionAdapters
from flambeau.llm.backends.cuda.feed_forward import DenseLayer
from flambeau.llm.backends.cuda.layers import CudaLayer, HeadAttention, Projected
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.lora_activation import expand_active
from flambeau.llm.backends.cuda.lora_kernel import shrink
from flambeau.llm.backends.cuda.lora_norm import Normalized, Unexpanded, can_expand, normalize
from flambeau.llm.backends.cuda.lora_slots import LayerSlots
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.backends.cuda.warpgroup_kernel import WarpgroupDivision
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.architecture import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """Which products of adapters are parts of other kernels in decode steps; the benchmark measures each."""

    products: bool = True  # products with bfloat16 weights expand what they give, or shrink what they are given
    norms: bool = True  # norms expand what comes before them, and shrink for what comes after
    attention: bool = True  # attention expands queries, keys and values, if their product does not
    activations: bool = True  # activations shrink for the layer after them, if its product does not


NO_FUSIONS = Fusions(products=False, norms=False, attention=False, activations=False)


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
    """A linear layer and what adapters add to it."""

    linear: KernelLinear  # without an activation
    slots: LayerSlots
    step: LoraStep

    @property
    def fuses_products(self) -> bool:
        return self.step.fusions.products and self.step.fusions.norms

    def multiply(self, x_TI: Tensor, inner_PTX: Tensor | None = None) -> Unexpanded:
        """[T, I] to [T, N], or to parts; `inner_PTX` are parts of x times A, if they were computed before."""
        x_TI, places_T = x_TI.contiguous(), self.step.places()
        if inner_PTX is None:  # first: the product after it reads its weights meanwhile
            inner_PTX = shrink(x_TI, places_T, self.slots)
        return Unexpanded(y=self.linear(x_TI), inner=inner_PTX, slots=self.slots, places_T=places_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBeforeNorm(LoraLinear):
    """A linear layer after which a norm adds the adapters, unless something else comes first."""

    has_norm: bool = True

    def division(self, num_rows: int) -> WarpgroupDivision | None:
        """How the product that also shrinks its inputs is divided; None: another kernel shrinks them."""
        if not (self.has_norm and self.fuses_products):
            return None
        return lora_products.shrinking_division(self.linear, self.slots, num_rows)

    def __call__(self, x_TI: Tensor) -> Unexpanded:
        division = self.division(len(x_TI))
        if division is None:
            return self.multiply(x_TI)
        y, inner = lora_products.multiply_and_shrink(x_TI.contiguous(), self.linear, self.slots, division)
        return Unexpanded(y=y, inner=inner, slots=self.slots, places_T=self.step.places())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAlone(LoraLinear):
    """A linear layer after which no norm adds the adapters."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.multiply(x_TI).expanded()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAfterNorm(LoraLinear):
    """A norm's next linear layer: queries, keys and values; or gates and what they gate."""

    active: KernelLinear  # with the activation, if there is one

    def after(self, norm: NormParameters, x_TE: Tensor, sums: Any) -> tuple[Normalized, Tensor | Unexpanded]:
        """The norm, and its outputs' product: with its activation and adapters, or without both."""
        places_T = self.step.places()
        division = None
        if self.fuses_products:
            division = lora_products.expanding_division(self.active, self.slots, len(x_TE))
        fuses, spreads = self.step.fusions.norms, division is not None
        found = normalize(norm, x_TE, sums, self.slots, places_T, fuses=fuses, spreads=spreads)
        if division is None:
            return found, self.multiply(found.y_TE, found.inner)
        assert found.inner is not None
        outputs = lora_products.multiply_and_expand(found.y_TE, self.active, self.slots, division, found.inner)
        return found, outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAttention:
    """Attention whose projections may have adapters that are not added yet."""

    attention: HeadAttention
    step: LoraStep

    def __call__(
        self,
        qkv: Tensor | Unexpanded,
        dtype: torch.dtype,
        inputs: StepInputs,
        tiles: Tensor | None,
        counters_GT: Tensor,
    ) -> Tensor:
        """As `HeadAttention`."""
        if isinstance(qkv, Tensor):
            return self.attention(qkv, dtype, inputs, tiles, counters_GT)
        if not self._can_expand(qkv, dtype, inputs, tiles):
            return self.attention(qkv.expanded(), dtype, inputs, tiles, counters_GT)
        adapters = ProjectionAdapters(qkv.inner[0], qkv.slots.b_LRO, qkv.places_T)
        return self.attention.attend(qkv.y, dtype, inputs, tiles, counters_GT, adapters)

    def _can_expand(self, qkv: Unexpanded, dtype: torch.dtype, inputs: StepInputs, tiles: Tensor | None) -> bool:
        """Whether the kernel of decode steps adds the adapters: the one in Triton can, the one in CUDA cannot."""
        layer, module = self.attention, self.attention.module
        if not self.step.fusions.attention or tiles is not None or inputs.query_len != 1:
            return False
        if module.has_gates or (module.is_wide and module.q_norm is not None):
            return False
        if len(qkv.inner) > 1 or qkv.slots.rank > MAX_ADAPTER_RANK:
            return False
        return not decode_attention_kernel.is_supported(
            layer.keys, module.num_heads, len(inputs.positions_T), layer.heads, layer.scores, dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDense(DenseLayer):
    """A norm and a feed-forward layer with adapters."""

    gate_up: Any  # LoraAfterNorm
    down: Any  # LoraBeforeNorm
    activation: Activation
    step: LoraStep

    def __call__(self, x_TE: Tensor, sums: Any, counters_T: Tensor) -> Any:
        """The residual stream, and `Unexpanded` sums."""
        found, up = self.gate_up.after(self.norm, x_TE, sums)
        return found.x_TE, self._down(up, found.y_TE.dtype)

    def compute(self, y_TE: Tensor) -> Tensor:
        """What normalized rows add to the residual stream."""
        return self._down(self.gate_up.multiply(y_TE), y_TE.dtype).expanded()

    def _down(self, up: Tensor | Unexpanded, dtype: torch.dtype) -> Unexpanded:
        found: Unexpanded
        if isinstance(up, Tensor):
            found = self.down(up)
            return found
        fusions, slots, num_rows = self.step.fusions, self.down.slots, len(up.places_T)
        if self.down.division(num_rows) is not None:
            found = self.down(self._active(up, dtype, None)[0])
        else:
            shrinks = fusions.norms and fusions.activations and can_expand(slots, num_rows)
            found = self.down.multiply(*self._active(up, dtype, slots if shrinks else None))
        return found

    def _active(self, up: Unexpanded, dtype: torch.dtype, down: LayerSlots | None) -> tuple[Tensor, Tensor | None]:
        return expand_active(up.y, up.inner, up.places_T, up.slots, self.activation, dtype, down)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayer(CudaLayer):
    """A layer whose norms and products compute those of adapters."""

    qkv: Any  # LoraAfterNorm
    step: LoraStep

    def project(self, x_TE: Tensor, sums: Any) -> Projected:
        found, projections = self.qkv.after(self.norm, x_TE, sums)
        return Projected(found.x_TE, found.y_TE, projections)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraNorm:
    """The last norm."""

    norm: NormParameters
    step: LoraStep

    def __call__(self, x_TE: Tensor, sums: Any) -> Tensor:
        return normalize(self.norm, x_TE, sums, None, self.step.places(), fuses=self.step.fusions.norms).y_TE
