"""AdapterStore: the loaded adapters of a network, and how a forward pass applies them to the rows that ask for them.

Adapters have numbers from 1, which are never used again; 0 is the network without an adapter.

Shapes: T tokens of the step, or rows of them · R rank · I inputs · O outputs · E hidden
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.adapters.layer_changes import (
    AdapterChanges,
    LayerChange,
    SumOverRanks,
    TiedHead,
    changes_of,
    is_norm,
    no_sum,
)
from flambeau.llm.adapters.lora_weights import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    AdapterTarget,
    LoraPart,
    can_adapt,
    read_adapter,
)
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.groups import JoinedLinear

ROUTER = ".mlp.gate"
INNER = ".inner"  # of a layer whose outputs are summed over all ranks
MAX_STACKED = 64  # tokens of a step that uses stacks: with more, each adapter has enough to compute
Rows = slice | Tensor


class AdapterStore:
    """Adapters by number.

    Prompts are computed one adapter after another. In a decode step, where many adapters have a token or two each, all
    are computed for all tokens, and what is not a token's own is multiplied by zero: a few calls instead of many.
    """

    def __init__(self, target: AdapterTarget, model: Transformer) -> None:
        self._target, self._model = target, model
        self.adapters: dict[int, AdapterChanges] = {}
        self._stacks: dict[str, LoraStack | None] = {}  # of all adapters, by layer, made when they are needed
        # Of the pass that runs: the number of each token's adapter, and the rows of each adapter.
        self._numbers_T: Tensor | None = None
        self._groups: list[tuple[int, AdapterChanges, Rows]] = []
        self._is_stacked = False

    def load(self, number: int, folder: Path, total: SumOverRanks | None = None) -> None:
        """Read an adapter; raises CheckpointError if it cannot be used. `total` is that of several ranks."""
        total = no_sum if total is None and self._target.shard is not None else total
        self.adapters[number] = changes_of(read_adapter(folder, self._target), self._model, total)
        self._stacks = {}

    def unload(self, number: int) -> None:
        """Free an adapter that no sequence uses; unknown numbers are ignored."""
        self.adapters.pop(number, None)
        self._stacks = {}

    def snapshot(self) -> AdapterStore:
        """The adapters that are loaded now, for passes of another thread."""
        other = AdapterStore(self._target, self._model)
        other.adapters = dict(self.adapters)
        return other

    @contextmanager
    def applied(self, adapters_T: Tensor) -> Iterator[None]:
        """Passes of the adapted network in this context apply these adapters to their rows."""
        numbers: list[int] = adapters_T.tolist()
        used = [number for number in dict.fromkeys(numbers) if number]
        before = self._numbers_T, self._groups, self._is_stacked
        self._numbers_T = adapters_T.to(self._target.device)
        self._groups = [(each, self.adapters[each], rows_of(numbers, each, self._target.device)) for each in used]
        self._is_stacked = uses_stacks(len(numbers), len(used), len(self.adapters))
        try:
            yield
        finally:
            self._numbers_T, self._groups, self._is_stacked = before

    def apply_to(self, y_TO: Tensor, layer: str, x_TI: Tensor) -> Tensor:
        """The outputs of a layer with the adapters of the rows; the given ones may be changed."""
        if self._is_stacked and (stack := self._stack(layer)) is not None:
            assert self._numbers_T is not None
            return stack.apply_to(y_TO, x_TI, self._numbers_T)
        for _, adapter, rows in self._groups:
            if (change := adapter.layers.get(layer)) is not None:
                y_TO[rows] = change.apply_to(y_TO[rows], x_TI[rows])
        return y_TO

    def apply_to_expert(self, y_TO: Tensor, layer: str, x_TI: Tensor, tokens_T: Tensor) -> Tensor:
        """The same for an expert, which has some of the step's tokens."""
        assert self._numbers_T is not None
        own_T = self._numbers_T[tokens_T]
        for number, adapter, _ in self._groups:
            if (change := adapter.layers.get(layer)) is not None:
                rows = (own_T == number).nonzero().flatten()
                y_TO[rows] = change.apply_to(y_TO[rows], x_TI[rows])
        return y_TO

    def normalize(self, y: Tensor, layer: str, x: Tensor) -> Tensor:
        """The outputs of a norm; rows whose adapter has its own weights are computed again."""
        for _, adapter, rows in self._groups:
            if (norm := adapter.norms.get(layer)) is not None:
                y[rows] = norm(x[rows])
        return y

    def embed(self, y_TE: Tensor, ids_T: Tensor) -> Tensor:
        """The embeddings of the tokens."""
        for _, adapter, rows in self._groups:
            if adapter.embedding is not None:
                y_TE[rows] = adapter.embedding.apply_to(y_TE[rows], ids_T[rows])
        return y_TE

    def _stack(self, layer: str) -> LoraStack | None:
        """All adapters of a layer; None if none changes it, or if one has its own matrix."""
        if layer not in self._stacks:
            changes = {n: adapter.layers[layer] for n, adapter in self.adapters.items() if layer in adapter.layers}
            can_stack = changes and not any(change.has_matrix for change in changes.values())
            self._stacks[layer] = LoraStack(changes) if can_stack else None
        return self._stacks[layer]


class LoraStack:
    """The changes of all adapters to a layer, parts of the same outputs side by side."""

    def __init__(self, changes: Mapping[int, LayerChange]) -> None:
        by_columns: dict[tuple[int, int], list[tuple[int, LoraPart]]] = {}
        for number, change in changes.items():
            for part in change.parts:
                by_columns.setdefault((part.start, part.columns.stop), []).append((number, part))
        everything = [pair for pairs in by_columns.values() for pair in pairs]
        self._scales = LoraScales(changes) if any(needs_scales(change) for change in changes.values()) else None
        self._a_RI: Tensor | None = None
        if everything:
            self._a_RI = torch.cat([part.a_RI for _, part in everything])
            ranks = torch.tensor([len(part.a_RI) for _, part in everything])
            numbers = torch.tensor([number for number, _ in everything])
            self._numbers_R = numbers.repeat_interleave(ranks).to(self._a_RI.device)
        self._outputs: list[tuple[slice, slice, Tensor]] = []  # ranks, outputs and B of each group of outputs
        first = 0
        for (start, stop), pairs in by_columns.items():
            b_OR = torch.cat([part.b_OR for _, part in pairs if part.b_OR is not None], dim=1)
            self._outputs.append((slice(first, first + b_OR.shape[1]), slice(start, stop), b_OR))
            first += b_OR.shape[1]

    def apply_to(self, y_TO: Tensor, x_TI: Tensor, numbers_T: Tensor) -> Tensor:
        """The outputs of each token with its own adapter."""
        if self._scales is not None:
            y_TO = self._scales.apply_to(y_TO, numbers_T)
        if self._a_RI is None:
            return y_TO
        inner_TR = x_TI.to(self._a_RI.dtype) @ self._a_RI.t()
        inner_TR.masked_fill_(numbers_T.unsqueeze(1) != self._numbers_R, 0)  # also what is not finite
        for ranks, columns, b_OR in self._outputs:
            y_TO[:, columns] += inner_TR[:, ranks] @ b_OR.t()
        return y_TO


class LoraScales:
    """The scales and shifts of all adapters' outputs, by number."""

    def __init__(self, changes: Mapping[int, LayerChange]) -> None:
        vectors = [one for change in changes.values() for one in (change.scale_O, change.shift_O) if one is not None]
        width, device = len(vectors[0]), vectors[0].device
        self._scales_NO = torch.ones(1 + len(changes), width, device=device)
        self._shifts_NO = torch.zeros_like(self._scales_NO)
        self._rows = torch.zeros(1 + max(changes), dtype=torch.int64, device=device)  # of each number
        for row, (number, change) in enumerate(changes.items(), 1):
            self._rows[number] = row
            if change.scale_O is not None:
                self._scales_NO[row] = change.scale_O
            if change.shift_O is not None:
                self._shifts_NO[row] = change.shift_O

    def apply_to(self, y_TO: Tensor, numbers_T: Tensor) -> Tensor:
        rows_T = self._rows[numbers_T.where(numbers_T < len(self._rows), 0)]
        return (y_TO * self._scales_NO[rows_T] + self._shifts_NO[rows_T]).to(y_TO.dtype)


def needs_scales(change: LayerChange) -> bool:
    return change.scale_O is not None or change.shift_O is not None


def uses_stacks(num_tokens: int, num_used: int, num_loaded: int) -> bool:
    """Whether all loaded adapters are computed for all tokens: if most are in use, with few tokens each."""
    return 1 < num_used <= num_tokens <= MAX_STACKED and 2 * num_used >= num_loaded


def rows_of(numbers: list[int], number: int, device: torch.device) -> Rows:
    """The rows that have this number: a slice where they are neighbors."""
    rows = [i for i, other in enumerate(numbers) if other == number]
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


# ---- the adapted network ----


class Adapted(nn.Module):
    """A layer of the network by its place in it, as others may take its place; and what adapters do to it."""

    def __init__(self, owner: nn.Module, key: str, layer: str, store: AdapterStore) -> None:
        super().__init__()
        self._place = owner._modules, key  # not a child: the layers of the network are those of its owner
        self._layer, self._store = layer, store

    @property
    def inner(self) -> Any:
        modules, key = self._place
        return modules[key]


class AdaptedLinear(Adapted):
    """A linear layer, quantized or not."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        flat = self._store.apply_to(y.view(-1, y.shape[-1]), self._layer, x.reshape(-1, x.shape[-1]))
        return flat.view(y.shape)


class AdaptedRouter(AdaptedLinear):
    """The layer that chooses experts; some networks compute it in float32."""

    def wide(self, x_TI: Tensor) -> Tensor:
        return self._store.apply_to(F.linear(x_TI.float(), self.inner.weight.float()), self._layer, x_TI)


class AdaptedHead(AdaptedLinear):
    """Tied embeddings as the last layer."""

    @property
    def inner(self) -> Any:
        return TiedHead(super().inner)


class AdaptedNorm(Adapted):
    """A norm, whose weights adapters may replace."""

    @property
    def weight(self) -> Tensor:
        return self.inner.weight  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self._store.normalize(self.inner(x), self._layer, x)


class AdaptedEmbedding(Adapted):
    """The embeddings of tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        return self._store.embed(self.inner(ids), ids)


class AdaptedExperts(Experts):
    """Experts, each with what adapters do to it; made from others, whose weights it shares."""

    _layer: str
    _store: AdapterStore

    def forward(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        return self.compute_each(x_TE, chosen_TA, weights_TA)

    def multiply(self, leaf: str, expert: int, x: Tensor, bias: Tensor | None, tokens: Tensor) -> Tensor:
        y = super().multiply(leaf, expert, x, bias, tokens)
        return self._store.apply_to_expert(y, f"{self._layer}.{leaf}.{expert}", x, tokens)


def with_adapters(model: Transformer, store: AdapterStore) -> Transformer:
    """The same network with adapters: it shares all weights, and the given one stays as it is."""
    view = shallow_copy(model, "", store)
    assert isinstance(view, Transformer)
    if view.lm_head is None:
        view.lm_head = AdaptedHead(model.model, "embed_tokens", HEAD, store)
    return view


def shallow_copy(module: nn.Module, name: str, store: AdapterStore) -> nn.Module:
    """A module with its own list of children, of which those that can be adapted are others."""
    other = copy.copy(module)
    other._modules = {
        key: None if child is None else adapted(module, key, child, f"{name}.{key}" if name else key, store)
        for key, child in module._modules.items()
    }
    return other


def adapted(owner: nn.Module, key: str, module: nn.Module, name: str, store: AdapterStore) -> nn.Module:
    layer = name.replace(INNER, "")
    if layer.endswith(EXPERTS) and isinstance(module, Experts):
        experts = copy.copy(module)  # with the same lists of weights, which others may replace
        experts.__class__ = AdaptedExperts
        experts._layer, experts._store = layer, store  # type: ignore[assignment]
        return experts
    if can_adapt(layer) and (not module._modules or isinstance(module, JoinedLinear)):
        kind = AdaptedRouter if layer.endswith(ROUTER) else AdaptedLinear
        return kind(owner, key, layer, store)
    if layer == EMBEDDING:
        return AdaptedEmbedding(owner, key, layer, store)
    if is_norm(module, layer):
        return AdaptedNorm(owner, key, layer, store)
    return shallow_copy(module, name, store)
