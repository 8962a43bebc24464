"""What an adapter does to the layers of a network: computed from its tensors and from the weights that they change.

The outputs of a layer become `scale · y + shift + B · A · x`. DoRA scales outputs, because the rows of its weights have
lengths of their own; a layer that was trained as a whole scales them by 0 and adds those of its own matrix.

Shapes: T tokens · R rank · I inputs · O outputs · V vocabulary · E hidden · K trained tokens
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.adapters.lora_config import MERGE
from flambeau.llm.adapters.lora_weights import (
    COLUMN_PARALLEL,
    EMBEDDING,
    EXPERTS,
    HEAD,
    EmbeddingLora,
    LoraAdapter,
    LoraPart,
    TokenRows,
    WholeTensor,
    can_adapt,
)
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models import norms
from flambeau.llm.models.embeddings import NarrowEmbedding, RowEmbedding, tied_logits
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.groups import JoinedLinear

INNER = "inner"  # the only child of a layer whose outputs are summed over all ranks
SumOverRanks = Callable[[Tensor], Tensor]
PROBED_INPUTS = 256  # of a layer whose weights are found by multiplying with it


@dataclass(frozen=True, slots=True)
class LayerChange:
    """What an adapter does to the outputs of a linear layer."""

    parts: Sequence[LoraPart] = ()
    scale_O: Tensor | None = None
    shift_O: Tensor | None = None

    @property
    def has_matrix(self) -> bool:
        """Whether some outputs have a matrix of their own."""
        return any(part.b_OR is None for part in self.parts)

    def apply_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """The outputs with the adapter; the given ones may be changed."""
        if self.scale_O is not None:
            y_TO = y_TO * self.scale_O.to(y_TO.dtype)
        if self.shift_O is not None:
            y_TO = y_TO + self.shift_O.to(y_TO.dtype)
        for part in self.parts:
            y_TO[:, part.columns] += delta_of(part, x_TI)
        return y_TO


def delta_of(part: LoraPart, x_TI: Tensor) -> Tensor:
    inner_TR = x_TI.to(part.a_RI.dtype) @ part.a_RI.t()
    return inner_TR if part.b_OR is None else inner_TR @ part.b_OR.t()


@dataclass(frozen=True, slots=True)
class EmbeddingChange:
    """What an adapter does to the embeddings of tokens."""

    weight_VE: Tensor | None = None  # trained as a whole
    lora: EmbeddingLora | None = None
    scale_E: Tensor | None = None  # of DoRA
    rows: TokenRows | None = None

    def apply_to(self, y_TE: Tensor, ids_T: Tensor) -> Tensor:
        if self.weight_VE is not None:
            y_TE = F.embedding(ids_T, self.weight_VE)
        if self.scale_E is not None:
            y_TE = y_TE * self.scale_E.to(y_TE.dtype)
        if self.lora is not None:
            y_TE = y_TE + F.embedding(ids_T, self.lora.a_VR) @ self.lora.b_RE
        if self.rows is not None:
            is_own_TK = ids_T.unsqueeze(1) == self.rows.ids_K
            own_TE = self.rows.rows_KE[is_own_TK.int().argmax(dim=1)]
            y_TE = torch.where(is_own_TK.any(dim=1, keepdim=True), own_TE, y_TE)
        return y_TE


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChanges:
    """All changes of an adapter, by the names of layers in the network."""

    layers: dict[str, LayerChange] = field(default_factory=dict)
    norms: dict[str, nn.Module] = field(default_factory=dict)  # with the adapter's weights
    embedding: EmbeddingChange | None = None


def changes_of(adapter: LoraAdapter, model: Transformer, total: SumOverRanks | None = None) -> AdapterChanges:
    """What an adapter does to this network; raises CheckpointError if something cannot be changed.

    With several ranks, `total` adds up what each has; it is called once at most, by all or by none.
    """
    linears, norm_tensors, embedding = sorted_tensors(adapter, model)
    names = {*adapter.parts, *linears, *([HEAD] if HEAD in adapter.tokens else [])}
    squares = {} if total is None else squares_of_cut_rows(adapter, model, total)
    layers: dict[str, LayerChange] = {}
    for name in sorted(names):
        if is_expert(name):
            layers[name] = LayerChange(adapter.parts[name])
            continue
        tokens = adapter.tokens.get(name)
        base = BaseLayer.of(model, name)
        parts, whole = adapter.parts.get(name, []), linears.get(name, [])
        change = layer_change(name, parts, whole, tokens, base, squares.get(name))
        if change is not None:
            layers[name] = change
    return AdapterChanges(
        layers=layers,
        norms={name: changed_norm(find_layer(model, name), tensors) for name, tensors in norm_tensors.items()},
        embedding=embedding_change(adapter, embedding, lambda: embeddings_of(model)),
    )


def sorted_tensors(
    adapter: LoraAdapter, model: Transformer
) -> tuple[dict[str, list[WholeTensor]], dict[str, list[WholeTensor]], Tensor | None]:
    """What was trained as a whole: linear layers, norms and embeddings; what is as in the network is left out."""
    linears: dict[str, list[WholeTensor]] = {}
    found_norms: dict[str, list[WholeTensor]] = {}
    embedding: Tensor | None = None
    for whole in adapter.whole:
        module, owner = find_layer(model, whole.owner), whole.owner
        if owner == EMBEDDING:
            embedding = whole.tensor
        elif can_adapt(owner) and whole.leaf in ("weight", "bias"):
            linears.setdefault(owner, []).append(whole)
        elif is_norm(module, owner):
            found_norms.setdefault(owner, []).append(whole)
        elif not is_unchanged(whole, getattr(module, whole.leaf, None)):
            raise CheckpointError(f"the adapter has its own {whole.parameter}, which cannot be changed here; {MERGE}")
    return linears, found_norms, embedding


def is_expert(name: str) -> bool:
    return any(f"{experts}." in name for experts in EXPERTS)


def is_norm(module: nn.Module, name: str) -> bool:
    """Whether adapters may replace its weights."""
    is_scale = isinstance(module, norms.PositionScale)  # of queries, by their positions
    return type(module).__module__ == norms.__name__ and not is_scale and ".mixer." not in name


def find_layer(model: nn.Module, name: str) -> nn.Module:
    """A module by its name in a network of one rank."""
    module: Any = model
    if name == HEAD and module.lm_head is None:
        return TiedHead(module.model.embed_tokens)
    for key in name.split("."):
        module = module._modules[INNER] if [*module._modules] == [INNER] else module
        module = module._modules[key]
    return module._modules[INNER] if [*module._modules] == [INNER] else module  # type: ignore[no-any-return]


class TiedHead(nn.Module):
    """The embeddings as the last layer."""

    bias = None

    def __init__(self, embedding: nn.Embedding | RowEmbedding) -> None:
        super().__init__()
        self._embedding = [embedding]  # not a child: it has another name in the network

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        [embedding] = self._embedding
        return embedding.rows(x) if isinstance(embedding, RowEmbedding) else tied_logits(x, embedding.weight)


# ---- linear layers ----


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """A linear layer before it is changed, quantized or not."""

    weight: Callable[[], Tensor]  # [O, I] in float32
    bias_O: Tensor | None
    width: int
    device: torch.device
    dtype: torch.dtype  # of the network

    @classmethod
    def of(cls, model: Transformer, name: str) -> BaseLayer:
        layer: Any = find_layer(model, name)
        embedding = model.model.embed_tokens
        first: Tensor = next(iter(embedding.state_dict().values()))
        dtype = embedding.dtype if isinstance(embedding, RowEmbedding | NarrowEmbedding) else first.dtype
        return cls(lambda: weight_of(layer), layer.bias, width_of(layer, model.arch.vocab_size), first.device, dtype)


def width_of(layer: Any, vocab_size: int) -> int:
    """The number of a layer's outputs."""
    if isinstance(layer, JoinedLinear):
        return sum(width_of(part, vocab_size) for part in layer.parts)
    return vocab_size if isinstance(layer, TiedHead) else layer.out_features


@torch.inference_mode()
def weight_of(layer: Any) -> Tensor:
    """The weights [O, I] of a linear layer in float32; of a quantized one, what they stand for."""
    if hasattr(layer, "dequantize"):
        return layer.dequantize(torch.float32)  # type: ignore[no-any-return]
    if isinstance(layer, JoinedLinear):
        return torch.cat([weight_of(part) for part in layer.parts])
    if isinstance(layer, nn.Linear | TiedHead):
        return layer.weight.detach().float()
    return torch.cat([*probed_weights(layer)], dim=1)


def probed_weights(layer: Any) -> Iterator[Tensor]:
    """The weights of some inputs after the other: what comes out if one of them is 1."""
    device = next(layer.buffers()).device
    for start in range(0, layer.in_features, PROBED_INPUTS):
        count = min(PROBED_INPUTS, layer.in_features - start)
        x = torch.zeros(count, layer.in_features, device=device)
        x[torch.arange(count), torch.arange(start, start + count)] = 1.0
        y = layer(x).float()
        yield (y if layer.bias is None else y - layer.bias.float()).t()


@torch.inference_mode()
def layer_change(
    name: str,
    parts: Sequence[LoraPart],
    whole: Sequence[WholeTensor],
    tokens: TokenRows | None,
    base: BaseLayer,
    squares: Tensor | None = None,
) -> LayerChange | None:
    """The change of one layer; None: it stays as it is.

    `squares` has the squared lengths of the rows that DoRA's parts change, one part after the other, if the layer has
    only some of the inputs.
    """
    weight = cache(base.weight)
    matrices = [
        LoraPart(start_of(one), one.tensor.to(base.device, base.dtype).contiguous(), None)
        for one in whole
        if one.leaf == "weight" and not is_unchanged(one, weight())
    ]
    matrices += [] if tokens is None else [*token_parts(name, tokens, base)]
    scale_O = torch.ones(base.width, device=base.device)
    old_O = torch.zeros_like(scale_O) if base.bias_O is None else base.bias_O.detach().float()
    new_O = old_O.clone()
    for one in whole:
        if one.leaf == "bias":
            new_O[one.region or ...] = one.tensor.to(new_O)
    for part in matrices:
        scale_O[part.columns] = 0.0
    added, squares_O = [], squares
    for part in parts:
        if part.lengths_O is not None:
            if matrices:
                raise CheckpointError(f"the adapter has both a matrix of its own and DoRA for {name}; {MERGE}")
            count = len(part.lengths_O)
            own_O = squares_of(part, weight()) if squares_O is None else squares_O[:count]
            squares_O = None if squares_O is None else squares_O[count:]
            part = with_lengths(part, own_O, scale_O)
        if part.bias_O is not None:
            new_O[part.columns] += part.bias_O
        added.append(part)
    shift_O = new_O - scale_O * old_O
    found = LayerChange(
        (*matrices, *added),
        None if bool((scale_O == 1.0).all()) else scale_O,
        None if bool((shift_O == 0.0).all()) else shift_O,
    )
    return found if found.parts or found.shift_O is not None else None


def with_lengths(part: LoraPart, squares_O: Tensor, scale_O: Tensor) -> LoraPart:
    """DoRA's part as one of LoRA, and the scales of its outputs."""
    assert part.lengths_O is not None
    assert part.b_OR is not None
    factors_O = part.lengths_O / squares_O.sqrt()
    scale_O[part.columns] = factors_O
    b_OR = (part.b_OR.float() * factors_O.unsqueeze(1)).to(part.b_OR.dtype)
    return replace(part, b_OR=b_OR, lengths_O=None)


def squares_of(part: LoraPart, weight_OI: Tensor) -> Tensor:
    """The squared lengths of the rows that a part of DoRA gives, before they are scaled."""
    assert part.b_OR is not None
    return (weight_OI[part.columns] + part.b_OR.float() @ part.a_RI.float()).square().sum(dim=1)


@torch.inference_mode()
def squares_of_cut_rows(adapter: LoraAdapter, model: Transformer, total: SumOverRanks) -> dict[str, Tensor]:
    """The squared lengths of rows of which each rank has some inputs, by layer; as `layer_change` takes them."""
    found: dict[str, Tensor] = {}
    for name in sorted(adapter.parts):
        parts = cut_rows(name, adapter.parts[name])
        if parts:
            weight_OI = weight_of(find_layer(model, name))
            found[name] = torch.cat([squares_of(part, weight_OI) for part in parts])
    if not found:
        return found
    summed = total(torch.cat([*found.values()]))
    return dict(zip(found, torch.split(summed, [len(one) for one in found.values()]), strict=True))


def no_sum(_: Tensor) -> Tensor:
    raise CheckpointError("the lengths of rows of which a rank has a part need the sum of all ranks")


def cut_rows(name: str, parts: Sequence[LoraPart]) -> list[LoraPart]:
    """The parts of DoRA in a layer of which each rank has some of the inputs."""
    is_cut = name.rpartition(".")[2] in COLUMN_PARALLEL
    return [part for part in parts if is_cut and part.lengths_O is not None]


def token_parts(name: str, tokens: TokenRows, base: BaseLayer) -> Iterator[LoraPart]:
    """The trained rows of the last layer: a matrix for each run of neighbors."""
    if base.bias_O is not None:
        raise CheckpointError(f"the adapter has trained tokens of {name}, which has biases; {MERGE}")
    order = tokens.ids_K.argsort()
    ids, rows_KE = tokens.ids_K[order].tolist(), tokens.rows_KE[order]
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield LoraPart(ids[first], rows_KE[first:i].contiguous(), None)
            first = i


def start_of(whole: WholeTensor) -> int:
    region: Any = whole.region
    return region[0].start or 0 if region else 0


def is_unchanged(whole: WholeTensor, parameter: Tensor | None) -> bool:
    """Whether a tensor is that of the network."""
    if parameter is None or parameter.is_meta:
        return False
    own = parameter[whole.region] if whole.region else parameter
    return own.shape == whole.tensor.shape and torch.equal(whole.tensor.to(own), own)


# ---- norms and embeddings ----


def changed_norm(norm: nn.Module, tensors: Sequence[WholeTensor]) -> nn.Module:
    """The same norm with other weights."""
    other = copy.copy(norm)
    other._parameters = dict(norm._parameters)
    for whole in tensors:
        own = other._parameters[whole.leaf]
        assert own is not None
        value = own.detach().clone()
        value[whole.region or ...] = whole.tensor.to(value)
        other._parameters[whole.leaf] = nn.Parameter(value, requires_grad=False)
    return other


def embeddings_of(model: Transformer) -> Tensor:
    """The embeddings [V, E] in the type of the network."""
    embedding: Any = model.model.embed_tokens
    weight_VE: Tensor = embedding.weight
    return weight_VE.to(embedding.dtype) if isinstance(embedding, NarrowEmbedding) else weight_VE


@torch.inference_mode()
def embedding_change(adapter: LoraAdapter, whole: Tensor | None, own: Callable[[], Tensor]) -> EmbeddingChange | None:
    """The change of the embeddings; None: they stay as they are. `own` gives those of the network."""
    lora, rows, scale_E = adapter.embedding, adapter.tokens.get(EMBEDDING), None
    if whole is None and lora is None and rows is None:
        return None
    own_VE = own()
    if whole is not None and torch.equal(whole.to(own_VE), own_VE):
        whole = None
    if whole is None and lora is None and rows is None:
        return None
    weight_VE = None if whole is None else whole.to(own_VE).contiguous()
    if lora is not None and lora.lengths_E is not None:
        weights = (own_VE if weight_VE is None else weight_VE).float()
        scale_E = lora.lengths_E / torch.linalg.vector_norm(weights + lora.a_VR.float() @ lora.b_RE.float(), dim=0)
        lora = replace(lora, b_RE=(lora.b_RE.float() * scale_E).to(lora.b_RE.dtype), lengths_E=None)
    return EmbeddingChange(weight_VE, lora, scale_E, rows)
