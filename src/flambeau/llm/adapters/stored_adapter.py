"""StoredAdapter: the tensors in an adapter's file, by what they do to which layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flambeau.llm.adapters.lora_config import MERGE, LoraConfig
from flambeau.llm.checkpoints.weight_files import StoredTensor, open_weights
from flambeau.llm.errors import CheckpointError

FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
TENSOR = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.(?P<leaf>weight|bias)$")
EMBEDDING = re.compile(r"^(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.default)?$")
LENGTHS = re.compile(r"^(?P<module>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?$")  # of DoRA
TOKENS = re.compile(r"^(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?$")
WHOLE = re.compile(r"^(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<leaf>\w+)$")
INNER = re.compile(r"(\.base_layer)+$")  # of layers that adapt several parameters of a module


@dataclass(frozen=True, slots=True)
class StoredPair:
    """The tensors of an adapted layer in a file."""

    a: StoredTensor
    b: StoredTensor
    bias: StoredTensor | None = None
    lengths: StoredTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """What an adapter's file holds, by the names of layers in the checkpoint."""

    file: Path
    pairs: dict[str, StoredPair] = field(default_factory=dict)
    embeddings: dict[str, StoredPair] = field(default_factory=dict)
    tokens: dict[str, StoredTensor] = field(default_factory=dict)  # trained rows of embeddings
    whole: dict[str, StoredTensor] = field(default_factory=dict)  # parameters that were trained as a whole, by name

    @property
    def is_empty(self) -> bool:
        return not (self.pairs or self.embeddings or self.tokens or self.whole)

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        for pair in (*self.pairs.values(), *self.embeddings.values()):
            yield from (one for one in (pair.a, pair.b, pair.bias, pair.lengths) if one is not None)
        yield from self.tokens.values()
        yield from self.whole.values()

    def check_numbers(self, dtype: torch.dtype) -> None:
        """Raise CheckpointError if a number is not finite in a type.

        Requests with other adapters are computed in the same products, where zero times such a number is not zero.
        """
        for stored in self.tensors:
            tensor = stored.read()
            if not torch.isfinite(tensor).all():
                raise CheckpointError(
                    f"{self.file}: {stored.name} has numbers that are not finite (nan or inf): its training has "
                    "diverged; use an earlier checkpoint of it"
                )
            if tensor.is_floating_point() and not torch.isfinite(tensor.to(dtype)).all():
                name = str(dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{self.file}: {stored.name} has numbers that are too large for {name}; load the model in bfloat16"
                )


def open_adapter(folder: Path, config: LoraConfig) -> StoredAdapter:
    """The tensors of the adapter in a folder; raises CheckpointError if one is missing or not known."""
    found = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{folder} has no {' or '.join(FILES)}; save the adapter again")
    sides: dict[str, dict[str, StoredTensor]] = {}
    embeddings: dict[str, dict[str, StoredTensor]] = {}
    lengths: dict[str, StoredTensor] = {}
    tokens: dict[str, StoredTensor] = {}
    whole: dict[str, StoredTensor] = {}
    for stored in (stored for one in open_weights(found) for stored in one):
        name = stored.name.removeprefix(PREFIX)
        if match := TENSOR.match(name):
            side = match["side"] if match["leaf"] == "weight" else f"bias of {match['side']}"
            sides.setdefault(match["module"], {})[side] = stored
        elif match := EMBEDDING.match(name):
            embeddings.setdefault(match["module"], {})[match["side"]] = stored
        elif config.use_dora and (match := LENGTHS.match(name)):
            lengths[match["module"]] = stored
        elif match := TOKENS.match(name):
            tokens[match["module"]] = stored
        elif ".lora_" not in name and ".token_adapter." not in name and (match := WHOLE.match(name)):
            whole[f"{match['module']}.{match['leaf']}"] = stored
        else:
            raise CheckpointError(f"{found} has {stored.name}, which is not a tensor of a LoRA layer; {MERGE}")
    adapter = StoredAdapter(
        file=found,
        pairs=dict(paired(found, sides, lengths)),
        embeddings=dict(paired(found, embeddings, lengths)),
        tokens=tokens,
        whole=whole,
    )
    if adapter.is_empty:
        raise CheckpointError(f"{found} holds no tensors; save the adapter again")
    known = {*adapter.pairs, *adapter.embeddings}
    for module in known ^ lengths.keys() if config.use_dora else ():
        raise CheckpointError(f"{found} has not all tensors of {module} that DoRA needs; save the adapter again")
    if bool(config.token_ids) != bool(tokens):
        raise CheckpointError(
            f"{found} and trainable_token_indices of adapter_config.json do not fit together; save the adapter again"
        )
    for module in config.whole_modules:
        if not any(f".{name.rpartition('.')[0]}".endswith(f".{module}") for name in whole):
            raise CheckpointError(
                f"adapter_config.json of {folder} has modules_to_save: {module}, and {found.name} has no such tensors; "
                "save the adapter again"
            )
    return adapter


def paired(
    file: Path, sides: dict[str, dict[str, StoredTensor]], lengths: dict[str, StoredTensor]
) -> Iterator[tuple[str, StoredPair]]:
    """The tensors of each adapted layer; raises CheckpointError if some do not fit together."""
    for module, found in sides.items():
        if unknown := found.keys() - {"A", "B", "bias of B"}:
            raise CheckpointError(f"{file} has the {unknown.pop()} of {module}, which is not supported; {MERGE}")
        if not {"A", "B"} <= found.keys():
            raise CheckpointError(f"{file} has only lora_{next(iter(found))} of {module}; save the adapter again")
        a, b = found["A"], found["B"]
        if not is_pair(a, b):
            raise CheckpointError(
                f"{file}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {module} do not fit together; save the "
                "adapter again"
            )
        yield module, StoredPair(a, b, found.get("bias of B"), lengths.get(module))


def is_pair(a: StoredTensor, b: StoredTensor) -> bool:
    floats = all(stored.dtype.is_floating_point and stored.dtype != torch.float8_e4m3fn for stored in (a, b))
    return floats and len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] > 0
