"""Quantized checkpoints: written tensor by tensor from another, so that no network need fit into memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError
from flambeau.llm.fitting import cuts, is_harmless
from flambeau.llm.models.hugging_face import read_hugging_face, read_json
from flambeau.llm.models.naming import ways
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.applying import QuantizationSettings
from flambeau.llm.quantize.fp8 import quantize_fp8
from flambeau.llm.quantize.int4 import quantize_int4
from flambeau.llm.quantize.int8 import quantize_int8
from flambeau.llm.weight_files import open_weights

MAX_FILE_BYTES = 2 << 30
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".index.json", ".gguf")


def save_quantized(
    folder_in: Path, folder_out: Path, kind: Quantization, *, group_size: int = 64, lm_head: bool = False
) -> None:
    """Write a checkpoint anew with quantized layers, and everything that belongs to it beside."""
    settings = QuantizationSettings(kind=kind, group_size=group_size, lm_head=lm_head)
    check_folders(folder_in, folder_out)
    partial = folder_out.with_name(folder_out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_others(folder_in, partial)
    write_config(folder_in, partial, settings)
    write_weights(quantized_tensors(folder_in, settings), partial)
    folder_out.parent.mkdir(parents=True, exist_ok=True)
    if folder_out.exists():
        folder_out.rmdir()
    partial.rename(folder_out)


def check_folders(folder_in: Path, folder_out: Path) -> None:
    """Refuse a checkpoint without a description, one that is quantized already, and a place that is taken."""
    if not (folder_in / "config.json").is_file():
        raise CheckpointError(f"{folder_in} has no config.json; quantize a checkpoint in Hugging Face format")
    if read_json(folder_in / "config.json").get("quantization_config"):
        raise CheckpointError(f"{folder_in} is quantized already; use the original checkpoint")
    if folder_out.exists() and (not folder_out.is_dir() or any(folder_out.iterdir())):
        raise CheckpointError(f"{folder_out} is there already; name a new folder")


def quantized_tensors(folder: Path, settings: QuantizationSettings) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint by its Hugging Face name, or what takes its place."""
    arch = read_hugging_face(folder)
    with torch.device("meta"):
        model = Transformer(arch)
    small = small_names(model, settings)
    for stored in (stored for file in open_weights(folder) for stored in file if not is_harmless(model, stored.name)):
        for name, cut in cuts(arch, stored, None):
            tensor = cut(stored.read())
            yield from quantized_parts(name, tensor, settings) if name in small else [(name, tensor)]


def small_names(model: Transformer, settings: QuantizationSettings) -> set[str]:
    """The tensors that are quantized, by all names they may have."""
    names: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and settings.applies_to(name, module):
            names.update(part for way in ways(model.arch, f"{name}.weight", module.weight) for part in way)
    return names


def quantized_parts(name: str, tensor: Tensor, settings: QuantizationSettings) -> list[tuple[str, Tensor]]:
    """The tensors of a quantized layer in place of its weight."""
    start = name.removesuffix("weight")
    if settings.kind == "int4":
        group_size = settings.group_size_for(tensor.shape[1]) or settings.group_size
        weight, scales, minimums = quantize_int4(tensor, group_size)
        return [(name, weight), (f"{start}scales", scales), (f"{start}minimums", minimums)]
    weight, scale = quantize_int8(tensor) if settings.kind == "int8" else quantize_fp8(tensor)
    return [(name, weight), (f"{start}scale", scale)]


def write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Files of a bounded size, and an index of them."""
    places: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if sum(t.nbytes for t in waiting.values()) + tensor.nbytes > MAX_FILE_BYTES:
            places |= write_file(waiting, folder, f"model-{len(set(places.values())) + 1:05d}.safetensors")
            waiting = {}
        waiting[name] = tensor.contiguous()
    if not places:
        write_file(waiting, folder, "model.safetensors")
        return
    places |= write_file(waiting, folder, f"model-{len(set(places.values())) + 1:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}, indent=2))


def write_file(tensors: dict[str, Tensor], folder: Path, file: str) -> dict[str, str]:
    """One file, and which tensors are in it."""
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return dict.fromkeys(tensors, file)


def write_config(folder_in: Path, folder_out: Path, settings: QuantizationSettings) -> None:
    """The same architecture, with a note on its weights."""
    config = read_json(folder_in / "config.json") | {"quantization_config": settings.to_config()}
    (folder_out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_others(folder_in: Path, folder_out: Path) -> None:
    """The tokenizer, the chat template and whatever else is no weights."""
    for path in folder_in.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, folder_out / path.name)
