"""AdapterStore: the loaded adapters of a network, and how a forward pass adds them to the rows that ask for them.

Adapters have numbers from 1, which are never used again; 0 is the network without an adapter.

Shapes: T tokens of the step · R rank · I inputs · O outputs
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.llm.adapters.lora_weights import ADAPTED, AdapterTarget, LoraAdapter, LoraPart, read_adapter
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.groups import JoinedLinear

INNER = ".inner"  # of a layer whose outputs are summed over all ranks
MAX_STACKED = 64  # tokens of a step that uses stacks: with more, each adapter has enough to compute
Rows = slice | Tensor


class AdapterStore:
    """Adapters by number.

    Prompts are computed one adapter after another. In a decode step, where many adapters have a token or two each, all
    are computed for all tokens, and what is not a token's own is multiplied by zero: a few calls instead of many.
    """

    def __init__(self, target: AdapterTarget) -> None:
        self._target = target
        self.adapters: dict[int, LoraAdapter] = {}
        self._stacks: dict[str, LoraStack | None] = {}  # of all adapters, by layer, made when they are needed
        # Of the pass that runs: the rows of each adapter, or the number of each token's adapter.
        self._groups: list[tuple[LoraAdapter, Rows]] = []
        self._numbers_T: Tensor | None = None

    def load(self, number: int, folder: Path) -> None:
        """Read an adapter; raises CheckpointError if it cannot be used."""
        self.adapters[number] = read_adapter(folder, self._target)
        self._stacks = {}

    def unload(self, number: int) -> None:
        """Free an adapter that no sequence uses; unknown numbers are ignored."""
        self.adapters.pop(number, None)
        self._stacks = {}

    @contextmanager
    def applied(self, adapters_T: Tensor) -> Iterator[None]:
        """Passes of the adapted network in this context add these adapters to their rows."""
        numbers: list[int] = adapters_T.tolist()
        used = [number for number in dict.fromkeys(numbers) if number]
        if uses_stacks(len(numbers), len(used), len(self.adapters)):
            self._numbers_T = adapters_T.to(self._target.device)
        else:
            self._groups = [(self.adapters[number], rows_of(numbers, number, self._target.device)) for number in used]
        try:
            yield
        finally:
            self._groups, self._numbers_T = [], None

    def add_to(self, y_TO: Tensor, layer: str, x_TI: Tensor) -> None:
        """Add what the adapters of the rows say about this layer."""
        if self._numbers_T is not None:
            if (stack := self._stack(layer)) is not None:
                stack.add_to(y_TO, x_TI, self._numbers_T)
            return
        for adapter, rows in self._groups:
            for part in adapter.parts.get(layer, ()):
                delta = x_TI[rows] @ part.a_RI.t() @ part.b_OR.t()
                if isinstance(rows, slice):
                    y_TO[rows, part.columns] += delta
                else:
                    y_TO[:, part.columns].index_add_(0, rows, delta)

    def _stack(self, layer: str) -> LoraStack | None:
        """All adapters of a layer; None if none changes it."""
        if layer not in self._stacks:
            parts = {n: adapter.parts[layer] for n, adapter in self.adapters.items() if layer in adapter.parts}
            self._stacks[layer] = LoraStack(parts) if parts else None
        return self._stacks[layer]


class LoraStack:
    """The parts of all adapters of a layer, those of the same outputs side by side."""

    def __init__(self, parts: Mapping[int, Sequence[LoraPart]]) -> None:
        by_columns: dict[tuple[int, int], list[tuple[int, LoraPart]]] = {}
        for number, own in parts.items():
            for part in own:
                by_columns.setdefault((part.start, len(part.b_OR)), []).append((number, part))
        everything = [pair for pairs in by_columns.values() for pair in pairs]
        self._a_RI = torch.cat([part.a_RI for _, part in everything])
        ranks = torch.tensor([len(part.a_RI) for _, part in everything])
        numbers = torch.tensor([number for number, _ in everything])
        self._numbers_R = numbers.repeat_interleave(ranks).to(self._a_RI.device)
        self._outputs: list[tuple[slice, slice, Tensor]] = []  # ranks, outputs and B of each group of outputs
        first = 0
        for (start, count), pairs in by_columns.items():
            b_OR = torch.cat([part.b_OR for _, part in pairs], dim=1)
            self._outputs.append((slice(first, first + b_OR.shape[1]), slice(start, start + count), b_OR))
            first += b_OR.shape[1]

    def add_to(self, y_TO: Tensor, x_TI: Tensor, numbers_T: Tensor) -> None:
        """Add to each token what its own adapter says."""
        inner_TR = (x_TI @ self._a_RI.t()).mul_(numbers_T.unsqueeze(1) == self._numbers_R)
        for ranks, columns, b_OR in self._outputs:
            y_TO[:, columns] += inner_TR[:, ranks] @ b_OR.t()


def uses_stacks(num_tokens: int, num_used: int, num_loaded: int) -> bool:
    """Whether all loaded adapters are computed for all tokens: if most are in use, with few tokens each."""
    return 1 < num_used <= num_tokens <= MAX_STACKED and 2 * num_used >= num_loaded


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
    is_layer = not module._modules or isinstance(module, JoinedLinear)
    if layer.rpartition(".")[2] in ADAPTED and is_layer and ".experts." not in layer:
        return AdaptedLinear(module, layer, store)
    other = copy.copy(module)
    other._modules = {
        key: None if child is None else shallow_copy(child, f"{name}.{key}" if name else key, store)
        for key, child in module._modules.items()
    }
    return other
