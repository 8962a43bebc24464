"""Families with experts whose router is a softmax, or may be one (Command); some have biases or jitter."""

from __future__ import annotations

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
    clipped,
    dense_layers,
    stretched_theta,
)
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gate_limits import swiglu_limits


def qwen_2_moe(config: Config) -> Config:
    return {
        "qkv_bias": bool(config["qkv_bias"]),
        "shared_expert_size": int(config["shared_expert_intermediate_size"]),
        "gates_shared_expert": True,
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


def phi_moe(config: Config) -> Config:
    if config["num_experts_per_tok"] != 2:
        raise CheckpointError("num_experts_per_tok must be 2 here, as the router chooses two experts")
    return {"router_jitter": float(config["router_jitter_noise"]), "head_bias": bool(config.get("lm_head_bias"))}


def gpt_oss(config: Config) -> Config:
    return {"gate_limits": swiglu_limits(config)}


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


def mellum(config: Config) -> Config:
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {
        "local_rope_theta": float(nested.get("rope_theta") or 10000.0),
        "dense_layers": dense_layers(config, 0),
    }


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


DBRX_KEYS = {  # of sections: the names in a Llama with experts
    "kv_n_heads": "num_key_value_heads",
    "ffn_hidden_size": "moe_intermediate_size",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
}
# Sections written by transformers also have the general keys of a whole configuration.
_SECTION_KEYS = """
ffn_act_fn moe_normalize_expert_weights moe_jitter_eps moe_loss_weight uniform_expert_assignment hidden_size rope_theta
"""
SECTION_KEYS = frozenset(_SECTION_KEYS.split())


def dbrx_keys(config: Config) -> Config:
    """DBRX has sections of attention and of experts; its code rotates by the theta of the first."""
    found = dict(config)
    attention, experts = (found.pop(key, None) or {} for key in ("attn_config", "ffn_config"))
    if attention.get("rope_theta") is not None:
        found["rope_theta"] = attention["rope_theta"]
        for key in ("rope_parameters", "rope_scaling"):
            if found.get(key):
                found[key] = {**found[key], "rope_theta": attention["rope_theta"]}
    activation = (experts.get("ffn_act_fn") or {}).get("name") or "silu"
    if activation != "silu":
        raise CheckpointError(f"ffn_act_fn {activation!r} is not supported here; supported is 'silu'")
    power = experts.get("moe_normalize_expert_weights", 1)
    if power not in (1, None):
        raise CheckpointError(f"moe_normalize_expert_weights {power!r} is not supported; supported are 1 and null")
    found["norm_topk_prob"] = power is not None
    for key, value in (*attention.items(), *experts.items()):
        if key in DBRX_KEYS:  # whatever else a file says
            found[DBRX_KEYS[key]] = value
        elif key not in SECTION_KEYS:
            found.setdefault(key, value)
    return found


def aria(config: Config) -> Config:
    return {
        "shared_expert_size": int(config["moe_num_shared_experts"]) * int(config["intermediate_size"]),
    }


SOFTMAX_EXPERTS: dict[str, Family] = {
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
    "PhimoeForCausalLM": PHI_MOE,
    "PhiMoEForCausalLM": PHI_MOE,  # as Microsoft writes it,
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
        understands=frozenset({"moe_use_aux_free", "moe_gate", "moe_capacity", "num_nextn_predict_layers"}),
        supported={"moe_norm_min": (None, 1e-12), "use_bias": (None, False)},
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
    "Cohere2MoeForCausalLM": Family(
        model_type="cohere2_moe",
        supported={"rope_scaling": (None,)},  # transformers reads rope_parameters only
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
    "DbrxForCausalLM": Family(
        model_type="dbrx",
        qkv_bias=False,
        output_bias=False,
        experts=True,
        arrange=dbrx_keys,
        parts={"norm": "layer", "flat_experts": True, "transposed": r"\.mlp\.experts\.down_proj$"},
        derive=clipped,
        understands=CLIP_KEYS | {"intermediate_size"},
        supported={"tie_word_embeddings": (None, False)},
        epsilon_key="layer_norm_eps",  # which no file has
        aliases={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        renames=(
            (r"^transformer\.wte\.", "model.embed_tokens."),
            (r"^transformer\.norm_f\.", "model.norm."),
            (r"^transformer\.blocks\.", "model.layers."),
            (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
            (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
            (r"\.norm_attn_norm\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.norm_attn_norm\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.router\.layer\.", ".mlp.gate."),
            (r"\.ffn\.experts\.mlp\.w1$", ".mlp.experts.gate_proj"),
            (r"\.ffn\.experts\.mlp\.v1$", ".mlp.experts.up_proj"),
            (r"\.ffn\.experts\.mlp\.w2$", ".mlp.experts.down_proj"),
        ),
        defaults={
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "intermediate_size": 1,  # without effect: all layers have experts
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 1,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 3584,
        },
    ),
    "AriaTextForCausalLM": Family(
        model_type="aria_text",
        experts=True,
        parts={"transposed": r"\.mlp\.experts\.(gate_up|down)_proj$"},
        derive=aria,
        understands=frozenset({"moe_z_loss_coeff", "moe_aux_loss_coeff"}),
        supported={"mlp_bias": (None, False)},
        aliases={"moe_num_experts": "num_experts", "moe_topk": "num_experts_per_tok"},
        renames=(
            (r"\.mlp\.experts\.fc1\.weight$", ".mlp.experts.gate_up_proj"),
            (r"\.mlp\.experts\.fc2\.weight$", ".mlp.experts.down_proj"),
            (r"\.mlp\.router\.", ".mlp.gate."),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        ),
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "moe_num_shared_experts": 2, **LLAMA_TOKENS},
    ),
}
