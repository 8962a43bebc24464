"""LoraNetwork: steps with adapters by the GPU kernels; tested against EagerBackend.

Shapes: T tokens of the step · N rows of them · V vocabulary
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from flambeau.llm.backends.cuda.feed_forward import DenseLayer
from flambeau.llm.backends.cuda.layers import CudaLayer, HeadAttention
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.lora_layers import (
    Fusions,
    LoraAfterNorm,
    LoraAlone,
    LoraAttention,
    LoraBeforeNorm,
    LoraDense,
    LoraLayer,
    LoraNorm,
    LoraStep,
)
from flambeau.llm.backends.cuda.lora_slots import LoraSlots
from flambeau.llm.backends.cuda.network import CudaNetwork
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer


class LoraNetwork(CudaNetwork):
    """A network whose steps have adapters: `adapters_T` of their inputs are places in the slots."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        slots: LoraSlots,
        states: HiddenStates | None = None,
        fusions: Fusions | None = None,
    ) -> None:
        super().__init__(model, cache, states)
        self._step, self._slots, self._arch = LoraStep(fusions or Fusions()), slots, model.arch
        plain: Any = self._layers
        self._layers = [
            self._adapted(layer, module, f"model.layers.{number}")
            for number, (layer, module) in enumerate(zip(plain, model.model.layers, strict=True))
        ]
        self._last_norm: Any = LoraNorm(norm=self._last_norm, step=self._step)

    def _adapted(self, layer: CudaLayer, module: Any, name: str) -> LoraLayer:
        assert isinstance(layer.attention, HeadAttention)
        step, mlp = self._step, layer.mlp
        has_norm = isinstance(mlp, DenseLayer) and not layer.is_parallel
        qkv, out = f"{name}.self_attn.qkv_proj", f"{name}.self_attn.o_proj"
        parts: dict[str, Any] = {
            "to_mlp": None,
            "to_next": None,
            "attention": LoraAttention(attention=layer.attention, step=step),
            "qkv": LoraAfterNorm(**self._linear(module.self_attn.qkv_proj, qkv), active=layer.qkv),
            "out": (LoraBeforeNorm if has_norm else LoraAlone)(**self._linear(module.self_attn.o_proj, out)),
        }
        if isinstance(mlp, DenseLayer):
            up = "gate_up_proj" if self._arch.has_gate else "up_proj"
            parts["mlp"] = LoraDense(
                norm=mlp.norm,
                gate_up=LoraAfterNorm(**self._linear(getattr(module.mlp, up), f"{name}.mlp.{up}"), active=mlp.gate_up),
                down=LoraBeforeNorm(
                    **self._linear(module.mlp.down_proj, f"{name}.mlp.down_proj"), has_norm=not layer.is_parallel
                ),
                activation=self._arch.activation,
                step=step,
            )
        fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        return LoraLayer(**{**fields, **parts}, step=step)

    def _linear(self, module: Any, name: str) -> dict[str, Any]:
        return {"linear": kernel_linear(module), "slots": self._slots.layers[name], "step": self._step}

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        tiles = self.tiles(inputs)
        assert inputs.adapters_T is not None
        moved = dataclasses.replace(inputs.to(self._device), adapters_T=inputs.adapters_T.to(self._device))
        return self.run(moved, rows_N.to(self._device), tiles.to(self._device))

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None, tiles: Tensor | None = None) -> Tensor:
        assert inputs.adapters_T is not None
        self._step.places_T = inputs.adapters_T
        try:
            return super().run(inputs, rows_N, tiles)
        finally:
            self._step.places_T = None
