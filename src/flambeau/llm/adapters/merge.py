"""merge_on_load: adds an adapter to the weights of a network while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.adapters.lora_weights import AdapterTarget, read_adapter
from flambeau.llm.errors import LLMError
from flambeau.llm.quantize.settings import read_quantization

Arrived = Callable[[str, nn.Module], nn.Module | None]


def check_merge(adapters: Mapping[str, str]) -> None:
    """Raise unless there is exactly one adapter to merge."""
    if len(adapters) != 1:
        found = ", ".join(adapters) or "none"
        raise LLMError(f"merge_lora needs exactly one adapter in lora_adapters, and there is {found}; name one")


def with_lengths(rows_OI: Tensor, lengths_O: Tensor) -> Tensor:
    """Rows in the same directions, of these lengths."""
    return F.normalize(rows_OI, dim=1) * lengths_O.unsqueeze(1)


def merge_on_load(folder: Path, target: AdapterTarget, then: Arrived | None) -> Arrived:
    """For `load_model(arrived=…)`: adds an adapter to each layer as soon as it is loaded; `then` is called after that.

    The weights of the result are rounded to the type of the network once.
    """
    if read_quantization(target.arch.source) is not None:
        raise LLMError(
            "merge_lora needs the original weights, and the checkpoint holds quantized ones; leave merge_lora out, and "
            "the adapter is added while the model runs"
        )
    adapter = read_adapter(folder, replace(target, dtype=torch.float32), merges=True)

    def arrived(name: str, module: nn.Module) -> nn.Module | None:
        if parts := adapter.parts.get(name):
            assert isinstance(module, nn.Linear)
            weight = module.weight.detach().float()
            weight = weight.clone() if weight.data_ptr() == module.weight.data_ptr() else weight
            for part in parts:
                rows = weight[part.columns] + part.b_OR @ part.a_RI
                weight[part.columns] = rows if part.lengths_O is None else with_lengths(rows, part.lengths_O)
            module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
        return None if then is None else then(name, module)

    return arrived
