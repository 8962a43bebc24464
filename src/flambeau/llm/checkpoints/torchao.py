"""Weights quantized by torchao, as its safetensors hold them: parts of a tensor, and its type in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flambeau.llm.checkpoints.layer_formats import LayerFormat, PackedLayer, Parts
from flambeau.llm.checkpoints.packed_layouts import require
from flambeau.llm.checkpoints.scaled_numbers import scaled_layer
from flambeau.llm.checkpoints.weight_files import SafetensorsFile
from flambeau.llm.errors import CheckpointError

TYPES = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")
LEAVES = frozenset(
    f"_weight_{part}"
    for part in ("qdata", "scale", "zero_point", "act_quant_scale", "act_quant_zero_point", "act_pre_scale")
)


def torchao_format(config: Mapping[str, Any]) -> LayerFormat:
    return LayerFormat(
        title="torchao",
        markers=("_weight_qdata",),
        leaves=LEAVES,
        read=read_layer,
        remark="its quantization of activations, if any, is not used",
    )


def read_layer(name: str, parts: Parts) -> PackedLayer:
    require(parts, name, ("_weight_qdata", "_weight_scale"))
    numbers = parts["_weight_qdata"]
    kind = type_of(name, numbers.file)
    if kind not in TYPES:
        raise CheckpointError(
            f"{name} is a {kind} of torchao, which is not supported; supported are {', '.join(TYPES)}. Use the "
            "original checkpoint"
        )
    if "_weight_act_pre_scale" in parts:
        raise CheckpointError(f"{name} of torchao scales its inputs (act_pre_scale), which is not supported")
    zero, has_bytes = parts.get("_weight_zero_point"), kind != "IntxUnpackedToInt8Tensor"
    return scaled_layer(name, parts, numbers, parts["_weight_scale"], zero=zero, has_bytes=has_bytes)


def type_of(name: str, file: object) -> str:
    """The class of a layer's weights."""
    described = file.metadata.get(f"{name}.weight", "") if isinstance(file, SafetensorsFile) else ""
    try:
        return str(json.loads(described)["_type"])
    except (ValueError, KeyError, TypeError):
        return "tensor of unknown type"
