"""Writes quantized checkpoints, tensor by tensor, so that the network need not fit into memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flambeau.llm.checkpoints.compressed_writer import Calibrated, CompressedCheckpoint
from flambeau.llm.checkpoints.parameter_map import cuts, is_ignored, map_weights
from flambeau.llm.checkpoints.vision_weights import has_sounds, has_vision
from flambeau.llm.checkpoints.weight_files import open_weights
from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError
from flambeau.llm.json_files import read_object
from flambeau.llm.models.hugging_face import read_hugging_face
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.tensor_names import layouts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.int4 import quantize_int4
from flambeau.llm.quantize.row_scaled import quantize_fp8, quantize_int8
from flambeau.llm.quantize.settings import QuantizationSettings

WrittenFormat = Literal["flambeau", "compressed-tensors"]
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
    form: WrittenFormat = "flambeau",
    calibrated: Calibrated | None = None,
) -> None:
    """Write a quantized copy of a checkpoint, with its tokenizer and other files.

    Without a device, a GPU is used if there is one. `calibrated` has 4-bit weights that are written as they are.
    """
    settings = QuantizationSettings(kind=kind, group_size=group_size, lm_head=lm_head)
    check_folders(folder_in, folder_out)
    check_weights(folder_in)
    written = written_content(folder_in, settings, form, calibrated, torch.device(device or default_device()))
    partial = folder_out.with_name(folder_out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        copy_others(folder_in, partial)
        write_config(folder_in, partial, written.config)
        write_weights(written.tensors, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    folder_out.parent.mkdir(parents=True, exist_ok=True)
    if folder_out.exists():
        folder_out.rmdir()
    partial.rename(folder_out)


@dataclass(frozen=True, slots=True)
class WrittenContent:
    """What is written: the quantization_config of config.json, and tensors by name."""

    config: dict[str, Any]
    tensors: Iterator[tuple[str, Tensor]]


def written_content(
    folder: Path,
    settings: QuantizationSettings,
    form: WrittenFormat,
    calibrated: Calibrated | None,
    device: torch.device,
) -> WrittenContent:
    """The content of the new files; raises before anything is written."""
    if form == "flambeau":
        return WrittenContent(settings.to_config(), quantized_tensors(folder, settings, device, calibrated or {}))
    compressed = CompressedCheckpoint(folder, settings, calibrated)
    return WrittenContent(compressed.config(), compressed.tensors(device))


def check_folders(folder_in: Path, folder_out: Path) -> None:
    """Reject a checkpoint without config.json or with quantized weights, and a target that exists."""
    if not (folder_in / "config.json").is_file():
        raise CheckpointError(f"{folder_in} has no config.json; quantize a checkpoint in Hugging Face format")
    if read_object(folder_in / "config.json", CheckpointError).get("quantization_config"):
        raise CheckpointError(f"{folder_in} is quantized already; use the original checkpoint")
    if folder_out.exists() and (not folder_out.is_dir() or any(folder_out.iterdir())):
        raise CheckpointError(f"{folder_out} is there already; name a new folder")


def check_weights(folder: Path) -> None:
    """Reject weights whose names or shapes do not fit config.json; no weight is read."""
    arch = read_hugging_face(folder)
    read = {
        "images": arch.vision is not None and has_vision(folder, arch),
        "sounds": arch.sounds is not None and has_sounds(folder),
    }
    if what := next((name for name, is_read in read.items() if is_read), ""):
        raise CheckpointError(
            f"{folder} reads {what}, and a quantized copy would lose the encoder of {what}; serve the original with "
            "`flambeau llm serve --quantization int8` (or int4, fp8), or with quantization: int8 below handler: in its "
            "model-config.yaml, which quantizes the decoder while it is loaded"
        )
    with on_meta_device():
        model = Transformer(arch)
    map_weights(model, arch, open_weights(folder), None)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def quantized_tensors(
    folder: Path, settings: QuantizationSettings, device: torch.device, calibrated: Calibrated
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint by its canonical name, quantized where that applies."""
    arch = read_hugging_face(folder)
    with on_meta_device():
        model = Transformer(arch)
    quantized = names_to_quantize(model, settings)
    for stored in (stored for file in open_weights(folder) for stored in file if not is_ignored(model, stored.name)):
        for name, cut in cuts(arch, stored, None):
            tensor = cut(stored.read())
            if name not in quantized:
                yield name, tensor
                continue
            if name in calibrated:
                for leaf, value in calibrated[name].packed().items():
                    yield name.removesuffix("weight") + leaf, value.cpu()
                continue
            for part, value in quantized_parts(name, tensor.to(device), settings):
                yield part, value.cpu()


def names_to_quantize(model: Transformer, settings: QuantizationSettings) -> set[str]:
    """The tensors to quantize, by all names that they may have."""
    weights: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and settings.applies_to(name, module):
            weights[f"{name}.weight"] = module.weight
        elif isinstance(module, Experts):
            stacks = {f"{name}.{leaf}": stack for leaf, stack in module.named_parameters()}
            weights |= {
                leaf: stack
                for leaf, stack in stacks.items()
                if stack.dim() == 3 and settings.fits(leaf, stack.shape[2])
            }
    return {part for name, weight in weights.items() for layout in layouts(model.arch, name, weight) for part in layout}


def quantized_parts(name: str, tensor: Tensor, settings: QuantizationSettings) -> Iterator[tuple[str, Tensor]]:
    """The tensors that replace a weight; the experts of a layer may be stacked in one."""
    start = name.removesuffix("weight") if name.endswith(".weight") else f"{name}."
    for leaf, value in quantized_rows(tensor.flatten(0, -2), settings).items():
        yield start + leaf, value.view(*tensor.shape[:-1], *value.shape[1:])


def quantized_rows(rows_OI: Tensor, settings: QuantizationSettings) -> dict[str, Tensor]:
    """Quantized weights and scales, by their names in the layer."""
    if settings.kind == "int4":
        weight, scales, minimums = quantize_int4(rows_OI, settings.group_size_for(rows_OI.shape[1]))
        return {"weight": weight, "scales": scales, "minimums": minimums}
    weight, scale = quantize_int8(rows_OI) if settings.kind == "int8" else quantize_fp8(rows_OI)
    return {"weight": weight, "scale": scale}


def write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write files of at most MAX_FILE_BYTES, and an index if there are several."""
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
    """Write one file; returns its name for every tensor."""
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return dict.fromkeys(tensors, file)


def write_config(folder_in: Path, folder_out: Path, quantization: dict[str, Any]) -> None:
    """Write config.json with a quantization_config."""
    config = read_object(folder_in / "config.json", CheckpointError) | {"quantization_config": quantization}
    (folder_out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_others(folder_in: Path, folder_out: Path) -> None:
    """Copy the tokenizer, the chat template and all other files that are not weights."""
    for path in folder_in.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, folder_out / path.name)
