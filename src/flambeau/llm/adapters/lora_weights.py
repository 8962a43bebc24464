"""read_adapter: the tensors of a LoRA adapter, arranged like the layers of the network that they change.

Shapes: R rank · I inputs · O outputs of a layer, or of the part of it that is adapted · N experts · V vocabulary
· E hidden · K trained tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.adapters.lora_config import MERGE, LoraConfig, read_lora_config
from flambeau.llm.adapters.stored_adapter import INNER, StoredAdapter, StoredPair, open_adapter
from flambeau.llm.checkpoints.parameter_map import Cut, ShardFunction, cuts, listed
from flambeau.llm.checkpoints.weight_files import StoredTensor
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.tensor_names import ParameterSlice, Region, canonical_name, layouts, parts_of
from flambeau.llm.models.transformer import Transformer

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")  # of latent attention
ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj", *LATENT)  # layers that can be adapted
OTHERS = (HEAD, "model.project_in", "model.project_out")
ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate")
COLUMN_PARALLEL = ("o_proj", "down_proj")  # ranks have some of their inputs
EXPERTS = (".mlp.experts", ".shortcut.experts")
FIRST_PLAIN_EXPERTS = (0, 21)  # the first PEFT whose A has the inputs of experts, whatever their weights look like


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What is added to some outputs of a layer: B times A times the input."""

    start: int  # the first of these outputs
    a_RI: Tensor
    b_OR: Tensor | None  # with the scale of the adapter; None: A is a whole matrix, which replaces that of the layer
    lengths_O: Tensor | None = None  # DoRA: of the rows of the adapted weights
    bias_O: Tensor | None = None  # with the scale of the adapter

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + len(self.a_RI if self.b_OR is None else self.b_OR))

    @property
    def delta(self) -> Tensor:
        """What is added to the weights [O, I]."""
        return self.a_RI if self.b_OR is None else self.b_OR @ self.a_RI


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A part of a parameter that was trained as a whole."""

    parameter: str
    region: Region
    tensor: Tensor

    @property
    def owner(self) -> str:
        return self.parameter.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.parameter.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class EmbeddingLora:
    """What is added to the embedding of a token: its row of A times B."""

    a_VR: Tensor
    b_RE: Tensor  # with the scale of the adapter
    lengths_E: Tensor | None = None  # DoRA: of the columns of the adapted embeddings


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of the embeddings, or of the last layer, that were trained."""

    ids_K: Tensor
    rows_KE: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """All that an adapter changes, by the names of layers in the network; of experts, `…gate_up_proj.3`."""

    parts: dict[str, list[LoraPart]] = field(default_factory=dict)
    whole: list[WholeTensor] = field(default_factory=list)
    embedding: EmbeddingLora | None = None
    tokens: dict[str, TokenRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTarget:
    """The network that adapters are read for, or one rank's part of it."""

    arch: Architecture  # of the whole network
    local: Architecture  # of this rank's part
    shard: ShardFunction | None
    device: torch.device
    dtype: torch.dtype


def read_adapter(folder: Path, target: AdapterTarget) -> LoraAdapter:
    """The adapter in a folder. Raises CheckpointError if it does not fit the network, or is not supported."""
    config = read_lora_config(folder)
    stored = open_adapter(folder, config)
    return AdapterReader(stored, config, target).read()


class AdapterReader:
    """Finds the place of each tensor of an adapter in a network."""

    def __init__(self, stored: StoredAdapter, config: LoraConfig, target: AdapterTarget) -> None:
        self._stored, self._config, self._target = stored, config, target
        self._weights = parameters_of(target.local)
        self._places = part_places(target.local, self._weights)
        self._unknown: list[str] = []

    def read(self) -> LoraAdapter:
        self._stored.check_numbers(self._target.dtype)
        parts: dict[str, list[LoraPart]] = {}
        for module, pair in self._stored.pairs.items():
            for owner, part in self._placed(module, pair):
                parts.setdefault(owner, []).append(part)
        whole = [tensor for name, stored in self._stored.whole.items() for tensor in self._whole(name, stored)]
        embedding = [self._embedding(module, pair) for module, pair in self._stored.embeddings.items()]
        tokens = {owner: rows for module, one in self._stored.tokens.items() for owner, rows in self._rows(module, one)}
        if self._unknown:
            raise CheckpointError(
                f"{self._stored.file} changes what cannot be changed here: {listed(sorted(self._unknown))}. Supported "
                "are the projections of attention and of feed-forward layers, experts and their routers, embeddings, "
                f"the last layer and norms; {MERGE}{made_for(self._config)}"
            )
        found = next((one for one in embedding if one is not None), None)
        if found is not None and EMBEDDING in tokens:
            raise CheckpointError(
                f"{self._stored.file} has both trained tokens and a LoRA layer for the embeddings; {MERGE}"
            )
        return LoraAdapter(parts=parts, whole=whole, embedding=found, tokens=tokens)

    # ---- LoRA layers ----

    def _placed(self, module: str, pair: StoredPair) -> Iterator[tuple[str, LoraPart]]:
        """The layers that an adapted layer of a checkpoint is in, with what is added to each."""
        plain = INNER.sub("", module)
        name = canonical_name(f"{plain}.weight", self._target.arch.renames)
        is_stacked = name.removesuffix(".weight").endswith(EXPERTS)
        placed = [*self._stacked(plain, name, pair)] if is_stacked else [*self._layers(plain, pair)]
        is_known = placed and all(owner for owner, _ in placed) and (is_stacked or plain == module)
        if not is_known:
            self._unknown.append(module)
            return
        for owner, part in placed:
            shape = self._shape(owner)
            if part.a_RI.shape[1] != shape[1] or part.columns.stop > shape[0]:
                raise another_model(module, part.a_RI.shape[1], part.columns.stop - part.start, shape)
            yield owner, part

    def _scaled(self, b: Tensor, scale: float, module: str) -> Tensor:
        """B with the scale of the adapter, in float32; raises CheckpointError if the network's type cannot hold it."""
        scaled = b.float() * scale
        if not scaled.abs().amax() <= torch.finfo(self._target.dtype).max:  # nan, too
            raise CheckpointError(
                f"{self._stored.file}: the lora_B of {module} times the adapter's scale of {scale:g} is too large for "
                f"{str(self._target.dtype).removeprefix('torch.')}; lora_alpha is likely wrong"
            )
        return scaled

    def _layers(self, module: str, pair: StoredPair) -> Iterator[tuple[str, LoraPart]]:
        """Of one linear layer, which may be a part of a fused one, or contain several of them."""
        # The outputs of B are those of the weight, and are arranged in the same way; B itself is never transposed.
        arch = replace(self._target.arch, transposed="")
        weight = StoredTensor(pair.b.file, f"{module}.weight", pair.b.shape, pair.b.dtype)
        for name, arrange in cuts(arch, weight, None):  # two of keys that are values, too
            if name != "lm_head.weight" or not arch.normalized_head:
                yield from self._layer(arch, module, pair, name, arrange)

    def _layer(
        self, arch: Architecture, module: str, pair: StoredPair, name: str, arrange: Cut
    ) -> Iterator[tuple[str, LoraPart]]:
        """The same for the name of a weight in the network."""
        shard = self._target.shard
        scale = self._config.scale(module, pair.a.shape[0])
        a_RI, b_OR = pair.a.read(), self._scaled(arrange(pair.b.read()), scale, module)
        vectors = [None if one is None else arrange(one.read().view(-1, 1)) for one in (pair.lengths, pair.bias)]
        lengths_O1, bias_O1 = vectors[0], None if vectors[1] is None else vectors[1].float() * scale
        if shard is None and name in self._places:
            yield self._part(name, a_RI, b_OR, lengths_O1, bias_O1)
            return
        for part, region in parts_of(arch, name, b_OR).items():
            if part not in self._places:
                continue
            rows = [None if one is None else one[region] if region else one for one in (b_OR, lengths_O1, bias_O1)]
            inputs_RI = a_RI
            if shard is not None:
                leaf = part.split(".")[-2]
                if leaf in COLUMN_PARALLEL:
                    inputs_RI = shard(part, a_RI)
                else:
                    rows[:2] = [None if one is None else shard(part, one) for one in rows[:2]]
                rows[2] = None if rows[2] is None else shard(part.replace(".weight", ".bias"), rows[2])
            yield self._part(part, inputs_RI, *rows)  # type: ignore[arg-type]

    def _stacked(self, module: str, name: str, pair: StoredPair) -> Iterator[tuple[str, LoraPart]]:
        """Of the stacked weights of all experts: A has the ranks of each expert in turn, B the experts of each rank."""
        arch, experts = self._target.arch, name.removesuffix(".weight")
        num_experts = arch.num_experts
        if not num_experts or pair.a.shape[0] % num_experts or pair.lengths is not None or pair.bias is not None:
            return
        if arch.num_zero_experts:  # which some stacks have places for
            return
        rank = pair.a.shape[0] // num_experts
        a_NRX = pair.a.read().view(num_experts, rank, -1)
        b_NYR = pair.b.read().view(-1, rank, num_experts).permute(2, 0, 1)
        leaf, is_swapped = self._expert_leaf(experts, a_NRX.shape[2], b_NYR.shape[1])
        if leaf is None:
            return
        scale = self._config.scale(f"{module}.{leaf}", rank)
        a_NRI, b_NOR = (b_NYR.transpose(1, 2), a_NRX.transpose(1, 2)) if is_swapped else (a_NRX, b_NYR)
        b_NOR = self._scaled(b_NOR, scale, f"{module}.{leaf}")
        if leaf == "gate_up_proj" and arch.interleaved_gates:
            b_NOR = torch.cat((b_NOR[:, ::2], b_NOR[:, 1::2]), dim=1)
        for number in range(num_experts):
            owner = f"{experts}.{leaf}.{number}"
            for start, a_RI, b_OR in self._expert_parts(f"{experts}.{number}", leaf, a_NRI[number], b_NOR[number]):
                yield owner, self._moved(LoraPart(start, a_RI, b_OR))

    def _expert_leaf(self, experts: str, a_size: int, b_size: int) -> tuple[str | None, bool]:
        """Which weights of experts are adapted, by the sizes of A and B, and whether these are swapped.

        Versions of PEFT before 0.21 swap them where weights are [N, O, I].
        """
        arch, found = self._target.arch, []
        for leaf in ("gate_up_proj", "down_proj"):
            if f"{experts}.{leaf}" in self._weights:
                size_out = arch.hidden_size if leaf == "down_proj" else arch.expert_size * (2 if arch.has_gate else 1)
                size_in = arch.expert_size if leaf == "down_proj" else arch.hidden_size
                found += [(leaf, False)] if (a_size, b_size) == (size_in, size_out) else []
                found += [(leaf, True)] if (a_size, b_size) == (size_out, size_in) else []
        if len(found) > 1 and self._config.version >= FIRST_PLAIN_EXPERTS:
            found = [(leaf, is_swapped) for leaf, is_swapped in found if not is_swapped]
        if len(found) > 1:
            raise CheckpointError(
                f"{self._stored.file} adapts experts, and their sizes do not tell inputs from outputs; save the "
                "adapter again with peft 0.21 or newer"
            )
        return found[0] if found else (None, False)

    def _expert_parts(self, expert: str, leaf: str, a_RI: Tensor, b_OR: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """One expert's part, or those of gate and up where a rank has some rows of each."""
        shard = self._target.shard
        if shard is None:
            yield 0, a_RI, b_OR
        elif leaf == "down_proj":
            yield 0, shard(f"{expert}.down_proj.weight", a_RI), b_OR
        else:
            start, names = 0, ("gate_proj", "up_proj") if self._target.arch.has_gate else ("up_proj",)
            for name, rows_OR in zip(names, b_OR.chunk(len(names)), strict=True):
                own_OR = shard(f"{expert}.{name}.weight", rows_OR)
                yield start, a_RI, own_OR
                start += len(own_OR)

    def _part(
        self, name: str, a_RI: Tensor, b_OR: Tensor, lengths_O1: Tensor | None, bias_O1: Tensor | None
    ) -> tuple[str, LoraPart]:
        """The layer, or the expert, that has a weight, and what is added to it; "": it cannot have adapters."""
        place = self._places[name]
        region: Any = place.region
        owner = place.parameter.removesuffix(".weight")
        if owner.rpartition(".")[0].endswith(EXPERTS):  # of one expert
            if lengths_O1 is not None or bias_O1 is not None or not region:
                return "", LoraPart(0, a_RI, b_OR)
            owner, region = f"{owner}.{region[0]}", region[1:]
        elif not can_adapt(owner):
            return "", LoraPart(0, a_RI, b_OR)
        vectors = [None if one is None else one.flatten() for one in (lengths_O1, bias_O1)]
        start = region[0].start or 0 if region else 0
        return owner, self._moved(LoraPart(start, a_RI, b_OR, *vectors))

    def _moved(self, part: LoraPart) -> LoraPart:
        """The part on its device and in its type; vectors stay in float32."""
        device, dtype = self._target.device, self._target.dtype
        a_RI, b_OR = (None if one is None else one.to(device, dtype).contiguous() for one in (part.a_RI, part.b_OR))
        vectors = [None if one is None else one.to(device, torch.float32) for one in (part.lengths_O, part.bias_O)]
        assert a_RI is not None
        return LoraPart(part.start, a_RI, b_OR, *vectors)

    def _shape(self, owner: str) -> tuple[int, int]:
        """Outputs and inputs of a layer."""
        weight = self._weights.get(f"{owner}.weight")
        if weight is None:
            weight = self._weights[owner.rpartition(".")[0]]  # of experts
        return weight.shape[-2], weight.shape[-1]

    # ---- what was trained as a whole ----

    def _whole(self, name: str, stored: StoredTensor) -> Iterator[WholeTensor]:
        renamed = StoredTensor(stored.file, name, stored.shape, stored.dtype)
        for part, cut in cuts(self._target.arch, renamed, self._target.shard):
            place = self._places.get(part)
            if place is None:
                self._unknown.append(name)
                continue
            tensor = cut(stored.read())
            wanted = self._weights[place.parameter]
            wanted = wanted[place.region] if place.region else wanted
            if tensor.shape != wanted.shape:
                raise CheckpointError(
                    f"the adapter's {name} is {list(tensor.shape)}, and the model's {list(wanted.shape)}: it was made "
                    "for another model, or for one with added tokens; serve it with that one"
                )
            yield WholeTensor(place.parameter, place.region, tensor)

    def _embedding(self, module: str, pair: StoredPair) -> EmbeddingLora | None:
        if canonical_name(f"{module}.weight", self._target.arch.renames) != f"{EMBEDDING}.weight":
            self._unknown.append(module)
            return None
        count, size = self._weights[f"{EMBEDDING}.weight"].shape
        if (pair.a.shape[1], pair.b.shape[0]) != (count, size):
            raise another_model(module, pair.a.shape[1], pair.b.shape[0], (size, count))
        device, dtype = self._target.device, self._target.dtype
        b_RE = self._scaled(pair.b.read().t(), self._config.scale(module, pair.a.shape[0]), module)
        lengths_E = None if pair.lengths is None else pair.lengths.read().to(device, torch.float32)
        a_VR = pair.a.read().t().to(device, dtype).contiguous()
        return EmbeddingLora(a_VR, b_RE.to(device, dtype).contiguous(), lengths_E)

    def _rows(self, module: str, stored: StoredTensor) -> Iterator[tuple[str, TokenRows]]:
        """Trained tokens; those of tied embeddings are trained in the last layer too."""
        arch = self._target.arch
        owner = canonical_name(f"{module}.weight", arch.renames).removesuffix(".weight")
        named = self._config.token_ids
        ids = next((ids for layer, ids in named.items() if layer and f".{module}".endswith(f".{layer}")), named.get(""))
        if owner not in (EMBEDDING, HEAD) or ids is None:
            self._unknown.append(f"{module}.token_adapter")
            return
        count, size = self._weights[f"{EMBEDDING}.weight"].shape
        if stored.shape != (len(ids), size) or max(ids) >= count:
            raise CheckpointError(
                f"the adapter's trained tokens of {module} are {list(stored.shape)} with ids up to {max(ids)}, and the "
                f"model's embeddings are {[count, size]}: it was made for another model, or for one with added tokens"
            )
        device = self._target.device
        rows = TokenRows(torch.tensor(ids, device=device), stored.read().to(device, self._target.dtype).contiguous())
        yield owner, rows
        if owner == EMBEDDING and arch.tied_embeddings and not any(one.endswith(HEAD) for one in self._stored.tokens):
            yield HEAD, rows


def made_for(config: LoraConfig) -> str:
    return f". It was made for {config.base}" if config.base else ""


def another_model(module: str, size_in: int, size_out: int, shape: tuple[int, int]) -> CheckpointError:
    return CheckpointError(
        f"the adapter's {module} has {size_in} inputs and {size_out} outputs, and the model's has {shape[1]} and "
        f"{shape[0]}: it was made for another model; serve it with that one"
    )


def can_adapt(owner: str) -> bool:
    """Whether a linear layer can have adapters."""
    return owner.rpartition(".")[2] in ADAPTED or owner in OTHERS or owner.endswith(ROUTERS)


def parameters_of(arch: Architecture) -> dict[str, Tensor]:
    """All parameters, without memory, by their names in the network; tied embeddings are the last layer's too."""
    with on_meta_device(torch.float32):
        tensors: dict[str, Tensor] = dict(Transformer(arch).state_dict())
    tensors.setdefault(f"{HEAD}.weight", tensors[f"{EMBEDDING}.weight"])
    return tensors


def part_places(arch: Architecture, weights: Mapping[str, Tensor]) -> dict[str, ParameterSlice]:
    """Where the parameters are, by their names in any layout of a checkpoint.

    Those of blocks that layers share are left out: PEFT has an adapter for each of these layers.
    """
    places: dict[str, ParameterSlice] = {}
    for name, tensor in weights.items():
        if name.startswith("model.blocks."):
            continue
        for layout in reversed(layouts(arch, name, tensor)):
            places |= layout
    return places
