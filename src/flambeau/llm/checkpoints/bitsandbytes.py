"""Weights of bitsandbytes: int8 with a maximum for each row, and 4 bits that index a table (nf4, fp4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.checkpoints.layer_formats import LayerFormat, LazyTensor, PackedLayer, Parts
from flambeau.llm.checkpoints.packed_layouts import ill_formed, require, swap_halves
from flambeau.llm.checkpoints.weight_files import StoredTensor
from flambeau.llm.errors import CheckpointError
from flambeau.llm.quantize.coded import CODE_GROUPS, CodeLayout

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
LEAVES = frozenset(
    {
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        "SCB",
        "weight_format",
        *STATES,
    }
)
INT8_MAX = 127
TABLE_SIZE = 16


def bitsandbytes_format(config: Mapping[str, Any]) -> LayerFormat:
    """The layers of a checkpoint that was saved after quantization."""
    is_int8 = bool(config.get("load_in_8bit") or config.get("_load_in_8bit"))
    remark = "its threshold for outliers is not used: all activations stay in the network's type" if is_int8 else ""
    return LayerFormat(
        title=f"bitsandbytes ({'int8' if is_int8 else config.get('bnb_4bit_quant_type', '4 bits')})",
        markers=(*STATES, "SCB"),
        leaves=LEAVES,
        read=read_layer,
        remark=remark,
    )


def read_layer(name: str, parts: Parts) -> PackedLayer:
    require(parts, name, ("weight",))
    return read_int8(name, parts) if "SCB" in parts else read_4_bits(name, parts)


def read_int8(name: str, parts: Parts) -> PackedLayer:
    """A row's largest absolute value is 127."""
    weight, largest = parts["weight"], parts["SCB"]
    if weight.dtype != torch.int8 or len(weight.shape) != 2 or largest.shape.numel() != weight.shape[0]:
        raise ill_formed(name, parts)
    if "weight_format" in parts and int(parts["weight_format"].read()) != 0:
        raise CheckpointError(f"{name}.weight_format of bitsandbytes is not supported; supported is 0, rows in order")

    def scale() -> Tensor:
        return largest.read().float().flatten() / INT8_MAX

    whole = LazyTensor(weight.shape, torch.float32, lambda: weight.read().float().mul_(scale().unsqueeze(1)))
    own = {
        "weight": LazyTensor(weight.shape, torch.int8, weight.read),
        "scale": LazyTensor(torch.Size((weight.shape[0],)), torch.float32, scale),
    }
    return PackedLayer(weight=whole, layout=("int8", 0), own=own)


def read_4_bits(name: str, parts: Parts) -> PackedLayer:
    """Codes of 4 bits, the first in the upper half of a byte; blocks of them share an absolute maximum."""
    require(parts, name, ("weight.absmax", "weight.quant_map"))
    state = read_state(name, parts)
    shape = torch.Size(state["shape"])
    packed = parts["weight"]
    if packed.num_bytes * 2 != shape.numel() or len(shape) != 2:  # bytes may be stored as numbers of another type
        raise ill_formed(name, parts)
    num_blocks = -(-shape.numel() // state["blocksize"])
    if parts["weight.absmax"].shape.numel() != num_blocks or parts["weight.quant_map"].shape.numel() != TABLE_SIZE:
        raise ill_formed(name, parts)
    whole = LazyTensor(shape, torch.float32, partial(dequantize_4_bits, parts, state))
    size = state["blocksize"]
    if shape[1] % size or size not in CODE_GROUPS:
        return PackedLayer(weight=whole)
    grouped = torch.Size((shape[0], shape[1] // size))
    coded = {
        "weight": LazyTensor(
            torch.Size((shape[0], shape[1] // 2)), torch.uint8, lambda: pairs_of(packed).view(shape[0], -1)
        ),
        "scales": LazyTensor(grouped, torch.float32, lambda: maxima(parts, state).view(grouped)),
    }
    codes = CodeLayout(tuple(parts["weight.quant_map"].read().float().tolist()), size)
    return PackedLayer(weight=whole, codes=codes, coded=coded)


def pairs_of(packed: StoredTensor) -> Tensor:
    """Codes with the first in the lower half of a byte."""
    return swap_halves(packed.read().flatten().view(torch.uint8))


def read_state(name: str, parts: Parts) -> Mapping[str, Any]:
    """The description of a layer, JSON in the bytes of a tensor."""
    stored = next(parts[leaf] for leaf in STATES if leaf in parts)
    try:
        state = json.loads(bytes(stored.read().flatten().tolist()))
        sizes = [*state["shape"], state["blocksize"], *([state["nested_blocksize"]] if is_nested(parts) else [])]
        if all(isinstance(size, int) and size > 0 for size in sizes):
            return state  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(f"the quant_state of {name} is not understood; download the checkpoint again")


def is_nested(parts: Parts) -> bool:
    """Whether the maxima are quantized too."""
    return parts["weight.absmax"].dtype == torch.uint8


def dequantize_4_bits(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    pairs = parts["weight"].read().flatten().view(torch.uint8)
    codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten().int()
    numbers = parts["weight.quant_map"].read().float()[codes]
    largest = maxima(parts, state).repeat_interleave(state["blocksize"])[: len(numbers)]
    return numbers.mul_(largest).view(state["shape"])


def maxima(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    """The absolute maximum of each block."""
    stored = parts["weight.absmax"].read()
    if not is_nested(parts):
        return stored.float()
    table, outer = parts["weight.nested_quant_map"].read().float(), parts["weight.nested_absmax"].read().float()
    outer = outer.repeat_interleave(state["nested_blocksize"])[: len(stored)]
    return table[stored.int()] * outer + float(state.get("nested_offset", 0.0))
