"""Families with latent attention (MLA): keys and values of all heads come from one small vector of a token."""

from __future__ import annotations

import math
from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    DEEPSEEK_EXPERT_NAMES,
    LLAMA_TOKENS,
    dense_layers,
    expert_groups,
    growing_queries,
    minicpm_scales,
    text_only,
)
from flambeau.llm.models.families.family import Config, Family


def latent_attention(config: Config) -> Config:
    """Sizes, and the scale of attention; the cache has one key-value head, a latent and a rotated key."""
    latent, plain = (int(config[key]) for key in ("kv_lora_rank", "qk_nope_head_dim"))
    rotated = int(config["head_dim"] if config.get("rotated_size") is None else config["rotated_size"])
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise CheckpointError(
            f"num_key_value_heads {kv_heads!r} is not supported here; supported is {heads}, as many as heads"
        )
    value = config.get("v_head_dim") or config["hidden_size"] // heads
    return {
        "latent_size": latent,
        "query_latent_size": int(config.get("q_lora_rank") or 0),
        "rotary_size": rotated,
        "unrotated_size": plain,
        "value_size": int(value),
        "num_kv_heads": 1,
        "head_size": latent + rotated,
        "attention_scale": (plain + rotated) ** -0.5 * sharpness(config) ** 2,
    }


def sharpness(config: Config) -> float:
    """What YaRN multiplies queries and keys with, beside the rotation."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    mscale, factor = parameters.get("mscale_all_dim") or 0.0, parameters.get("factor") or 1.0
    if kind == "default" or not mscale or factor <= 1:
        return 1.0
    return float(0.1 * mscale * math.log(factor) + 1.0)


def deepseek_experts(config: Config) -> Config:
    """Shared experts, groups and the first layers without experts."""
    return {
        "shared_expert_size": int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": frozenset(range(int(config["first_k_dense_replace"]))),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def deepseek_2(config: Config) -> Config:
    parts = {**latent_attention(config), **deepseek_experts(config)}
    method = config.get("topk_method")
    if method == "greedy":  # groups have no effect
        return {**parts, "num_expert_groups": 1, "num_chosen_groups": 1}
    if method != "group_limited_greedy":
        raise CheckpointError(
            f"topk_method {method!r} is not supported here; supported are 'greedy' and 'group_limited_greedy'"
        )
    return parts


def deepseek_3(config: Config) -> Config:
    return {**latent_attention(config), **deepseek_experts(config), "paired_rope": bool(config["rope_interleave"])}


def glm_4_lite(config: Config) -> Config:
    return {**deepseek_3(config), "dense_layers": dense_layers(config, 1)}


def mistral_4(config: Config) -> Config:
    if (config.get("n_group") or 1) != 1:
        raise CheckpointError(f"n_group {config['n_group']!r} is not supported here; supported is 1")
    return {**deepseek_3(config), **growing_queries(config)}


def youtu(config: Config) -> Config:
    return {**latent_attention(config), "paired_rope": bool(config["rope_interleave"])}


def minicpm_3(config: Config) -> Config:
    return {**latent_attention(config), **minicpm_scales(config)}


ALIASES = {"qk_rope_head_dim": "head_dim"}  # whatever a file has as head_dim
DEEPSEEK_ALIASES = {**ALIASES, "n_routed_experts": "num_experts"}
DEEPSEEK_NAMES = DEEPSEEK_EXPERT_NAMES
DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
MISTRAL_4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DERIVED_KEYS = frozenset({"qk_head_dim", "num_mtp_layers", "num_local_experts"})  # written beside those that count

DEEPSEEK_3 = Family(
    model_type="deepseek_v3",
    has_kv_heads=False,
    experts=True,
    parts={"router": "biased_sigmoid"},
    derive=deepseek_3,
    understands=DERIVED_KEYS,
    supported={
        "topk_method": (None, "noaux_tc"),
        "scoring_func": (None, "sigmoid"),
        "index_topk": (None,),  # sparse attention of V3.2
        "moe_layer_freq": (None, 1),
    },
    aliases=DEEPSEEK_ALIASES,
    renames=DEEPSEEK_NAMES,
    defaults={
        **DEEPSEEK_DEFAULTS,
        "max_position_embeddings": 4096,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "eos_token_id": 1,
        "bos_token_id": 0,
    },
)
KIMI_2 = replace(DEEPSEEK_3, model_type="kimi_k2")

LATENT = {
    "DeepseekV2ForCausalLM": Family(
        model_type="deepseek_v2",
        has_kv_heads=False,
        experts=True,
        parts={"router": "grouped_softmax", "paired_rope": True},
        derive=deepseek_2,
        understands=DERIVED_KEYS | {"n_group", "topk_group"},
        supported={
            "norm_topk_prob": (None, False),
            "scoring_func": (None, "softmax"),
            "moe_layer_freq": (None, 1),
        },
        aliases=DEEPSEEK_ALIASES,
        renames=DEEPSEEK_NAMES,
        defaults={
            **DEEPSEEK_DEFAULTS,
            "num_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            **LLAMA_TOKENS,
        },
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK_3,
    "KimiK2ForCausalLM": KIMI_2,
    "KimiK25ForConditionalGeneration": replace(text_only(KIMI_2), model_type="kimi_k25"),
    "Glm4MoeLiteForCausalLM": Family(
        model_type="glm4_moe_lite",
        has_kv_heads=False,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=glm_4_lite,
        understands=DERIVED_KEYS | {"first_k_dense_replace"},
        supported={"topk_method": (None, "noaux_tc"), "scoring_func": (None, "sigmoid"), "index_topk": (None,)},
        aliases=DEEPSEEK_ALIASES,
        renames=DEEPSEEK_NAMES,
        defaults={
            **DEEPSEEK_DEFAULTS,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "eos_token_id": 1,
            "bos_token_id": 0,
        },
    ),
    "Mistral4ForCausalLM": Family(
        model_type="mistral4",
        has_kv_heads=False,
        experts=True,
        derive=mistral_4,
        understands=DERIVED_KEYS
        | {"llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor"},  # among the rope parameters
        supported={"moe_layer_freq": (None, 1)},
        aliases=DEEPSEEK_ALIASES,
        renames=DEEPSEEK_NAMES,
        defaults={
            **DEEPSEEK_DEFAULTS,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "max_position_embeddings": 1048576,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "rope_parameters": MISTRAL_4_ROPE,
            **LLAMA_TOKENS,
        },
    ),
    "YoutuForCausalLM": Family(
        model_type="youtu",
        has_kv_heads=False,
        derive=youtu,
        understands=DERIVED_KEYS | {"embedding_initializer_range"},
        aliases=ALIASES,
        defaults={
            **DEEPSEEK_DEFAULTS,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_interleave": True,
            "eos_token_id": 128001,
            "bos_token_id": 128000,
        },
    ),
    "MiniCPM3ForCausalLM": Family(
        model_type="minicpm3",
        has_kv_heads=False,
        derive=minicpm_3,
        understands=DERIVED_KEYS,
        aliases=ALIASES,
        defaults={
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "head_dim": 32,
            "qk_nope_head_dim": 64,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "tie_word_embeddings": True,
            **LLAMA_TOKENS,
        },
    ),
}
