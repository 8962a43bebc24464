"""Families with experts whose router scores each of them by itself, with a sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    DEEPSEEK_EXPERT_NAMES,
    ROTARY_KEYS,
    dense_layers,
    expert_groups,
    partial_rotation,
)
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.latent import DEEPSEEK_3, deepseek_3
from flambeau.llm.models.families.layer_sizes import GateKind, LayerSizes
from flambeau.llm.models.families.softmax_experts import BAILING, BAILING_SUPPORTED, bailing


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


def dots_1(config: Config) -> Config:
    return {
        "shared_expert_size": int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
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


def shared_size(config: Config, key: str) -> int:
    return int(config.get(key) or 0) * int(config["moe_intermediate_size"])


def solar_open(config: Config) -> Config:
    return {
        "shared_expert_size": shared_size(config, "n_shared_experts"),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
    }


def exaone_moe(config: Config) -> Config:
    return {
        "shared_expert_size": shared_size(config, "num_shared_experts"),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": dense_layers(config, int(config["first_k_dense_replace"])),
    }


def trinity(config: Config) -> Config:
    """Arcee's Trinity; only layers with a window are rotated."""
    if config.get("sliding_window") is None:
        raise CheckpointError("sliding_window is needed here: only layers with a window have positions")
    return {
        "embedding_scale": config["hidden_size"] ** 0.5 if config.get("mup_enabled") else 1.0,
        "shared_expert_size": shared_size(config, "num_shared_experts"),
        "routed_scale": float(config["route_scale"]),
        "dense_layers": frozenset(range(int(config.get("num_dense_layers") or 0))),
    }


def hy_3(config: Config) -> Config:
    return {
        "shared_expert_size": shared_size(config, "num_shared_experts"),
        "routed_scale": float(config["router_scaling_factor"]),
        "dense_layers": dense_layers(config, int(config["first_k_dense_replace"])),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def laguna(config: Config) -> Config:
    """Layers may have different numbers of heads, and rotate different parts of them."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types") or ["full_attention" for _ in layers]
    heads = config.get("num_attention_heads_per_layer") or [config["num_attention_heads"] for _ in layers]
    if len(heads) != len(layers) or len(kinds) != len(layers):
        raise CheckpointError("num_attention_heads_per_layer and layer_types must name all layers")
    if any(number % config["num_key_value_heads"] for number in heads):
        raise CheckpointError("num_attention_heads_per_layer must be multiples of num_key_value_heads")
    nested: Any = config["rope_parameters"]
    size, factors = config["head_dim"], {}
    for kind in set(kinds):
        factors[kind] = float((nested.get(kind) or {}).get("partial_rotary_factor") or 1.0)
    parts = {
        "local_rope_theta": float((nested.get("sliding_attention") or {}).get("rope_theta") or 10000.0),
        "shapes": tuple(
            LayerSizes(
                num_heads=number,
                num_kv_heads=config["num_key_value_heads"],
                head_size=size,
                intermediate_size=config["intermediate_size"],
                rotary_size=None if factors[kind] == 1.0 else int(size * factors[kind]),
            )
            for number, kind in zip(heads, kinds, strict=True)
        ),
        "attention_gate": laguna_gate(config),
        "shared_expert_size": int(config["shared_expert_intermediate_size"]),
        "routed_scale": float(config["moe_routed_scaling_factor"]),
        "dense_layers": dense_layers(config, 1),
    }
    return parts if "sliding_attention" in kinds else {**parts, "local_rope_theta": None}


def laguna_gate(config: Config) -> GateKind:
    gating = config["gating"]
    if gating is True or gating == "per-head":
        return "softplus_per_head"
    if gating in ("per-element", "per-channel"):
        return "softplus"
    raise CheckpointError(f"gating {gating!r} is not supported; supported are true, 'per-head' and 'per-element'")


def flint(config: Config) -> Config:
    """Only layers with a window are rotated."""
    return {"shared_expert_size": int(config["shared_expert_intermediate_size"])}


def flint_layers(config: Config) -> Config:
    """All layers have experts but the first two, which attend to all tokens, as every fourth and the last one do."""
    found, number = dict(config), config["num_hidden_layers"]
    if found.get("mlp_only_layers") is None:
        found["mlp_only_layers"] = [0, 1]
    if found.get("layer_types") is None:
        wide = {0, number - 1, *range(1, number, 4)}
        found["layer_types"] = ["full_attention" if i in wide else "sliding_attention" for i in range(number)]
    return found


def kolibri(config: Config) -> Config:
    return {"shared_expert_size": int(config["shared_expert_intermediate_size"])}


def ax_k1(config: Config) -> Config:
    return {**deepseek_3(config), "dense_layers": ax_dense_layers(config)}


def ax_dense_layers(config: Config) -> frozenset[int]:
    """`moe_layer_freq` leaves out layers beside the first ones."""
    every, first = int(config.get("moe_layer_freq") or 1), int(config["first_k_dense_replace"])
    later = {i for i in range(config["num_hidden_layers"]) if i % every}
    return dense_layers(config, first) | (later if config.get("mlp_layer_types") is None else frozenset())


SIGMOID_EXPERTS: dict[str, Family] = {
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
    "SolarOpenForCausalLM": Family(
        model_type="solar_open",
        output_bias=False,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=solar_open,
        supported={"first_k_dense_replace": (None, 0)},
        understands=frozenset({"intermediate_size", "num_local_experts"}),
        aliases={"n_routed_experts": "num_experts"},
        renames=DEEPSEEK_EXPERT_NAMES,
        defaults={
            "intermediate_size": 10240,  # without effect: all layers have experts
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1280,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
    ),
    "ExaoneMoeForCausalLM": Family(
        model_type="exaone_moe",
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        windowed="pattern",
        rotates_windows=True,
        switches_window=False,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=exaone_moe,
        understands=frozenset({"first_k_dense_replace", "first_last_k_dense_replace", "num_nextn_predict_layers"})
        | {"is_moe_layer", "mtp_layer_types", "mtp_mlp_layer_types", "mtp_sliding_windows"},
        supported={"topk_method": (None, "noaux_tc"), "scoring_func": (None, "sigmoid")},
        renames=((r"\.mlp\.e_score_correction_bias$", ".mlp.score_bias"), *DEEPSEEK_EXPERT_NAMES),
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "eos_token_id": 53,
            "bos_token_id": 1,
        },
    ),
    "AfmoeForCausalLM": Family(
        model_type="afmoe",
        qk_norm=True,
        windowed="pattern",
        rotates_windows=True,
        switches_window=False,
        experts=True,
        parts={"norm_places": "both", "router": "biased_sigmoid", "attention_gate": "sigmoid"},
        derive=trinity,
        understands=frozenset({"load_balance_coeff", "use_grouped_mm", "n_group", "topk_group"}),
        supported={
            "score_func": (None, "sigmoid"),
            "route_norm": (None, True),
            "num_expert_groups": (None, 1),
            "num_limited_groups": (None, 1),
        },
        aliases={"global_attn_every_n_layers": "sliding_window_pattern"},
        renames=(
            (r"\.pre_mlp_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.expert_bias$", ".mlp.score_bias"),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        ),
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "sliding_window": 1024,
            "sliding_window_pattern": 4,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 1408,
            "route_scale": 1.0,
            "norm_topk_prob": True,
        },
    ),
    "HYV3ForCausalLM": Family(
        model_type="hy_v3",
        qk_norm=True,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=hy_3,
        understands=frozenset({"enable_moe_fp32_combine", "first_k_dense_replace"}),
        supported={"mlp_bias": (None, False), "qk_norm": (None, True), "route_norm": (None, True)},
        renames=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.(expert_bias|e_score_correction_bias)$", ".mlp.score_bias"),
            (r"\.mlp\.(shared_mlp|shared_experts)\.", ".mlp.shared_expert."),
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    "LagunaForCausalLM": Family(
        model_type="laguna",
        qk_norm=True,
        windowed="named",
        switches_window=False,
        has_local_rope=True,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=laguna,
        understands=ROTARY_KEYS,
        supported={
            "moe_apply_router_weight_on_input": (None, False),
            "moe_router_logit_softcapping": (None, 0, 0.0),
        },
        renames=(
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.mlp\.experts\.e_score_correction_bias$", ".mlp.score_bias"),
            *DEEPSEEK_EXPERT_NAMES,
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
            "sliding_window": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "gating": True,
            "norm_topk_prob": True,
        },
    ),
    "AXK1ForCausalLM": replace(
        DEEPSEEK_3,
        model_type="axk1",
        parts={**DEEPSEEK_3.parts, "expert_norm": True},
        derive=ax_k1,
        supported={key: value for key, value in DEEPSEEK_3.supported.items() if key != "moe_layer_freq"},
        renames=((r"\.(mlp\.)?post_mlp_layernorm\.", ".post_feedforward_layernorm."), *DEEPSEEK_3.renames),
        defaults={
            **DEEPSEEK_3.defaults,
            "max_position_embeddings": 32768,
            "num_experts": 192,
            "first_k_dense_replace": 1,
            "eos_token_id": 163691,
            "bos_token_id": 163691,
        },
    ),
    "FlintForCausalLM": Family(
        model_type="flint",
        qk_norm=True,
        windowed="named",
        rotates_windows=True,
        switches_window=False,
        experts=True,
        arrange=flint_layers,
        parts={"has_sinks": True, "router": "wide_sigmoid"},
        derive=flint,
        renames=((r"\.self_attn\.softmax_offset$", ".self_attn.sinks"),),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024,
            "norm_topk_prob": True,
        },
    ),
    "Kolibri1ForCausalLM": Family(
        model_type="kolibri1",
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        windowed="pattern",
        rotates_windows=True,
        switches_window=False,
        experts=True,
        parts={"norm_places": "both", "router": "late_sigmoid"},
        derive=kolibri,
        understands=frozenset({"intermediate_size", "num_local_experts"}),
        aliases={"num_local_experts": "num_experts"},
        renames=(
            (r"\.moe\.router\.expert_bias$", ".mlp.score_bias"),
            (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.score_bias"),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
            (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.(post_attn_norm|post_self_attn_layernorm)\.", ".post_attention_layernorm."),
            (r"\.(post_ffn_norm|post_mlp_layernorm)\.", ".post_feedforward_layernorm."),
        ),
        defaults={
            "intermediate_size": 1,  # without effect: all layers have experts
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "sliding_window_pattern": 5,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": False,
        },
    ),
}
