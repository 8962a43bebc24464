"""Weights in fp8 as DeepSeek, transformers, FBGEMM and ModelOpt store them, and ModelOpt's NVFP4.

In files of DeepSeek V4, scales are powers of two under another name, and experts have 4 bits (MXFP4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flambeau.llm.checkpoints.layer_formats import LayerFormat, PackedLayer, Parts
from flambeau.llm.checkpoints.packed_layouts import fp4_layer, ill_formed, require
from flambeau.llm.checkpoints.scaled_numbers import scaled_layer
from flambeau.llm.errors import CheckpointError

LEAVES = frozenset(
    ["weight", "weight_scale", "weight_scale_inv", "scale", "input_scale", "activation_scale", "input_scale_ub"]
)
KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")
MARKERS = ("weight_scale_inv", "weight_scale", "scale")
PAIRS_OF_SCALE = 16  # bytes of MXFP4
MODELOPT_LEAVES = frozenset(["weight", "weight_scale", "weight_scale_2", "input_scale"])
MODELOPT_KINDS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
MODELOPT_BLOCK = 128
KEYS = frozenset(
    [
        "quant_method",
        "fmt",
        "weight_block_size",
        "activation_scheme",
        "modules_to_not_convert",
        "ignored_layers",
        "scale_fmt",
        "activation_scale_ub",
        "expert_dtype",
        "dequantize",
    ]
)


def fp8_format(config: Mapping[str, Any]) -> LayerFormat:
    """fp8 with a scale for each block (DeepSeek), or for each row or tensor."""
    unknown = [key for key, value in config.items() if key not in KEYS and value]
    if unknown:
        raise CheckpointError(f"the options {', '.join(unknown)} of fp8 are not supported")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"fp8 of the format {config['fmt']!r} is not supported; supported is 'e4m3'")
    block = block_size(config.get("weight_block_size"))
    return LayerFormat(
        title=f"fp8 (blocks of {block[0]}x{block[1]})" if block else "fp8",
        markers=MARKERS,
        leaves=LEAVES,
        read=lambda name, parts: read_fp8(name, parts, block),
        unused=KV_SCALES,
        remark="its quantization of activations is not used",
    )


def block_size(given: object) -> tuple[int, int] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(size, int) and size > 0 for size in given):
        raise CheckpointError(f"weight_block_size must be two whole numbers above 0, not {given!r}")
    return given[0], given[1]


def read_fp8(name: str, parts: Parts, block: tuple[int, int] | None) -> PackedLayer:
    require(parts, name, ("weight",))
    scale = next(parts[marker] for marker in MARKERS if marker in parts)
    weight = parts["weight"]
    is_paired = len(weight.shape) == 2 and scale.shape == (weight.shape[0], weight.shape[1] // PAIRS_OF_SCALE)
    if weight.dtype == torch.int8 and scale.dtype == torch.float8_e8m0fnu and is_paired:
        return fp4_layer(weight, lambda: scale.read().float(), scale.shape[1], has_wide_scales=False)
    return scaled_layer(name, parts, parts["weight"], scale, block=block)


def modelopt_format(config: Mapping[str, Any]) -> LayerFormat:
    """ModelOpt's fp8 and NVFP4."""
    kind = str(config.get("quant_algo") or "").upper()
    if kind not in MODELOPT_KINDS:
        found = config.get("quant_algo")
        raise CheckpointError(
            f"ModelOpt's quant_algo {found!r} is not supported; supported are {', '.join(MODELOPT_KINDS)}"
        )
    has_cache_scales = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    return LayerFormat(
        title=f"ModelOpt ({kind})",
        markers=("weight_scale",),
        leaves=MODELOPT_LEAVES,
        read=read_modelopt,
        unused=KV_SCALES,
        remark=f"its quantization of activations{' and of the KV cache' if has_cache_scales else ''} is not used",
    )


def read_modelopt(name: str, parts: Parts) -> PackedLayer:
    require(parts, name, ("weight",))
    weight, scale = parts["weight"], parts["weight_scale"]
    if weight.dtype != torch.uint8:
        if "weight_scale_2" in parts:
            raise ill_formed(name, parts)
        return scaled_layer(name, parts, weight, scale, block=(MODELOPT_BLOCK, MODELOPT_BLOCK))
    require(parts, name, ("weight_scale_2",))
    whole = parts["weight_scale_2"]
    is_paired = len(weight.shape) == 2 and len(scale.shape) == 2 and scale.shape[0] == weight.shape[0]
    if not is_paired or weight.shape[1] * 2 % scale.shape[1] or whole.shape.numel() != 1:
        raise ill_formed(name, parts)
    return fp4_layer(weight, lambda: scale.read().float() * whole.read().float(), scale.shape[1])
