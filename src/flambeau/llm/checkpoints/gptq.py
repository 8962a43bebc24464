"""Weights quantized by GPTQ and AWQ: integers of 2 to 8 bits in groups along the inputs.

A weight is `scale · (level - zero)`. GPTQ packs the levels of consecutive inputs into a word, AWQ those of eight
outputs in an order of its own; both pack the zeros of consecutive groups of outputs.

Shapes: I inputs · O outputs · N groups
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.checkpoints.layer_formats import LayerFormat, PackedLayer, Parts
from flambeau.llm.checkpoints.packed_layouts import ill_formed, integer_layer, require, unpack_words
from flambeau.llm.checkpoints.weight_files import StoredTensor
from flambeau.llm.errors import CheckpointError

_KNOWN = """
quant_method bits group_size desc_act sym zero_point version static_groups true_sequential checkpoint_format format
method is_marlin_format lm_head dynamic pack_dtype damp_percent damp_auto_increment mse dataset tokenizer batch_size
block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize modules_to_not_convert
pad_token_id
use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length cache_block_outputs model_seqlen backend
hyb_act
model_name_or_path model_file_base_name meta w_bit q_group_size do_fuse fuse_max_seq_len modules_to_fuse act_group_aware
"""
KNOWN = frozenset(_KNOWN.split())  # of GPTQ and AWQ; how weights were found has no effect, and the files tell the rest
REJECTED = ("adapter", "rotation")  # which change the result
LEAVES = frozenset({"qweight", "qzeros", "scales", "g_idx"})
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight outputs of a word: output i is at place AWQ_PLACES[i]
AWQ_WORDS_AT_ONCE = 64  # of a row, each of eight outputs
BITS = (2, 3, 4, 8)


def gptq_format(config: Mapping[str, Any]) -> LayerFormat:
    """GPTQ's layers; files of the first version store each zero minus 1."""
    bits = config.get("bits")
    check_rejected(config)
    if bits not in BITS:
        raise CheckpointError(f"GPTQ with bits {bits!r} is not supported; supported are {', '.join(map(str, BITS))}")
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        found = "marlin" if config.get("is_marlin_format") else version
        raise CheckpointError(f"GPTQ's checkpoint_format {found!r} is not supported; supported are gptq and gptq_v2")
    offset = 1 if version == "gptq" else 0
    return LayerFormat(
        title=f"GPTQ ({bits} bits)",
        markers=("qweight",),
        leaves=LEAVES,
        read=partial(read_gptq, bits=bits, zero_offset=offset),
        remark=unknown_options(config),
    )


def awq_format(config: Mapping[str, Any]) -> LayerFormat:
    """AWQ's layers, as its `gemm` version stores them."""
    bits = config.get("bits", config.get("w_bit", 4))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(f"AWQ with {bits} bits, version {version!r} is not supported; supported is 4, 'gemm'")
    if config.get("zero_point", True) is False:
        raise CheckpointError("AWQ with zero_point false is not supported")
    check_rejected(config)
    return LayerFormat(
        title="AWQ (4 bits)",
        markers=("qweight",),
        leaves=LEAVES - {"g_idx"},
        read=read_awq,
        remark=unknown_options(config),
    )


def auto_round_format(config: Mapping[str, Any]) -> LayerFormat:
    """AutoRound, whose files are arranged as those of GPTQ or AWQ."""
    kind, packing = config.get("data_type") or "int", config.get("packing_format")
    make = ARRANGEMENTS.get(str(packing))
    if kind != "int" or make is None:
        raise CheckpointError(
            f"AutoRound's data_type {kind!r} with packing_format {packing!r} is not supported; supported is 'int' with "
            f"{', '.join(ARRANGEMENTS)}"
        )
    found = make({key: config[key] for key in ("bits", "group_size", "sym") if key in config})
    return replace(found, title=f"AutoRound, as {found.title}")


ARRANGEMENTS: Mapping[str, Callable[[Mapping[str, Any]], LayerFormat]] = {
    "auto_round:auto_gptq": gptq_format,
    "auto_round:auto_awq": awq_format,
}


def check_rejected(config: Mapping[str, Any]) -> None:
    found = [key for key in REJECTED if config.get(key)]
    if found:
        raise CheckpointError(f"the option {found[0]} of quantization_config is not supported: it changes the result")


def unknown_options(config: Mapping[str, Any]) -> str:
    """A remark on options that are not known."""
    unknown = [key for key, value in config.items() if key not in KNOWN and value not in (None, False, "", [], {})]
    return f"unknown options of quantization_config have no effect: {', '.join(unknown)}" if unknown else ""


def read_gptq(name: str, parts: Parts, *, bits: int, zero_offset: int) -> PackedLayer:
    """A layer of GPTQ; `bits` is used if the layer has no g_idx, which tells its number of inputs."""
    require(parts, name, ("qweight", "qzeros", "scales"))
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    if len(qweight.shape) != 2 or len(scales.shape) != 2:
        raise ill_formed(name, parts)
    if "g_idx" in parts:  # a layer may have other bits than the rest
        in_features = parts["g_idx"].shape.numel()
        bits = qweight.shape[0] * 32 // max(1, in_features)
    else:
        in_features = qweight.shape[0] * 32 // bits
    num_groups, out_features = scales.shape
    are_packed = qweight.shape == (in_features * bits // 32, out_features) and qweight.dtype == torch.int32
    if bits not in BITS or not are_packed or qzeros.shape != (num_groups, out_features * bits // 32):
        raise ill_formed(name, parts)

    def read_words() -> Tensor:
        return qweight.read().t().contiguous()

    def read_levels() -> Tensor:
        return unpack_words(read_words(), bits, in_features)

    def read_zeros() -> Tensor:
        return unpack_words(qzeros.read(), bits, out_features).t().to(torch.int16) + zero_offset

    group_size = -(-in_features // num_groups)
    order = group_order(parts.get("g_idx"), group_size)
    if (order is None and in_features % num_groups) or (order is not None and not is_within(order, num_groups)):
        raise ill_formed(name, parts)
    return integer_layer(
        torch.Size((out_features, in_features)),
        group_size,
        bits,
        levels=read_levels,
        scales=lambda: scales.read().t(),
        zeros=read_zeros,
        order=order,
        words=read_words,
    )


def group_order(g_idx: StoredTensor | None, group_size: int) -> Tensor | None:
    """The group of each input; None if groups are consecutive inputs."""
    if g_idx is None:
        return None
    groups = g_idx.read().long()
    return None if torch.equal(groups, torch.arange(len(groups)) // group_size) else groups


def is_within(order: Tensor, num_groups: int) -> bool:
    return bool(order.min() >= 0) and bool(order.max() < num_groups)


def read_awq(name: str, parts: Parts) -> PackedLayer:
    require(parts, name, ("qweight", "qzeros", "scales"))
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    if len(qweight.shape) != 2 or len(scales.shape) != 2 or qweight.dtype != torch.int32:
        raise ill_formed(name, parts)
    in_features, out_features = qweight.shape[0], qweight.shape[1] * 8
    num_groups = scales.shape[0]
    if scales.shape[1] != out_features or qzeros.shape != (num_groups, out_features // 8) or in_features % num_groups:
        raise ill_formed(name, parts)

    def ordered(words: Tensor) -> Tensor:
        """[…, O] from the words […, O/8]."""
        values = unpack_words(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
        return values[:, :, AWQ_PLACES].flatten(1)

    def read_words() -> Tensor:
        """The levels of some outputs after the other: one in a byte, they take twice the memory of the file."""
        pairs = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
        for start, some in enumerate(torch.split(qweight.read(), AWQ_WORDS_AT_ONCE, dim=1)):
            levels = ordered(some).t().contiguous()
            rows = slice(start * AWQ_WORDS_AT_ONCE * 8, start * AWQ_WORDS_AT_ONCE * 8 + len(levels))
            pairs[rows] = levels[:, ::2] | levels[:, 1::2] << 4
        return pairs.view(torch.int32)

    def read_levels() -> Tensor:
        return ordered(qweight.read()).t().contiguous()

    def read_zeros() -> Tensor:
        return ordered(qzeros.read()).t()

    return integer_layer(
        torch.Size((out_features, in_features)),
        in_features // num_groups,
        4,
        levels=read_levels,
        scales=lambda: scales.read().t(),
        zeros=read_zeros,
        words=read_words if in_features % 8 == 0 else None,
    )
