"""Quantized weights in the format of compressed-tensors, by the names of the original checkpoint.

int4 has groups with integer zeros, and networks with experts without, as vLLM needs it. int8 and fp8 have a scale
for each row; with fp8, activations are to be quantized token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.checkpoints.weight_files import open_weights
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.hugging_face import read_hugging_face
from flambeau.llm.models.latent_attention import LatentUp
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.tensor_names import canonical_name, layouts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.gptq import Grid, QuantizedRows, integer_zeros, round_to_groups, symmetric
from flambeau.llm.quantize.int4 import MAX_LEVEL
from flambeau.llm.quantize.row_scaled import quantize_fp8, quantize_int8
from flambeau.llm.quantize.settings import QuantizationSettings

Calibrated = Mapping[str, QuantizedRows]  # by the names that tensors have in a Llama
INT8_MIDDLE = 128
DYNAMIC_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


class CompressedCheckpoint:
    """What is written for a checkpoint: tensors by name, and the quantization_config of config.json."""

    def __init__(self, folder: Path, settings: QuantizationSettings, calibrated: Calibrated | None = None) -> None:
        self._arch = read_hugging_face(folder)
        self._files = open_weights(folder)
        self._settings = replace(settings, layers=fitting_layers(self._arch, settings))
        self._calibrated = calibrated or {}
        self._quantized, self._linear = tensor_names(self._arch, self._settings)
        self.check()

    def check(self) -> None:
        """Raise if weights of this family have another form than linear layers in this format."""
        is_reordered = self._arch.interleaved_rope or self._arch.grouped_qkv
        found = [name for name, shape in self._weights() if len(shape) != 2]
        if found or self._arch.transposed or (is_reordered and self._calibrated):
            what = found[0] if found else "the weights of this family"
            raise CheckpointError(
                f"compressed-tensors cannot hold {what} as they are stored; write them with --format flambeau"
            )

    def _weights(self) -> Iterator[tuple[str, torch.Size]]:
        for stored in (stored for file in self._files for stored in file):
            if canonical_name(stored.name, self._arch.renames) in self._quantized:
                yield stored.name, stored.shape

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint, quantized where that applies."""
        for stored in (stored for file in self._files for stored in file):
            name = canonical_name(stored.name, self._arch.renames)
            if name not in self._quantized:
                yield stored.name, stored.read()
                continue
            start = stored.name.removesuffix("weight")
            rows = self._calibrated.get(name)
            parts = self._parts(stored.read().to(device)) if rows is None else self._int4_parts(rows)
            for leaf, value in parts.items():
                yield start + leaf, value.cpu()

    def _parts(self, weight_OI: Tensor) -> dict[str, Tensor]:
        if self._settings.kind == "int4":
            grid = compressed_grid(self._arch)
            return self._int4_parts(round_to_groups(weight_OI, self._settings.group_size, grid))
        if self._settings.kind == "fp8":
            weight, scale = quantize_fp8(weight_OI)
            return {"weight": weight, "weight_scale": scale.unsqueeze(1)}
        weight, scale = quantize_int8(weight_OI)
        return {
            "weight_packed": pack_words(weight.to(torch.int16) + INT8_MIDDLE, 8),
            "weight_scale": scale.unsqueeze(1).to(scale_dtype(self._arch)),
            "weight_shape": torch.tensor(weight_OI.shape),
        }

    def _int4_parts(self, rows: QuantizedRows) -> dict[str, Tensor]:
        parts = {
            "weight_packed": pack_words(rows.levels, 4),
            "weight_scale": rows.scales.to(scale_dtype(self._arch)),
            "weight_shape": torch.tensor(rows.levels.shape),
        }
        if self._arch.num_experts:
            return parts
        zeros_ON = (-rows.minimums.float() / rows.scales.float()).round().clamp(0, MAX_LEVEL)
        return parts | {"weight_zero_point": pack_words(zeros_ON.t().to(torch.uint8), 4).t()}

    def config(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        kind = self._settings.kind
        weights: dict[str, Any] = {
            "num_bits": 4 if kind == "int4" else 8,
            "type": "float" if kind == "fp8" else "int",
            "symmetric": kind != "int4" or self._arch.num_experts > 0,
            "strategy": "group" if kind == "int4" else "channel",
            "group_size": self._settings.group_size if kind == "int4" else None,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        form = "float-quantized" if kind == "fp8" else "pack-quantized"
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": DYNAMIC_FP8 if kind == "fp8" else None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": self._ignored(),
            "kv_cache_scheme": None,
        }

    def _ignored(self) -> list[str]:
        """The linear layers that are not quantized."""
        names = {"lm_head"}
        for stored in (stored for file in self._files for stored in file):
            name = canonical_name(stored.name, self._arch.renames)
            if name in self._linear and name not in self._quantized:
                names.add(stored.name.removesuffix(".weight"))
        return sorted(names)


def compressed_grid(arch: Architecture) -> Grid:
    """The levels of int4 that this format can express."""
    return partial(symmetric if arch.num_experts else integer_zeros, dtype=scale_dtype(arch))


def scale_dtype(arch: Architecture) -> torch.dtype:
    return torch.float16 if arch.dtype == "float16" else torch.bfloat16


def fitting_layers(arch: Architecture, settings: QuantizationSettings) -> frozenset[str]:
    """The modules that can be quantized; all groups have the same size."""
    size = settings.group_size if settings.kind == "int4" else 1
    return frozenset(name for name, weight in quantizable(arch, settings) if weight.shape[-1] % size == 0)


def quantizable(arch: Architecture, settings: QuantizationSettings) -> Iterator[tuple[str, Tensor]]:
    """The weights that the settings apply to, by the names of their modules."""
    with on_meta_device():
        model = Transformer(arch)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and settings.applies_to(name, module):
            yield name, module.weight
        elif isinstance(module, Experts):
            for leaf in ("gate_up_proj", "down_proj"):
                if settings.fits(f"{name}.{leaf}", getattr(module, leaf).shape[2]):
                    yield f"{name}.{leaf}", getattr(module, leaf)


def tensor_names(arch: Architecture, settings: QuantizationSettings) -> tuple[set[str], set[str]]:
    """The tensors of quantized weights, and those of all linear layers, by all names that they may have."""

    def spelled(name: str, weight: Tensor) -> set[str]:
        full = name if weight.dim() == 3 else f"{name}.weight"
        return {tensor for layout in layouts(arch, full, weight) for tensor in layout}

    quantized = {tensor for name, weight in quantizable(arch, settings) for tensor in spelled(name, weight)}
    with on_meta_device():
        model = Transformer(arch)
    linear = {
        tensor
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | LatentUp)
        for tensor in spelled(name, module.weight)
    }
    return quantized, linear


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Unsigned numbers [O, I] in 32-bit words [O, W], the first in the lowest bits; the last word may be padded."""
    each = 32 // bits
    padded = nn.functional.pad(values.long(), (0, -values.shape[1] % each)).view(len(values), -1, each)
    words = (padded << (bits * torch.arange(each, device=values.device))).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
