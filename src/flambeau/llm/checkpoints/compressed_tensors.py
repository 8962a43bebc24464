"""Weights in the format of compressed-tensors (llm-compressor): packed or 8-bit integers, fp8, 4-bit floating point.

The tensors of a layer tell how it was quantized; the configuration is checked for what would change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.checkpoints.gptq import group_order, is_within
from flambeau.llm.checkpoints.layer_formats import LayerFormat, PackedLayer, Parts
from flambeau.llm.checkpoints.packed_layouts import (
    fp4_layer,
    ill_formed,
    integer_layer,
    require,
    unpack_words,
)
from flambeau.llm.checkpoints.scaled_numbers import scale_values, scaled_layer
from flambeau.llm.errors import CheckpointError

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
KEYS = frozenset(
    [
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "kv_cache_scheme",
        "sparsity_config",
        "transform_config",
        "quantization_status",
        "global_compression_ratio",
        "version",
        "run_compressed",
    ]
)
WEIGHT_KEYS = frozenset(
    [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
    ]
)
LEAVES = frozenset(
    [
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
    ]
)
KV_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "output_scale", "output_zero_point")
PACKED_BITS = range(2, 9)


def compressed_tensors_format(config: Mapping[str, Any]) -> LayerFormat:
    """The layers of a checkpoint of compressed-tensors."""
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    check_options(config, groups)
    names = {str(group.get("format") or config.get("format")) for group in groups}
    if other := sorted(names - {*FORMATS}):
        raise CheckpointError(
            f"compressed-tensors' format {other[0]!r} is not supported; supported are {', '.join(FORMATS)}"
        )
    remarks = []
    if any(group.get("input_activations") for group in groups):
        remarks.append("its quantization of activations is not used")
    if config.get("kv_cache_scheme"):
        remarks.append("its quantization of the KV cache is not used")
    blocks = {tuple(block) for group in groups if (block := (group.get("weights") or {}).get("block_structure"))}
    if len(blocks) > 1:
        raise CheckpointError("compressed-tensors with several block_structures is not supported")
    block = next(iter(blocks), None)
    return LayerFormat(
        title=f"compressed-tensors ({', '.join(sorted(names)) or 'no format'})",
        markers=("weight_scale",),
        leaves=LEAVES,
        read=lambda name, parts: read_layer(name, parts, block),
        unused=KV_SCALES,
        remark=" and ".join(remarks),
    )


def check_options(config: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> None:
    """Raise for options that would change the result and are not understood."""
    unknown = [key for key, value in config.items() if key not in KEYS and value]
    for group in groups:
        weights = group.get("weights") or {}
        unknown += [f"weights.{key}" for key, value in weights.items() if key not in WEIGHT_KEYS and value]
        if weights.get("dynamic"):
            unknown.append("weights.dynamic")
    if unknown:
        raise CheckpointError(f"the options {', '.join(unknown)} of compressed-tensors are not supported")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise CheckpointError(
            f"sparse weights of compressed-tensors ({config['sparsity_config']['format']!r}) are not supported"
        )
    if (config.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError("transforms of compressed-tensors (transform_config) are not supported")


def read_layer(name: str, parts: Parts, block: tuple[int, ...] | None) -> PackedLayer:
    if "weight_packed" not in parts:
        require(parts, name, ("weight", "weight_scale"))
        zero = parts.get("weight_zero_point")
        return scaled_layer(name, parts, parts["weight"], parts["weight_scale"], zero=zero, block=block)
    return read_packed(name, parts) if parts["weight_packed"].dtype == torch.int32 else read_fp4(name, parts)


def read_packed(name: str, parts: Parts) -> PackedLayer:
    """Integers in 32-bit words, those of consecutive inputs; zeros are packed along the outputs."""
    require(parts, name, ("weight_packed", "weight_scale", "weight_shape"))
    packed, scale, zero = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
    shape = torch.Size(parts["weight_shape"].read().flatten().tolist())
    if len(shape) != 2 or len(packed.shape) != 2 or min(shape) < 1:
        raise ill_formed(name, parts)
    rows, columns = shape
    bits = packed.shape[1] * 32 // columns
    scales = scale.shape if len(scale.shape) == 2 else torch.Size((scale.shape.numel(), 1))
    is_fitting = packed.shape == (rows, -(-columns * bits // 32)) and scales[0] in (1, rows)
    if (
        bits not in PACKED_BITS
        or not is_fitting
        or (zero is not None and zero.shape != (-(-rows * bits // 32), scales[1]))
    ):
        raise ill_formed(name, parts)
    group_size = -(-columns // scales[1])
    order = group_order(parts.get("weight_g_idx"), group_size)
    if (order is None and columns % scales[1]) or (order is not None and not is_within(order, scales[1])):
        raise ill_formed(name, parts)

    def read_zeros() -> Tensor:
        assert zero is not None
        return unpack_words(zero.read().t().contiguous(), bits, rows).t()

    return integer_layer(
        shape,
        group_size,
        bits,
        levels=lambda: unpack_words(packed.read(), bits, columns),
        scales=lambda: scale.read().float().reshape(scales).expand(rows, -1),
        zeros=None if zero is None else read_zeros,
        order=order,
        words=packed.read if columns % 8 == 0 else None,
    )


def read_fp4(name: str, parts: Parts) -> PackedLayer:
    """Pairs of 4-bit numbers with scales in fp8 and one for all (NVFP4), or with exponents (MXFP4)."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    whole = parts.get("weight_global_scale")
    is_paired = packed.dtype == torch.uint8 and len(packed.shape) == 2 and len(scale.shape) == 2
    if not is_paired or scale.shape[0] != packed.shape[0] or packed.shape[1] * 2 % scale.shape[1]:
        raise ill_formed(name, parts)
    if whole is not None:
        return fp4_layer(packed, lambda: scale.read().float() / whole.read().float(), scale.shape[1])
    if scale.dtype != torch.uint8:
        raise ill_formed(name, parts)
    return fp4_layer(packed, lambda: scale_values(scale.read()), scale.shape[1], has_wide_scales=False)
