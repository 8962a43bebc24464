"""AdapterStore: the loaded adapters of a network, and how a forward pass adds them to the rows that ask for them.

Adapters have numbers from 1, which are never used again; 0 is the network without an adapter.

Shapes: T tokens of the step · R rank · I inputs · O outputs
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.llm.adapters.lora_weights import ADAPTED, AdapterTarget, LoraAdapter, read_adapter
from flambeau.llm.models.transformer import Transformer

INNER = ".inner"  # of a layer whose outputs are summed over all ranks
Rows = slice | Tensor


class AdapterStore:
    """Adapters by number."""

    def __init__(self, target: AdapterTarget) -> None:
        self._target = target
        self.adapters: dict[int, LoraAdapter] = {}
        self._groups: list[tuple[LoraAdapter, Rows]] = []  # of the pass that runs

    def load(self, number: int, folder: Path) -> None:
        """Read an adapter; raises CheckpointError if it cannot be used."""
        self.adapters[number] = read_adapter(folder, self._target)

    def unload(self, number: int) -> None:
        """Free an adapter that no sequence uses; unknown numbers are ignored."""
        self.adapters.pop(number, None)

    @contextmanager
    def applied(self, adapters_T: Tensor) -> Iterator[None]:
        """Passes of the adapted network in this context add these adapters to their rows."""
        numbers: list[int] = adapters_T.tolist()
        self._groups = [
            (self.adapters[number], rows_of(numbers, number, self._target.device))
            for number in dict.fromkeys(numbers)
            if number
        ]
        try:
            yield
        finally:
            self._groups = []

    def add_to(self, y_TO: Tensor, layer: str, x_TI: Tensor) -> None:
        """Add what the adapters of the rows say about this layer."""
        for adapter, rows in self._groups:
            for part in adapter.parts.get(layer, ()):
                delta = x_TI[rows] @ part.a_RI.t() @ part.b_OR.t()
                if isinstance(rows, slice):
                    y_TO[rows, part.columns] += delta
                else:
                    y_TO[:, part.columns].index_add_(0, rows, delta)


def rows_of(numbers: list[int], number: int, device: torch.device) -> Rows:
    """The rows that have this number: a slice where they are neighbors."""
    rows = [i for i, other in enumerate(numbers) if other == number]
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


class AdaptedLinear(nn.Module):
    """A linear layer, quantized or not, and what adapters add to it."""

    def __init__(self, inner: nn.Module, layer: str, store: AdapterStore) -> None:
        super().__init__()
        self.inner, self._layer, self._store = inner, layer, store

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self._store.add_to(y.view(-1, y.shape[-1]), self._layer, x.reshape(-1, x.shape[-1]))
        return y


def with_adapters(model: Transformer, store: AdapterStore) -> Transformer:
    """The same network with adapters: it shares all weights, and the given one stays as it is."""
    view = shallow_copy(model, "", store)
    assert isinstance(view, Transformer)
    return view


def shallow_copy(module: nn.Module, name: str, store: AdapterStore) -> nn.Module:
    """A module with its own list of children, of which those that can be adapted are wrapped."""
    layer = name.replace(INNER, "")
    if layer.rpartition(".")[2] in ADAPTED and not module._modules and ".experts." not in layer:
        return AdaptedLinear(module, layer, store)
    other = copy.copy(module)
    other._modules = {
        key: None if child is None else shallow_copy(child, f"{name}.{key}" if name else key, store)
        for key, child in module._modules.items()
    }
    return other
