"""LoraNetwork: steps with adapters by the GPU kernels; tested against EagerBackend.

Shapes: T tokens of the step · N rows of them, or outputs · I inputs · V vocabulary
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.comparison import difference
from flambeau.llm.backends.cuda.feed_forward import DenseLayer
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.lora_kernel import expand, expand_gated, shrink
from flambeau.llm.backends.cuda.lora_slots import LayerSlots, LoraSlots, plain_lora
from flambeau.llm.backends.cuda.network import CudaNetwork, kernel_linear
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.activations import ACTIVATIONS
from flambeau.llm.models.architecture import Activation
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer

MAX_ERROR = 0.02  # of what adapters add, of the kernels' twin; an error gives about 1
CHECKED_ROWS = (1, 5, 40)
GATED_SEGMENTS = 2  # of a fused layer: gates, and what they gate


class StepPlaces(threading.local):
    """The slots of the rows of a thread's step: steps may run at the same time."""

    places_T: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLinear:
    """A linear layer and what adapters add to it, before the activation if it has one."""

    linear: KernelLinear  # without gates and activation
    slots: LayerSlots
    step: StepPlaces
    activation: Activation | None = None
    has_gate: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] to [T, N], or to parts of that sum; a gated layer has half as many outputs."""
        places_T = self.step.places_T
        assert places_T is not None
        if not len(x):
            return x.new_empty(0, self.slots.shape.outputs // (2 if self.has_gate else 1))
        x = x.contiguous()
        inner_PTX = shrink(x, places_T, self.slots)  # first: the product after it reads its weights meanwhile
        y = self.linear(x)
        if self.has_gate:
            assert self.activation is not None
            return expand_gated(y, inner_PTX, places_T, self.slots, self.activation, x.dtype)
        expand(y, inner_PTX, places_T, self.slots)
        if self.activation is None:
            return y
        return ACTIVATIONS[self.activation](y.sum(0).to(x.dtype) if y.dim() == 3 else y)


class LoraNetwork(CudaNetwork):
    """A network whose steps have adapters: `adapters_T` of their inputs are places in the slots."""

    def __init__(
        self, model: Transformer, cache: KVCache, slots: LoraSlots, states: HiddenStates | None = None
    ) -> None:
        super().__init__(model, cache, states)
        self._step, self._slots = StepPlaces(), slots
        arch = model.arch
        self._up = {"activation": arch.activation, "has_gate": arch.has_gate}
        layers: list[Any] = [*model.model.layers]
        self._layers = [
            self._adapted(layer, layers[number], f"model.layers.{number}") for number, layer in enumerate(self._layers)
        ]

    def _adapted(self, layer: Any, module: Any, name: str) -> Any:
        attention = {
            "qkv": self._linear(module.self_attn.qkv_proj, f"{name}.self_attn.qkv_proj"),
            "out": self._linear(module.self_attn.o_proj, f"{name}.self_attn.o_proj"),
        }
        if not isinstance(layer.mlp, DenseLayer):
            return replace(layer, **attention)
        up = "gate_up_proj" if self._up["has_gate"] else "up_proj"
        gate_up = self._linear(getattr(module.mlp, up), f"{name}.mlp.{up}", **self._up)
        down = self._linear(module.mlp.down_proj, f"{name}.mlp.down_proj")
        return replace(layer, **attention, mlp=replace(layer.mlp, gate_up=gate_up, down=down))

    def _linear(self, module: Any, name: str, **options: Any) -> Any:
        return LoraLinear(linear=kernel_linear(module), slots=self._slots.layers[name], step=self._step, **options)

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        tiles = self.tiles(inputs)
        assert inputs.adapters_T is not None
        moved = replace(inputs.to(self._device), adapters_T=inputs.adapters_T.to(self._device))
        return self.run(moved, rows_N.to(self._device), tiles.to(self._device))

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None, tiles: Tensor | None = None) -> Tensor:
        assert inputs.adapters_T is not None
        self._step.places_T = inputs.adapters_T
        try:
            return super().run(inputs, rows_N, tiles)
        finally:
            self._step.places_T = None


@torch.inference_mode()
def find_error(slots: LoraSlots) -> str | None:
    """What the kernels compute differently from their twin, for the shapes of all layers; None: nothing."""
    generator = torch.Generator().manual_seed(0)
    for shape in {layer.shape for layer in slots.layers.values()}:
        like = next(layer for layer in slots.layers.values() if layer.shape == shape)
        matrices = [torch.randn(each.shape, generator=generator).to(each) for each in (like.a_LXI, like.b_LOR)]
        layer = LayerSlots(shape, *matrices)
        for num_rows in CHECKED_ROWS:
            x, y = (torch.randn(num_rows, size, generator=generator) for size in (shape.inputs, shape.outputs))
            x, y = x.to(like.a_LXI), y.to(like.a_LXI)
            places_T = torch.arange(num_rows, device=x.device) % (slots.num_slots + 1)
            places_T = places_T + (num_rows == 1)
            expected = plain_lora(y, x, places_T, layer)
            inner_PTX = shrink(x, places_T, layer)
            found = y.clone()
            expand(found, inner_PTX, places_T, layer)
            added = (expected - y.float()).norm()
            error = float((found.float() - expected).norm() / added)
            if not error <= MAX_ERROR:
                return f"{shape.outputs} outputs of {num_rows} rows are off by {error:.0%}"
            if not torch.equal(found[places_T == 0], y[places_T == 0]):
                return f"rows without an adapter are changed, of {shape.outputs} outputs"
            if len(shape.starts) == GATED_SEGMENTS:
                gate, up = expected.chunk(2, dim=-1)
                parts = torch.stack((y.float(), y.float())) / 2
                gated = expand_gated(parts, inner_PTX, places_T, layer, "relu", x.dtype)
                error = difference(gated, F.relu(gate) * up)
                if not error <= MAX_ERROR:
                    return f"{len(gated[0])} gated outputs of {num_rows} rows are off by {error:.0%}"
    return None
