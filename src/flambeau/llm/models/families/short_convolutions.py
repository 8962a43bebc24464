"""Families with short convolutions between layers with attention (LFM2 and 3)."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import LLAMA_TOKENS
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.layer_types import named_layers
from flambeau.llm.models.families.recurrence import Recurrence


def lfm2(config: Config) -> Config:
    num_layers, size = config["num_hidden_layers"], int(config["intermediate_size"])
    types = config.get("layer_types")
    if types is None:
        named = config.get("full_attn_idxs")
        attending = range(num_layers) if named is None else named
        types = ["full_attention" if i in attending else "conv" for i in range(num_layers)]
    if config.get("block_auto_adjust_ff_dim"):
        size = int(2 * size / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiple = int(config["block_multiple_of"])
            size = -(-int(config["block_ffn_dim_multiplier"] * size) // multiple) * multiple
    has_bias = bool(config["conv_bias"])
    recurrence = Recurrence(
        kind="short_conv",
        layers=named_layers(types, num_layers),
        inner_size=config["hidden_size"],
        conv_width=int(config["conv_L_cache"]),
        conv_bias=has_bias,
        projection_bias=has_bias,
    )
    return {"recurrence": recurrence, "intermediate_size": size}


def lfm2_moe(config: Config) -> Config:
    return {
        **lfm2(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": frozenset(range(int(config["num_dense_layers"]))),
    }


CONV, WIDE, LOCAL = "conv", "full_attention", "sliding_attention"


def lfm3(config: Config) -> Config:
    """Some layers with attention have a window, and a rotation of their own."""
    num_layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        types = [WIDE if i % 4 == 2 else LOCAL if i % 4 == 0 and i > 0 else CONV for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {CONV, WIDE, LOCAL}:
        raise CheckpointError(f"layer_types must name {num_layers} layers, each one of {CONV}, {WIDE}, {LOCAL}")
    recurrence = Recurrence(
        kind="short_conv",
        layers=frozenset(i for i, kind in enumerate(types) if kind == CONV),
        inner_size=config["hidden_size"],
        conv_width=int(config["conv_L_cache"]),
        conv_bias=bool(config["conv_bias"]),
        projection_bias=bool(config["conv_bias"]),
    )
    has_both = bool(config["use_sandwich_norm"])
    parts = {
        "recurrence": recurrence if recurrence.layers else None,
        "norm_places": "both" if has_both else "before",
        "attention_gate": "sigmoid_per_head" if config["use_attention_gate"] else None,
        "renames": LFM_3_NAMES if has_both else (*LFM_NAMES, LFM_3_GATES),
    }
    window = config["sliding_window"]
    if LOCAL not in types:
        return parts
    return {
        **parts,
        "windows": tuple(int(window) if kind == LOCAL else None for kind in types),
        "local_rope_theta": float(config["rope_parameters"][LOCAL]["rope_theta"]),
    }


LFM_NAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),
    (r"\.conv\.conv\.", ".mixer.conv1d."),
    (r"\.conv\.(in|out)_proj\.", r".mixer.\1_proj."),
)
LFM_3_GATES = (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj.")
LFM_3_NAMES = (
    *LFM_NAMES,
    LFM_3_GATES,
    (r"\.post_operator_norm\.", ".post_attention_layernorm."),
    (r"\.ffn_norm\.", ".pre_feedforward_layernorm."),
    (r"\.post_ffn_norm\.", ".post_feedforward_layernorm."),
)

LFM_2 = Family(
    model_type="lfm2",
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    derive=lfm2,
    understands=frozenset(
        {
            "block_dim",
            "block_mlp_init_scale",
            "block_out_init_scale",
            "block_use_xavier_init",
            "block_norm_eps",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "block_ffn_dim_multiplier",  # of sizes that are adjusted, as the next
            "block_multiple_of",
            "num_heads",
            "theta",
            "full_attn_idxs",
        }
    ),
    supported={"use_pos_enc": (None, True), "block_use_swiglu": (None, True)},
    epsilon_key="norm_eps",
    aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    renames=LFM_NAMES,
    defaults={
        "norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        **LLAMA_TOKENS,
    },
)

LFM_3 = Family(
    model_type="lfm3",
    qk_norm=True,
    has_local_rope=True,
    derive=lfm3,
    epsilon_key="norm_eps",
    defaults={
        "norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 1e4},
            WIDE: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
        "sliding_window": 256,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 7,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "bos_token_id": 124894,
        "eos_token_id": 124900,
    },
)

SHORT_CONVOLUTIONS = {
    "Lfm3ForCausalLM": LFM_3,
    "Lfm2ForCausalLM": LFM_2,
    "Lfm2MoeForCausalLM": replace(
        LFM_2,
        model_type="lfm2_moe",
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=lfm2_moe,
        supported={"use_expert_bias": (True,)},
        renames=(*LFM_2.renames, (r"\.feed_forward\.expert_bias$", ".mlp.score_bias")),
        defaults={
            **LFM_2.defaults,
            "block_auto_adjust_ff_dim": False,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
    ),
}
