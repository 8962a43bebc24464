"""LoraTable: the adapters of a network as the structures that the C++ kernels read.

The kernels compute what adapters do to the linear layers of attention, feed-forward layers and experts, and to the last
layer. The embeddings of tokens are looked up here. Steps with an adapter that changes norms or other layers run as
plain PyTorch.

Shapes: T tokens of the step · E hidden
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.adapters.adapter_store import AdapterStore, with_adapters
from flambeau.llm.adapters.layer_changes import LayerChange
from flambeau.llm.adapters.lora_weights import HEAD, LoraPart
from flambeau.llm.backends.cpu.bindings import CLoraLayer, CLoraPart, CTokens
from flambeau.llm.backends.cpu.packed_linear import pack_floats
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import Transformer

log = logging.getLogger(__name__)


class LoraTable:
    """Pointers to the weights of all adapters; built again when one was loaded or unloaded."""

    def __init__(self, store: AdapterStore, model: Transformer) -> None:
        self._store, self._adapted = store, with_adapters(model, store)
        self._names = layer_names(model.arch)
        self._known = set(self._names)
        self._layers: dict[int, list[CLoraLayer]] = {}  # of each adapter
        self._references: dict[int, list[Any]] = {}
        self._numbers: tuple[int, ...] = ()
        self._table: Any = None
        self._was_logged = False

    def can_compute(self, adapters_T: Tensor | None) -> bool:
        """Whether the kernels know all that the adapters of these tokens change."""
        if adapters_T is None or all(self._is_known(number) for number in set(adapters_T.tolist()) if number):
            return True
        if not self._was_logged:
            self._was_logged = True
            log.info(
                "an adapter changes norms, or layers that adapters rarely change; steps with it run as plain PyTorch, "
                "not on the CPU kernels"
            )
        return False

    def _is_known(self, number: int) -> bool:
        adapter = self._store.adapters[number]
        return not adapter.norms and adapter.layers.keys() <= self._known

    def add_to(self, tokens: CTokens, inputs: StepInputs) -> None:
        """Set the adapters of a step's tokens."""
        adapters_T = inputs.adapters_T
        assert adapters_T is not None
        if self._numbers != tuple(self._store.adapters):
            self._build()
        numbers: list[int] = adapters_T.tolist()
        order = {number: i for i, number in enumerate((0, *self._numbers))}
        used = {number for number in numbers if number}
        places_T = torch.tensor([order[number] for number in numbers])
        tokens.adapters, tokens.lora = places_T.data_ptr(), ctypes.addressof(self._table)
        tokens.has_scales = any(
            change.scale_O is not None for number in used for change in self._store.adapters[number].layers.values()
        )
        hidden_TE: Tensor | None = None
        if any(self._store.adapters[number].embedding is not None for number in used):
            with self._store.applied(adapters_T):
                hidden_TE = self._adapted.embed(inputs.ids_T, inputs.positions_T).float().contiguous()
            tokens.hidden = hidden_TE.data_ptr()
        tokens.kept = places_T, hidden_TE, self._table  # alive as long as the pointers to them

    def _build(self) -> None:
        adapters = self._store.adapters
        for number in self._layers.keys() - adapters.keys():
            del self._layers[number], self._references[number]
        for number in adapters.keys() - self._layers.keys():
            self._references[number] = []
            self._layers[number] = [
                self._layer(adapters[number].layers.get(name), self._references[number]) for name in self._names
            ]
        self._numbers = tuple(adapters)
        layers = [CLoraLayer()] * len(self._names)  # without an adapter
        for number in self._numbers:
            layers += self._layers[number]
        self._table = (CLoraLayer * len(layers))(*layers)

    def _layer(self, change: LayerChange | None, references: list[Any]) -> CLoraLayer:
        if change is None:
            return CLoraLayer()
        parts = [to_cpart(part, references) for part in change.parts]
        vectors = [None if one is None else one.float().contiguous() for one in (change.scale_O, change.shift_O)]
        references += [array := (CLoraPart * len(parts))(*parts), *vectors]
        return CLoraLayer(array, len(parts), *(None if one is None else one.data_ptr() for one in vectors))


def to_cpart(part: LoraPart, references: list[Any]) -> CLoraPart:
    count = part.columns.stop - part.start
    if part.b_OR is None:
        packed = pack_floats(part.a_RI)
        assert packed is not None
        references += [packed, matrix := packed.matrix]
        return CLoraPart(None, None, 0, part.start, count, ctypes.pointer(matrix))
    a_RI, b_RO = part.a_RI.float().contiguous(), part.b_OR.t().float().contiguous()
    references += [a_RI, b_RO]
    return CLoraPart(a_RI.data_ptr(), b_RO.data_ptr(), len(a_RI), part.start, count, None)


def layer_names(arch: Architecture) -> list[str]:
    """The matrices that adapters may change, in the order of csrc/network.h."""
    names = []
    for i in range(arch.num_layers):
        layer = f"model.layers.{i}"
        names += [f"{layer}.{name}" for name in matrix_names(arch, i)]
        names += [f"{layer}.mlp.gate", f"{layer}.mlp.shared_expert_gate"]
        for expert in range(arch.num_experts):
            names += [f"{layer}.mlp.experts.{leaf}.{expert}" for leaf in ("gate_up_proj", "down_proj")]
    return [*names, HEAD]


def matrix_names(arch: Architecture, layer: int) -> tuple[str, str, str, str, str, str]:
    """Those of attention and of the feed-forward layer; of experts, those for all tokens."""
    query = "self_attn.qkv_proj"
    if arch.latent_size:
        query = "self_attn.q_b_proj" if arch.query_latent_size else "self_attn.q_proj"
    names = query, "self_attn.o_proj"
    latent = "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"
    if arch.recurrence is not None and arch.recurrence.kind == "rwkv":
        return *names, "", "", *latent  # adapters of what mixes channels are not known
    if arch.has_experts(layer):
        return *names, "mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj", *latent
    return *names, "mlp.gate_up_proj" if arch.has_gate else "mlp.up_proj", "mlp.down_proj", *latent
