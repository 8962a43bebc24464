"""MiniMax M3: attention to blocks of tokens that indexers choose, and gpt-oss's activation in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    DEEPSEEK_EXPERT_NAMES,
    ROTARY_KEYS,
    dense_layers,
    partial_rotation,
    text_only,
)
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gate_limits import swiglu_limits
from flambeau.llm.models.families.indexer_shape import IndexerShape

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
INDEX_KEYS = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
INDEX_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_sparse_attention": (None, True),
    "sparse_score_type": (None, "max"),
    "sparse_init_block": (None, 0),
}


def with_flat_keys(config: Config) -> Config:
    """Published files have a section on sparse attention, and lists of zeros and ones."""
    found = dict(config)
    sparse = dict(found.pop("sparse_attention_config", None) or {})
    for key, values in INDEX_SUPPORTED.items():
        value = sparse.pop(key, None)
        if value not in values:
            raise CheckpointError(
                f"sparse_attention_config.{key} {value!r} is not supported; supported is {values[-1]!r}"
            )
    found |= {flat: sparse.pop(key) for key, flat in INDEX_KEYS.items() if key in sparse}
    chosen = sparse.pop("sparse_attention_freq", None)
    if found.get("layer_types") is None:
        found["layer_types"] = [SPARSE if flag else FULL for flag in chosen or [0] * found["num_hidden_layers"]]
    without = sparse.pop("sparse_disable_index_value", None)
    if isinstance(without, list):
        without = all(flag for flag, kind in zip(without, found["layer_types"], strict=False) if kind == SPARSE)
    if without is not None and not without:
        raise CheckpointError("sparse_attention_config.sparse_disable_index_value must be true for all sparse layers")
    found |= {f"sparse_attention_config.{key}": value for key, value in sparse.items()}  # not known
    experts = found.pop("moe_layer_freq", None)
    if found.get("mlp_layer_types") is None:
        flags = experts if experts is not None else [1] * found["num_hidden_layers"]
        found["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
    if "moe_intermediate_size" not in found:  # what files call the intermediate size is that of experts
        found["moe_intermediate_size"] = found.get("intermediate_size", 3072)
        found["intermediate_size"] = found.pop("dense_intermediate_size", 12288)
    if found.get("hidden_act") == "swigluoai":
        found["hidden_act"] = "silu"  # swiglu_alpha and swiglu_limit say the rest
    return found


def minimax_3(config: Config) -> Config:
    kinds = config["layer_types"]
    if len(kinds) != config["num_hidden_layers"] or not set(kinds) <= {FULL, SPARSE}:
        raise CheckpointError(f"layer_types must name all layers, each one of {FULL}, {SPARSE}")
    indexer = IndexerShape(
        num_heads=int(config["index_n_heads"]),
        head_size=int(config["index_head_dim"]),
        num_chosen=int(config["index_topk_blocks"]),
        block_size=int(config["index_block_size"]),
        num_local_blocks=int(config["index_local_blocks"]),
        plain_layers=frozenset(number for number, kind in enumerate(kinds) if kind == FULL),
    )
    size, kv_heads = rotated_size(config), config["num_key_value_heads"]
    if SPARSE in kinds:
        check_indexer(indexer, size, kv_heads)
    return {
        "rotary_size": None if size == config["head_dim"] else size,
        "indexer": indexer if SPARSE in kinds else None,
        "gate_limits": swiglu_limits(config, everywhere=True),
        "shared_expert_size": int(config["shared_intermediate_size"]),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": dense_layers(config, 0),
    }


def check_indexer(indexer: IndexerShape, rotary_size: int, kv_heads: int) -> None:
    """Raise for heads that do not fit those of attention."""
    if indexer.num_heads != kv_heads:
        raise CheckpointError(
            f"index_n_heads {indexer.num_heads} is not supported; supported is {kv_heads}, as key-value heads"
        )
    if indexer.head_size < rotary_size:
        raise CheckpointError(
            f"index_head_dim {indexer.head_size} is less than the {rotary_size} rotated dimensions of a head"
        )
    if indexer.block_size < 1:
        raise CheckpointError(f"index_block_size {indexer.block_size} must be a number from 1")
    if not 0 <= indexer.num_local_blocks <= indexer.num_chosen:
        raise CheckpointError(f"index_local_blocks {indexer.num_local_blocks} must be at most index_topk_blocks")


def rotated_size(config: Config) -> int:
    """`rotary_dim` counts the dimensions that are rotated, and so may a factor."""
    size, named = config["head_dim"], config.get("rotary_dim")
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) is None:
        return int(named or size)
    rotated = int(partial_rotation(config).get("rotary_size", size))
    if named not in (None, rotated):
        raise CheckpointError(f"rotary_dim {named!r} is not supported where partial_rotary_factor says {rotated}")
    return rotated


MINIMAX_3_TEXT = Family(
    model_type="minimax_m3_vl_text",
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    experts=True,
    arrange=with_flat_keys,
    parts={
        "norm_offset": 1.0,
        "router": "biased_sigmoid",
        "normalizes_experts": True,
        "unused": r"(^|\.)mtp\.",
    },
    derive=minimax_3,
    understands=ROTARY_KEYS | {"num_mtp_modules", "use_mtp", "mtp_transformer_layers"},
    supported={
        "use_qk_norm": (None, True),
        "qk_norm_type": (None, "per_head"),
        "use_gemma_norm": (None, True),
        "scoring_func": (None, "sigmoid"),
        "use_routing_bias": (None, True),
        "attention_output_gate": (None, False),
    },
    renames=(
        (r"\.self_attn\.(?:indexer\.|index_)q_proj\.", ".self_attn.indexer.wq_b."),
        (r"\.self_attn\.(?:indexer\.|index_)k_proj\.", ".self_attn.indexer.wk."),
        (r"\.self_attn\.index_(q|k)_norm\.", r".self_attn.indexer.\1_norm."),
        (r"\.(mlp|block_sparse_moe)\.e_score_correction_bias$", ".mlp.score_bias"),
        (r"\.block_sparse_moe\.", ".mlp."),
        *DEEPSEEK_EXPERT_NAMES,
    ),
    defaults={
        "hidden_size": 6144,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 200064,
        "max_position_embeddings": 524288,
        "rope_theta": 5e6,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "shared_intermediate_size": 3072,
        "routed_scaling_factor": 2.0,
        "rotary_dim": 64,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
        "eos_token_id": 200020,
        "bos_token_id": 200034,
    },
)
MINIMAX_3 = {
    "MiniMaxM3VLForCausalLM": MINIMAX_3_TEXT,
    "MiniMaxM3SparseForConditionalGeneration": replace(text_only(MINIMAX_3_TEXT), model_type="minimax_m3_vl"),
}
