"""Families with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    CLIP_KEYS,
    DEEPSEEK_EXPERT_NAMES,
    HUNYUAN_KEYS,
    HUNYUAN_MOE_KEYS,
    HUNYUAN_NAMES,
    HUNYUAN_SUPPORTED,
    LLAMA_TOKENS,
    ROTARY_KEYS,
    clipped,
    expert_groups,
    granite,
    partial_rotation,
    stretched_theta,
)
from flambeau.llm.models.families.family import Config, Family


def qwen_2_moe(config: Config) -> Config:
    return {
        "qkv_bias": bool(config["qkv_bias"]),
        "shared_expert_size": int(config["shared_expert_intermediate_size"]),
        "gates_shared_expert": True,
    }


def granite_moe_shared(config: Config) -> Config:
    return {**granite(config), "shared_expert_size": int(config["shared_intermediate_size"])}


def glm_4_moe(config: Config) -> Config:
    return {
        **partial_rotation(config),
        "qk_norm": bool(config.get("use_qk_norm")),
        "shared_expert_size": int(config["n_shared_experts"]) * int(config["moe_intermediate_size"]),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": frozenset(range(int(config["first_k_dense_replace"]))),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def hunyuan_moe(config: Config) -> Config:
    """Numbers may be given for each layer, and have to be the same for all."""
    size = one_of("intermediate_size", config["intermediate_size"])
    given = config.get("moe_intermediate_size")
    if given is not None and one_of("moe_intermediate_size", given) != size:
        raise CheckpointError(f"moe_intermediate_size is not supported unless it is intermediate_size, {size}")
    return {
        **stretched_theta(config),
        "num_experts": one_of("num_experts", config["num_experts"]),
        "num_experts_per_token": one_of("moe_topk", config["moe_topk"]),
        "expert_size": size,
        "shared_expert_size": size * one_of("num_shared_expert", config["num_shared_expert"]),
        "normalizes_experts": True,
    }


def one_of(key: str, value: object) -> int:
    """A number, or a list with one number for each layer."""
    numbers = set(value) if isinstance(value, list) else {value}
    number = next(iter(numbers), None)
    if len(numbers) != 1 or not isinstance(number, int):
        raise CheckpointError(f"{key} {value!r} is not supported; it must be one number, the same for all layers")
    return number


def ernie_moe(config: Config) -> Config:
    num_layers, interval = config["num_hidden_layers"], int(config["moe_layer_interval"])
    first, last = int(config["moe_layer_start_index"]), int(config["moe_layer_end_index"])
    last = num_layers - 1 if last == -1 else last
    sparse = {i for i in range(num_layers) if (i + 1) % interval == 0 and first <= i <= last}
    return {
        "shared_expert_size": int(config["moe_num_shared_experts"]) * int(config["moe_intermediate_size"]),
        "dense_layers": frozenset(range(num_layers)) - sparse,
    }


def dots_1(config: Config) -> Config:
    return {
        "shared_expert_size": int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": frozenset(range(int(config["first_k_dense_replace"]))),
    }


def deepseek_1(config: Config) -> Config:
    """DeepSeek's first experts."""
    return {
        "shared_expert_size": int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
        "dense_layers": frozenset(range(int(config["first_k_dense_replace"]))),
    }


def bailing(config: Config) -> Config:
    """Ling and Ring."""
    shared = config.get("moe_shared_expert_intermediate_size") or config["moe_intermediate_size"]
    return {
        "qkv_bias": bool(config["use_qkv_bias"]),
        "output_bias": bool(config["use_bias"]),
        "shared_expert_size": int(config.get("num_shared_experts") or 0) * int(shared),
        "dense_layers": frozenset(range(int(config["first_k_dense_replace"]))),
    }


def bailing_2(config: Config) -> Config:
    return {
        **bailing(config),
        **partial_rotation(config),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def minimax_m2(config: Config) -> Config:
    """`rotary_dim` counts the dimensions that are rotated, unless a factor does."""
    if set(config.get("attn_type_list") or [1]) != {1}:
        raise CheckpointError("attn_type_list with other values than 1 (linear attention) is not supported")
    rotated = config.get("rotary_dim")
    partial = partial_rotation(config)
    if partial or rotated in (None, config["head_dim"]):
        return partial
    return {"rotary_size": int(rotated)}


def phi_moe(config: Config) -> Config:
    if config["num_experts_per_tok"] != 2:
        raise CheckpointError("num_experts_per_tok must be 2 here, as the router chooses two experts")
    return {"router_jitter": float(config["router_jitter_noise"]), "head_bias": bool(config.get("lm_head_bias"))}


def gpt_oss(config: Config) -> Config:
    return {"swiglu_limit": float(config["swiglu_limit"]), "swiglu_alpha": float(config["swiglu_alpha"])}


MINIMAX_SUPPORTED = {
    "use_qk_norm": (None, True),
    "qk_norm_type": (None, "per_layer"),
    "scoring_func": (None, "sigmoid"),
    "use_routing_bias": (None, True),
    "shared_intermediate_size": (None, 0),
    "layernorm_full_attention_beta": (None, 1, 1.0),
    "layernorm_linear_attention_beta": (None, 1, 1.0),
    "layernorm_mlp_beta": (None, 1, 1.0),
}
GRANITE_MOE_NAMES = (
    (r"\.block_sparse_moe\.input_linear\.weight", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
)
GRANITE_MOE_KEYS = frozenset({"init_method"})
GRANITE_MOE_SUPPORTED = {"normalization_function": (None, "rmsnorm"), "position_embedding_type": (None, "rope")}
GRANITE_MOE_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    **LLAMA_TOKENS,
}

BAILING_NAMES = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.score_bias"),
    (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
)
BAILING_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "norm_head": (None, False),
    "norm_softmax": (None, False),
    "multi_gate": (None, False),
    "use_rmsnorm": (None, True),
    "use_sliding_window": (None, False),
}
BAILING = Family(
    model_type="bailing_moe",
    experts=True,
    derive=bailing,
    understands=frozenset({"max_window_layers", "sliding_window"}),
    supported=BAILING_SUPPORTED,
    renames=BAILING_NAMES,
    defaults={
        "use_bias": False,
        "use_qkv_bias": False,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "moe_intermediate_size": None,
    },
)

PHI_MOE = Family(
    model_type="phimoe",
    windowed="all",
    switches_window=False,
    names_layers=False,
    experts=True,
    parts={"norm": "layer", "norm_bias": True, "router": "sparse_mixer"},
    derive=phi_moe,
    understands=frozenset({"lm_head_bias", "short_mscale", "long_mscale"}),
    renames=((r"\.mlp\.router\.", ".mlp.gate."),),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "router_jitter_noise": 0.01,
        **LLAMA_TOKENS,
    },
)

EXPERTS = {
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        qkv_bias=False,
        output_bias=False,
        windowed="all",
        switches_window=False,
        names_layers=False,
        experts=True,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            **LLAMA_TOKENS,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        qk_norm=True,
        windowed="all",
        names_layers=False,
        experts=True,
        supported={  # Qwen3-Coder has the keys of its ancestors
            "use_qk_norm": (None, True),
            "qkv_bias": (None, False),
            "shared_expert_intermediate_size": (None, 0),
        },
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        qk_norm=True,
        experts=True,
        parts={"wide_qk_norm": True},
        derive=clipped,
        understands=CLIP_KEYS,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "eos_token_id": 50279,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        output_bias=False,
        windowed="late",
        experts=True,
        derive=qwen_2_moe,
        defaults={
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "qkv_bias": True,
        },
    ),
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        experts=True,
        derive=granite,
        understands=GRANITE_MOE_KEYS,
        supported=GRANITE_MOE_SUPPORTED,
        renames=GRANITE_MOE_NAMES,
        defaults=GRANITE_MOE_DEFAULTS,
    ),
    "GraniteMoeSharedForCausalLM": Family(
        model_type="granitemoeshared",
        experts=True,
        derive=granite_moe_shared,
        understands=GRANITE_MOE_KEYS,
        supported=GRANITE_MOE_SUPPORTED,
        renames=GRANITE_MOE_NAMES,
        defaults={**GRANITE_MOE_DEFAULTS, "shared_intermediate_size": 0},
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        output_bias=False,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=glm_4_moe,
        understands=ROTARY_KEYS | {"use_qk_norm", "num_mtp_layers"},  # layers for further tokens are not used
        aliases={"n_routed_experts": "num_experts"},
        renames=DEEPSEEK_EXPERT_NAMES,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    "DeepseekForCausalLM": Family(
        model_type="deepseek",
        experts=True,
        derive=deepseek_1,
        supported={"scoring_func": (None, "softmax"), "moe_layer_freq": (None, 1)},
        aliases={"n_routed_experts": "num_experts"},
        renames=DEEPSEEK_EXPERT_NAMES,
        defaults={"first_k_dense_replace": 0, "norm_topk_prob": False, **LLAMA_TOKENS},
    ),
    "BailingMoeForCausalLM": BAILING,
    "BailingMoeV2ForCausalLM": replace(
        BAILING,
        model_type="bailing_moe_v2",
        qk_norm=True,
        parts={"router": "biased_sigmoid"},
        derive=bailing_2,
        understands=BAILING.understands | ROTARY_KEYS | {"router_dtype", "mtp_loss_scaling_factor"},
        supported={
            **BAILING_SUPPORTED,
            "use_qk_norm": (None, True),
            "score_function": (None, "sigmoid"),
            "moe_router_enable_expert_bias": (None, True),
            "norm_topk_prob": (None, True),
        },
        defaults={**BAILING.defaults, "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5},
    ),
    "PhimoeForCausalLM": PHI_MOE,
    "PhiMoEForCausalLM": PHI_MOE,  # as Microsoft writes it
    "HunYuanMoEV1ForCausalLM": Family(
        model_type="hunyuan_v1_moe",
        qk_norm=True,
        parts={"late_qk_norm": True},
        derive=hunyuan_moe,
        understands=HUNYUAN_KEYS | HUNYUAN_MOE_KEYS,
        supported={
            **HUNYUAN_SUPPORTED,
            "use_mla": (None, False),
            "position_embedding_xdrope": (None, False),
            "hidden_act": (None, "silu"),
            "norm_topk_prob": (None, True),
        },
        aliases={"num_local_experts": "num_experts"},
        renames=(
            *HUNYUAN_NAMES,
            (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_expert."),
        ),
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 1,
            "moe_topk": 1,
            "num_shared_expert": 1,
            **LLAMA_TOKENS,
        },
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        model_type="ernie4_5_moe",
        qkv_bias=False,
        output_bias=False,
        experts=True,
        parts={"interleaved_rope": True, "router": "biased_softmax"},
        derive=ernie_moe,
        understands=frozenset(
            {"moe_norm_min", "moe_use_aux_free", "moe_gate", "moe_capacity", "num_nextn_predict_layers"}
        ),
        supported={"use_bias": (None, False)},
        aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        renames=(
            (r"\.mlp\.(gate\.)?moe_statics\.e_score_correction_bias$", ".mlp.score_bias"),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        ),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "norm_topk_prob": True,
            **LLAMA_TOKENS,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        experts=True,
        parts={"wide_qk_norm": True, "router": "biased_sigmoid"},
        derive=minimax_m2,
        understands=ROTARY_KEYS
        | {"use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size"}
        | {"shared_moe_mode"},  # there is no shared expert
        supported=MINIMAX_SUPPORTED,
        renames=((r"\.(mlp|block_sparse_moe)\.e_score_correction_bias$", ".mlp.score_bias"),),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "eos_token_id": 200020,
            "bos_token_id": 200034,
        },
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1",
        qk_norm=True,
        windowed="late",
        switches_window=False,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=dots_1,
        supported={
            "scoring_func": (None, "noaux_tc", "sigmoid"),
            "topk_method": (None, "noaux_tc"),
            "moe_layer_freq": (None, 1),
        },
        aliases={"n_routed_experts": "num_experts"},
        renames=DEEPSEEK_EXPERT_NAMES,
        defaults={
            "moe_intermediate_size": 1408,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        windowed="even",
        switches_window=False,
        experts=True,
        parts={
            "has_sinks": True,
            "expert_bias": True,
            "interleaved_gates": True,
            "transposed": r"\.experts\.(gate_up|down)_proj$",
        },
        derive=gpt_oss,
        understands=frozenset({"experts_per_token", "initial_context_length", "swiglu_limit"}),
        renames=((r"\.mlp\.router\.", ".mlp.gate."),),
        dequantizes=("mxfp4",),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
