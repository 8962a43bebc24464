"""Further families with experts: Solar Open, K-EXAONE, Trinity, Hy3, Granite SWA, Command with experts and others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    DEEPSEEK_EXPERT_NAMES,
    ROTARY_KEYS,
    dense_layers,
    expert_groups,
)
from flambeau.llm.models.families.dense_others import GRANITE_SWA_DEFAULTS, granite_windows, layer_thetas
from flambeau.llm.models.families.experts import EXPERTS, granite_moe_shared
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.layer_sizes import GateKind, LayerSizes


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


def granite_moe_swa(config: Config) -> Config:
    return {**granite_moe_shared(config), **layer_thetas(config), **granite_windows(config)}


def mellum(config: Config) -> Config:
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {
        "local_rope_theta": float(nested.get("rope_theta") or 10000.0),
        "dense_layers": dense_layers(config, 0),
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


def command_moe(config: Config) -> Config:
    """Command with experts; its first layers may have none, and no window but positions."""
    num_dense = int(config.get("first_k_dense_replace") or 0)
    dense, num_layers = dense_layers(config, num_dense), config["num_hidden_layers"]
    strategy = config["shared_expert_combination_strategy"]
    if config.get("num_shared_experts") and strategy != "sum":
        raise CheckpointError(f"shared_expert_combination_strategy {strategy!r} is not supported; supported is 'sum'")
    method = config["expert_selection_fn"]
    if method not in ("softmax", "sigmoid"):
        raise CheckpointError(f"expert_selection_fn {method!r} is not supported; supported are 'softmax' and 'sigmoid'")
    kinds = config.get("layer_types") or command_kinds(config, num_dense)
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"layer_types must name {num_layers} layers, each one of full_attention, sliding_attention"
        )
    window, size = config.get("sliding_window"), config["intermediate_size"]
    windowed = frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention" and window is not None)
    rotated = windowed | (dense if config["prefix_dense_sliding_window_pattern"] == 1 else frozenset())
    epsilon = config.get("rms_norm_eps")
    norms: dict[str, Any] = {"norm": "layer"} if epsilon is None else {"norm": "rms", "norm_epsilon": float(epsilon)}
    return {
        **norms,
        "logit_scale": float(config["logit_scale"]),
        "windows": tuple(window if layer in windowed else None for layer in range(num_layers)) if windowed else (),
        "unrotated_layers": frozenset(range(num_layers)) - rotated,
        "dense_layers": dense,
        "intermediate_size": int(config.get("prefix_dense_intermediate_size") or size),
        "expert_size": size,
        "shared_expert_size": size * int(config.get("num_shared_experts") or 0),
        "router": method,
        "normalizes_experts": method == "softmax" or bool(config["norm_topk_prob"]),
    }


def command_kinds(config: Config, num_dense: int) -> list[str]:
    periods = [config["prefix_dense_sliding_window_pattern"]] * num_dense
    places = [*range(1, num_dense + 1), *range(1, config["num_hidden_layers"] - num_dense + 1)]
    periods += [config["sliding_window_pattern"]] * (config["num_hidden_layers"] - num_dense)
    return [
        "sliding_attention" if place % period else "full_attention"
        for place, period in zip(places, periods, strict=True)
    ]


MORE_EXPERTS = {
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
    "FlexOlmoForCausalLM": Family(
        model_type="flex_olmo",
        qk_norm=True,
        experts=True,
        parts={"norm_places": "after", "wide_qk_norm": True},
        defaults={
            "max_position_embeddings": 4096,
            "rope_theta": 5e5,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
            "eos_token_id": 100257,
        },
    ),
    "GraniteMoeSWAForCausalLM": replace(
        EXPERTS["GraniteMoeSharedForCausalLM"],
        model_type="granitemoe_swa",
        windowed="all",
        switches_window=False,
        parts={"has_sinks": True},
        derive=granite_moe_swa,
        defaults={**EXPERTS["GraniteMoeSharedForCausalLM"].defaults, **GRANITE_SWA_DEFAULTS},
    ),
    "MellumForCausalLM": Family(
        model_type="mellum",
        qk_norm=True,
        windowed="named",
        switches_window=False,
        has_local_rope=True,
        experts=True,
        derive=mellum,
        understands=frozenset({"num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"}),
        aliases={"num_local_experts": "num_experts"},
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "sliding_window": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
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
    "Cohere2MoeForCausalLM": Family(
        model_type="cohere2_moe",
        switches_window=False,
        experts=True,
        parts={"is_parallel": True, "interleaved_rope": True},
        derive=command_moe,
        understands=frozenset({"layer_types", "sliding_window_pattern"}),
        epsilon_key="layer_norm_eps",
        renames=((r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),),
        defaults={
            "head_dim": 128,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "prefix_dense_sliding_window_pattern": 1,
            "tie_word_embeddings": True,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "average",
            "norm_topk_prob": True,
            "eos_token_id": 255001,
            "bos_token_id": 5,
        },
    ),
}
