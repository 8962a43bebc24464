"""Families with experts whose files or routers differ: DBRX, A.X-K1, Aria, Flint and Kolibri 1."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import CLIP_KEYS, LLAMA_TOKENS, clipped, dense_layers
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.latent import DEEPSEEK_3, deepseek_3

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


NEWER_EXPERTS: dict[str, Family] = {
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
