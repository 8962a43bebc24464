"""Tiny checkpoints whose linear layers are quantized as other tools do it, beside the plain weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.models.transformer import Transformer
from support.checkpoints import reference
from support.tiny_models import ARCH, tiny_model
from support.weights import config_of, hugging_face_tensors, logits_of

PACKABLE = replace(ARCH, hidden_size=128, head_size=32, intermediate_size=256, num_layers=2)

# The tensors that a layer is stored as, and the weights they stand for.
Pack = Callable[[Tensor], tuple[Mapping[str, Tensor], Tensor]]


def write_packed(
    folder: Path,
    pack: Pack,
    quantization: Mapping[str, Any],
    *,
    model: Transformer | None = None,
    plain: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Path, Path]:
    """Two folders with the same weights: linear layers quantized by `pack`, and not; `plain` names parts of layers
    that are quantized in neither."""
    model = model or tiny_model(PACKABLE)
    packed: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in hugging_face_tensors(model).items():
        if not is_linear(name) or any(part in name for part in plain):
            packed[name] = weights[name] = tensor
            continue
        parts, weights[name] = pack(tensor)
        start = name.removesuffix("weight")
        packed |= {start + leaf: part.contiguous() for leaf, part in parts.items()}
    write(folder / "packed", packed, config_of(model.arch, quantization_config=quantization, **options))
    write(folder / "plain", weights, config_of(model.arch, **options))
    return folder / "packed", folder / "plain"


def write_packed_kind(folder: Path, kind: str, pack: Pack, quantization: Mapping[str, Any]) -> tuple[Path, Path]:
    """Two folders with the weights of a random network of transformers: linear layers quantized by `pack`, and not."""
    network = reference(kind)
    network.save_pretrained(folder / "raw")
    transposed = {name for name, module in network.named_modules() if type(module).__name__ == "Conv1D"}
    packed: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "raw" / "model.safetensors").items():
        if tensor.dim() != 2 or not is_linear(name) or "embed" in name or any(size % 8 for size in tensor.shape):
            packed[name] = weights[name] = tensor
            continue
        start = name.removesuffix("weight")
        is_transposed = start.removesuffix(".") in transposed
        parts, plain = pack(tensor.t() if is_transposed else tensor)
        weights[name] = plain.t() if is_transposed else plain
        packed |= {start + leaf: part for leaf, part in parts.items()}
    config = json.loads((folder / "raw" / "config.json").read_text())
    write(folder / "packed", packed, {**config, "quantization_config": quantization})
    write(folder / "plain", weights, config)
    return folder / "packed", folder / "plain"


def is_linear(name: str) -> bool:
    """Whether a tensor has the weights of a linear layer that tools quantize."""
    others = ("embed_tokens", "norm", "lm_head", ".gate.weight", "wte", "wpe", "ln_")
    return name.endswith(".weight") and not any(other in name for other in others)


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def to_levels(weight: Tensor, group_size: int, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [O, I], and scales in float16 and zeros [O, N] of their groups."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = ((high - low) / (2**bits - 1)).clamp_min(1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    levels = (groups / scales.float().unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 2**bits - 1)
    return levels.flatten(1).long(), scales, zeros.long()


def to_words(values: Tensor, bits: int) -> Tensor:
    """Rows of unsigned numbers as 32-bit words: a row of bits, the lowest first."""
    stream = (values.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2)
    words = stream.unflatten(-1, (-1, 32)) << torch.arange(32)
    return words.sum(-1).to(torch.int32)  # wraps: the highest bit is the sign


def check_equal(packed: Path, plain: Path, **options: Any) -> Transformer:
    """The network of the packed folder, which must compute what that of the plain one does."""
    model = load_model(packed, dtype=torch.float32, **options)
    expected = logits_of(load_model(plain, dtype=torch.float32))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    return model
