"""GEMMAS: architectures of Gemma's GGUF files, as config.json describes them."""

from __future__ import annotations

from math import inf
from statistics import NormalDist
from typing import Any

import numpy as np

from flambeau.llm.checkpoints.gguf_parts import (
    ToConfig,
    has_tensor,
    ignore,
    listed,
    query_scale,
    required,
    window,
)
from flambeau.llm.checkpoints.gguf_rope import numbers, rope_parameters
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, GgufTensor

FIRST_SHARED = 20  # layers of Gemma 3n that have keys of their own, in files that do not say it
DIGITS = 7  # of a sparsity that was stored in float32
UNROTATED = float(np.float32(1e30))  # a divisor of frequencies
WINDOW, FULL = "sliding_attention", "full_attention"


def gemma(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"]}


def gemma_2(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["Gemma2ForCausalLM"], **window(header), **query_scale(header)}


def gemma_3(header: GgufHeader) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **window(header),
        **query_scale(header),
        "rope_parameters": positions(header, {"rope_type": "default", **rope_parameters(header)}),
    }


def gemma_3n(header: GgufHeader) -> dict[str, Any]:
    """Files have the number of deviations from the mean that an activation must reach, instead of its sparsity."""
    given, count, normal = header.get("activation_sparsity_scale"), required(header, "block_count"), NormalDist()
    scales = given if isinstance(given, list) else [-inf if given is None else given] * count
    return {
        "architectures": ["Gemma3nForCausalLM"],
        **window(header),
        **layer_inputs(header),
        "num_kv_shared_layers": header.get("attention.shared_kv_layers", count - FIRST_SHARED),
        "intermediate_size": listed(header, "feed_forward_length"),
        "activation_sparsity_pattern": [round(normal.cdf(scale), DIGITS) for scale in scales],
        "altup_active_idx": header.get("altup.active_idx"),
        "altup_num_inputs": header.get("altup.num_inputs"),
        "altup_correct_scale": has_tensor(header, ".altup_correct_scale."),
        "laurel_rank": named(header, "blk.0.laurel_l.weight").shape[0],
        "rope_parameters": positions(header, {"rope_type": "default", **rope_parameters(header)}),
    }


def gemma_4(header: GgufHeader) -> dict[str, Any]:
    """Keys name the heads of layers without a window; those of the others end in _swa."""
    windows, count = window(header), required(header, "block_count")
    size, wide = required(header, "attention.key_length_swa"), required(header, "attention.key_length")
    kinds = windows.get("layer_types")
    if kinds is None or len(kinds) != count or kinds[-1] != FULL:
        raise CheckpointError(
            f"{header.path} must say which of {count} layers have a window, and the last one has none"
        )
    check_equal(header, "attention.value_length", wide)
    check_equal(header, "attention.value_length_swa", size)
    check_equal(header, "rope.dimension_count", wide)
    check_equal(header, "rope.dimension_count_swa", size)
    shared, kv_heads = header.get("attention.shared_kv_layers") or 0, listed(header, "attention.head_count_kv")
    own = {
        str(layer): {"num_key_value_heads": kv_heads[layer], "head_dim": wide if kind == FULL else size}
        for layer, kind in enumerate(kinds)
    }
    return {
        "architectures": ["Gemma4ForCausalLM"],
        **windows,
        **layer_inputs(header),
        **gemma_4_sizes(header, shared),
        **gemma_4_experts(header),
        "head_dim": size,
        "global_head_dim": wide,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": own,
        "attention_k_eq_v": keys_are_values(header, kinds[: count - shared]),
        "num_kv_shared_layers": shared,
        "rope_parameters": positions(header, {**rope_parameters(header), **proportion(header)}),
    }


def check_equal(header: GgufHeader, key: str, expected: int) -> None:
    if header.get(key) not in (None, expected):
        raise CheckpointError(f"{header.path} has {key} {header.get(key)}; supported is {expected}")


def gemma_4_sizes(header: GgufHeader, shared: int) -> dict[str, Any]:
    """Feed-forward layers of one size, or twice as wide where layers read the keys of others."""
    sizes = listed(header, "feed_forward_length")
    own = sizes[: len(sizes) - shared]
    is_doubled = shared > 0 and sizes == own + [2 * size for size in own[:1]] * shared
    if len({*own}) != 1 or not (is_doubled or sizes == own[:1] * len(sizes)):
        raise CheckpointError(f"{header.path} has feed_forward_length {sizes}, which is not supported")
    return {"intermediate_size": own[0], "use_double_wide_mlp": is_doubled}


def gemma_4_experts(header: GgufHeader) -> dict[str, Any]:
    count, chosen = header.get("expert_count"), header.get("expert_used_count")
    ignore(header, "expert_feed_forward_length")
    if not has_tensor(header, ".ffn_gate_inp."):
        return {"num_experts_per_tok": None, "moe_intermediate_size": None}
    return {"enable_moe_block": True, "num_experts": count, "top_k_experts": chosen, "num_experts_per_tok": None}


def keys_are_values(header: GgufHeader, kinds: list[str]) -> bool:
    """Whether layers without a window have no values of their own."""
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    without = [layer for layer in full if f"blk.{layer}.attn_v.weight" not in header.tensors]
    if without not in ([], full):
        raise CheckpointError(f"{header.path} has attn_v in some layers without a window only: not supported")
    return bool(without)


def positions(header: GgufHeader, of_others: dict[str, Any]) -> dict[str, Any]:
    """The settings of layers with a window, and of others."""
    local = header.get("rope.freq_base_swa", 10000.0)
    return {FULL: of_others, WINDOW: {"rope_type": "default", "rope_theta": local}}


def proportion(header: GgufHeader) -> dict[str, Any]:
    """The part of a head that is rotated: divisors of its other frequencies are as good as infinite."""
    divisors = numbers(header, "rope_freqs.weight")
    rotated = divisors.count(1.0)
    if divisors != [1.0] * rotated + [UNROTATED] * (len(divisors) - rotated):
        raise CheckpointError(f"{header.path} has other numbers in rope_freqs.weight than 1 and 1e30: not supported")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}


def layer_inputs(header: GgufHeader) -> dict[str, Any]:
    """Embeddings that each layer has of its own."""
    size = header.get("embedding_length_per_layer_input") or 0
    if not size:
        return {"hidden_size_per_layer_input": 0}
    rows = named(header, "per_layer_token_embd.weight").shape[0]
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": rows}


def named(header: GgufHeader, name: str) -> GgufTensor:
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} has no {name}; download it again")
    return header.tensors[name]


GEMMAS: dict[str, ToConfig] = {
    "gemma": gemma,
    "gemma2": gemma_2,
    "gemma3": gemma_3,
    "gemma3n": gemma_3n,
    "gemma4": gemma_4,
}
