"""MergeOnLoad: makes an adapter a part of the weights of a network while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.adapters.layer_changes import (
    BaseLayer,
    LayerChange,
    SumOverRanks,
    changed_norm,
    cut_rows,
    embedding_change,
    is_expert,
    layer_change,
    no_sum,
    sorted_tensors,
    squares_of,
    weight_of,
)
from flambeau.llm.adapters.lora_weights import EMBEDDING, EXPERTS, HEAD, AdapterTarget, read_adapter
from flambeau.llm.errors import LLMError
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.settings import read_quantization

Arrived = Callable[[str, nn.Module], nn.Module | None]


def check_merge(adapters: Mapping[str, str]) -> None:
    """Raise unless there is exactly one adapter to merge."""
    if len(adapters) != 1:
        found = ", ".join(adapters) or "none"
        raise LLMError(f"merge_lora needs exactly one adapter in lora_adapters, and there is {found}; name one")


class MergeOnLoad:
    """For `load_model(arrived=…)`: changes each layer as soon as it is loaded; `then` is called after that.

    The weights of the result are rounded to the type of the network once. With several ranks, `total` adds up what each
    has; layers arrive in the same order on all of them.
    """

    def __init__(
        self, folder: Path, target: AdapterTarget, then: Arrived | None, total: SumOverRanks | None = None
    ) -> None:
        if read_quantization(target.arch.source) is not None:
            raise LLMError(
                "merge_lora needs the original weights, and the checkpoint holds quantized ones; leave merge_lora out, "
                "and the adapter is added while the model runs"
            )
        self._target, self._then = target, then
        self._total = no_sum if total is None and target.shard is not None else total
        self._adapter = read_adapter(folder, replace(target, dtype=torch.float32))
        with on_meta_device(torch.float32):
            network = Transformer(target.local)  # of which only the kinds of layers matter
        self._linears, self._norms, self._embedding = sorted_tensors(self._adapter, network)
        self._head: nn.Linear | None = None  # of tied embeddings that are not tied with the adapter

    def __call__(self, name: str, module: nn.Module) -> nn.Module | None:
        if name == EMBEDDING:
            self._change_embedding(module)
        elif name.endswith(EXPERTS) and isinstance(module, Experts):
            self._change_experts(name, module)
        elif name in self._norms:
            module._parameters.update(changed_norm(module, self._norms[name])._parameters)
        elif isinstance(module, nn.Linear) and (change := self._change_of(name, module)) is not None:
            merge_linear(module, change)
        return None if self._then is None else self._then(name, module)

    def finish(self, model: Transformer) -> None:
        """Give a network with tied embeddings a last layer of its own, if the adapter changes one of the two."""
        if model.lm_head is None and self._head is not None:
            other = None if self._then is None else self._then(HEAD, self._head)
            model.lm_head = self._head if other is None else other

    def _change_of(self, name: str, layer: nn.Linear) -> LayerChange | None:
        weight = layer.weight.detach()
        base = BaseLayer(lambda: weight_of(layer), layer.bias, len(weight), weight.device, torch.float32)
        parts, whole = self._adapter.parts.get(name, []), self._linears.get(name, [])
        cut = cut_rows(name, parts) if self._total is not None else []
        squares = None
        if cut and self._total is not None:
            squares = self._total(torch.cat([squares_of(part, base.weight()) for part in cut]))
        return layer_change(name, parts, whole, self._adapter.tokens.get(name), base, squares)

    def _change_experts(self, name: str, experts: Experts) -> None:
        for layer, parts in self._adapter.parts.items():
            if is_expert(layer) and layer.startswith(f"{name}."):
                leaf, _, number = layer.removeprefix(f"{name}.").partition(".")
                weight_OI = getattr(experts, leaf).data[int(number)]
                for part in parts:
                    weight_OI[part.columns] = (weight_OI[part.columns].float() + part.delta).to(weight_OI.dtype)

    @torch.inference_mode()
    def _change_embedding(self, module: Any) -> None:
        weight_VE = module.weight.detach()
        change = embedding_change(self._adapter, self._embedding, weight_VE.float)
        if self._target.arch.tied_embeddings:
            head = linear_of(weight_VE)
            head_change = self._change_of(HEAD, head)
            if change is not None or head_change is not None:
                self._head = head
                if head_change is not None:
                    merge_linear(head, head_change)
        if change is not None:
            ids_V = torch.arange(len(weight_VE), device=weight_VE.device)
            changed_VE = change.apply_to(weight_VE.float().clone(), ids_V).to(weight_VE.dtype)
            module.weight = nn.Parameter(changed_VE, requires_grad=False)


@torch.inference_mode()
def merge_linear(layer: nn.Linear, change: LayerChange) -> None:
    """Make a change a part of a layer."""
    weight_OI, dtype = layer.weight.detach().float().clone(), layer.weight.dtype
    if change.scale_O is not None:
        weight_OI *= change.scale_O.unsqueeze(1)
    for part in change.parts:
        weight_OI[part.columns] += part.delta
    layer.weight = nn.Parameter(weight_OI.to(dtype), requires_grad=False)
    bias_O = None if layer.bias is None else layer.bias.detach().float()
    if bias_O is not None and change.scale_O is not None:
        bias_O = bias_O * change.scale_O
    if change.shift_O is not None:
        bias_O = change.shift_O if bias_O is None else bias_O + change.shift_O
    layer.bias = None if bias_O is None else nn.Parameter(bias_O.to(dtype), requires_grad=False)


def linear_of(weight_OI: Tensor) -> nn.Linear:
    """A linear layer with these weights."""
    with torch.device("meta"):
        linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    return linear
