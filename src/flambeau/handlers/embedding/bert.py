"""A BERT encoder, loaded from a Hugging Face checkpoint.

Shapes: B texts, T tokens (of the longest text), D hidden size, H heads, K = D / H.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flambeau.errors import HandlerError

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
HUGGING_FACE_NAMES = {  # our modules → theirs
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
HUGGING_FACE_LAYER_NAMES = {  # the same inside a layer
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "attended_norm": "attention.output.LayerNorm",
    "widen": "intermediate.dense",
    "narrow": "output.dense",
    "norm": "output.LayerNorm",
}
UNUSED = re.compile(r"pooler\.|cls\.|embeddings\.position_ids$")  # tensors in checkpoints that embeddings do not need


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """The fields of config.json that an encoder needs."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12


def read_config(document: Mapping[str, Any]) -> BertConfig:
    """Read a config.json; models other than BERT are rejected."""
    kind, positions = document.get("model_type"), document.get("position_embedding_type", "absolute")
    if kind != "bert" or positions != "absolute":
        raise HandlerError(
            f"config.json describes a {kind} model with {positions} positions; sentence_embedder supports bert with "
            "absolute positions. Export the model to ONNX and pack model.onnx instead of model.safetensors"
        )
    if (activation := document.get("hidden_act", "gelu")) not in ACTIVATIONS:
        raise HandlerError(f"config.json has the activation {activation!r}; supported: {', '.join(ACTIVATIONS)}")
    known = {name: document[name] for name in BertConfig.__dataclass_fields__ if name in document}
    try:
        return BertConfig(**known)
    except TypeError as error:
        raise HandlerError(f"config.json is not complete: {error}") from None


class Uninitialized:
    """A module without random initialization: its weights come from a file, so this memory is never touched.

    torch's meta device would do the same, but its imports take 1.5 s.
    """

    def reset_parameters(self) -> None:
        pass


class Linear(Uninitialized, nn.Linear):
    pass


class Embedding(Uninitialized, nn.Embedding):
    pass


class LayerNorm(Uninitialized, nn.LayerNorm):
    pass


class BertEncoder(nn.Module):
    """Token ids → one vector per token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.words = Embedding(config.vocab_size, width)
        self.positions = Embedding(config.max_position_embeddings, width)
        self.types = Embedding(config.type_vocab_size, width)
        self.norm = LayerNorm(width, config.layer_norm_eps)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, ids_BT: Tensor, is_token_BT: Tensor | None = None) -> Tensor:
        """`is_token_BT` is false for padding; None if there is no padding."""
        x_BTD: Tensor = self.words(ids_BT) + self.positions.weight[: ids_BT.shape[1]] + self.types.weight[0]
        x_BTD = self.norm(x_BTD)
        mask = None if is_token_BT is None else is_token_BT[:, None, None, :]
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask)
        return x_BTD


class BertLayer(nn.Module):
    """A transformer layer with layer norms after attention and feed-forward."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.activate = ACTIVATIONS[config.hidden_act]
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.attended = Linear(width, width)
        self.attended_norm = LayerNorm(width, config.layer_norm_eps)
        self.widen = Linear(width, config.intermediate_size)
        self.narrow = Linear(config.intermediate_size, width)
        self.norm = LayerNorm(width, config.layer_norm_eps)

    def forward(self, x_BTD: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` (B11T) is true for tokens that may be attended to."""
        q, k, v = (  # each BHTK
            linear(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x_BTD = self.attended_norm(x_BTD + self.attended(attended.transpose(1, 2).flatten(-2)))
        y: Tensor = self.norm(x_BTD + self.narrow(self.activate(self.widen(x_BTD))))
        return y


def load_bert(path: Path, config: BertConfig, device: torch.device) -> BertEncoder:
    """Load the encoder from a safetensors file. On the CPU its weights are memory-mapped and shared by all workers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise HandlerError(f"{path.name} could not be loaded as safetensors: {error}") from error
    tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    encoder = BertEncoder(config)
    names = {name: hugging_face_name(name) for name in encoder.state_dict()}
    expected = {names[name]: tensor.shape for name, tensor in encoder.state_dict().items()}
    check_tensors(expected, {name: t.shape for name, t in tensors.items() if not UNUSED.match(name)}, path.name)
    encoder.load_state_dict({ours: tensors[theirs].float() for ours, theirs in names.items()}, assign=True)
    return encoder.requires_grad_(False).eval().to(device)


def hugging_face_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in HUGGING_FACE_NAMES:
        return f"{HUGGING_FACE_NAMES[module]}.{kind}"
    _, number, module = module.split(".")
    return f"encoder.layer.{number}.{HUGGING_FACE_LAYER_NAMES[module]}.{kind}"


def check_tensors(expected: Mapping[str, torch.Size], given: Mapping[str, torch.Size], file: str) -> None:
    """Raise an error that lists the tensors that are missing, unknown or of a wrong shape."""
    found = [f"{name} is missing" for name in expected.keys() - given.keys()]
    found += [f"{name} is unknown" for name in given.keys() - expected.keys()]
    for name in expected.keys() & given.keys():
        if given[name] != expected[name]:
            found.append(f"{name} is {list(given[name])}, not {list(expected[name])}")
    if found:
        shown = "; ".join(sorted(found)[:10]) + ("; …" if len(found) > 10 else "")
        raise HandlerError(f"{file} does not fit config.json in {len(found)} tensors: {shown}")
