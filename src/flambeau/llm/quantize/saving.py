"""Quantized checkpoints: written tensor by tensor from another, so that no network need fit into memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flambeau.llm.checkpoints.fitting import cuts, fit, is_harmless
from flambeau.llm.checkpoints.weight_files import open_weights
from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.config_values import read_json
from flambeau.llm.models.hugging_face import read_hugging_face
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.naming import ways
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.fp8 import quantize_fp8
from flambeau.llm.quantize.int4 import quantize_int4
from flambeau.llm.quantize.int8 import quantize_int8
from flambeau.llm.quantize.settings import QuantizationSettings

MAX_FILE_BYTES = 2 << 30
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".index.json", ".gguf")


def save_quantized(
    folder_in: Path,
    folder_out: Path,
    kind: Quantization,
    *,
    group_size: int = 64,
    lm_head: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Write a checkpoint anew with quantized layers, and everything that belongs to it beside.

    The work is done on a GPU where there is one, unless a device is named.
    """
    settings = QuantizationSettings(kind=kind, group_size=group_size, lm_head=lm_head)
    check_folders(folder_in, folder_out)
    check_weights(folder_in)
    partial = folder_out.with_name(folder_out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        copy_others(folder_in, partial)
        write_config(folder_in, partial, settings)
        write_weights(quantized_tensors(folder_in, settings, torch.device(device or default_device())), partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
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


def check_weights(folder: Path) -> None:
    """Refuse weights that do not fit their description, by names and shapes; none is read."""
    arch = read_hugging_face(folder)
    with torch.device("meta"):
        model = Transformer(arch)
    fit(model, arch, open_weights(folder), None)


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def quantized_tensors(
    folder: Path, settings: QuantizationSettings, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint by its Hugging Face name, or what takes its place."""
    arch = read_hugging_face(folder)
    with torch.device("meta"):
        model = Transformer(arch)
    small = small_names(model, settings)
    for stored in (stored for file in open_weights(folder) for stored in file if not is_harmless(model, stored.name)):
        for name, cut in cuts(arch, stored, None):
            tensor = cut(stored.read())
            if name not in small:
                yield name, tensor
                continue
            for part, value in quantized_parts(name, tensor.to(device), settings):
                yield part, value.cpu()


def small_names(model: Transformer, settings: QuantizationSettings) -> set[str]:
    """The tensors that are quantized, by all names they may have."""
    weights: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and settings.applies_to(name, module):
            weights[f"{name}.weight"] = module.weight
        elif isinstance(module, Experts):
            stacks = {f"{name}.{leaf}": stack for leaf, stack in module.named_parameters()}
            weights |= {leaf: stack for leaf, stack in stacks.items() if settings.fits(stack.shape[2])}
    return {part for name, weight in weights.items() for way in ways(model.arch, name, weight) for part in way}


def quantized_parts(name: str, tensor: Tensor, settings: QuantizationSettings) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a quantized layer in place of its weight; those of all experts may lie in one."""
    start = name.removesuffix("weight") if name.endswith(".weight") else f"{name}."
    for leaf, value in quantized_rows(tensor.flatten(0, -2), settings).items():
        yield start + leaf, value.view(*tensor.shape[:-1], *value.shape[1:])


def quantized_rows(rows_OI: Tensor, settings: QuantizationSettings) -> dict[str, Tensor]:
    """Quantized weights by the names that layers have for them."""
    if settings.kind == "int4":
        weight, scales, minimums = quantize_int4(rows_OI, settings.group_size_for(rows_OI.shape[1]))
        return {"weight": weight, "scales": scales, "minimums": minimums}
    weight, scale = quantize_int8(rows_OI) if settings.kind == "int8" else quantize_fp8(rows_OI)
    return {"weight": weight, "scale": scale}


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
