"""Families with Llama's parts in another arrangement: RMS norms, rotary positions, gates; no experts."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    HUNYUAN_KEYS,
    HUNYUAN_NAMES,
    HUNYUAN_SUPPORTED,
    LLAMA_TOKENS,
    ROTARY_KEYS,
    granite,
    growing_queries,
    minicpm_scales,
    partial_rotation,
    stretched_theta,
    uniform_bias,
)
from flambeau.llm.models.families.family import Config, Family


def olmo_3(config: Config) -> Config:
    """Layers with a window are not scaled."""
    scaling = config.get("rope_scaling") or {}
    if "rope_type" not in scaling and scaling.get("type", "default") != "default":
        raise CheckpointError("rope_scaling of OLMo 3 must name its kind as rope_type: transformers does not read type")
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {"local_rope_theta": float(nested.get("rope_theta") or OLMO_3_THETA)}


def cwm(config: Config) -> Config:
    if config.get("layer_types") is None:
        raise CheckpointError("layer_types is needed here: it names the layers with a window")
    return {}


def internlm_2(config: Config) -> Config:
    has_bias = bool(config["bias"])
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def internlm_3(config: Config) -> Config:
    has_bias = bool(config["bias"])
    return {"qkv_bias": bool(config["qkv_bias"]), "output_bias": has_bias, "mlp_bias": has_bias}


def baichuan(config: Config) -> Config:
    """7B has rotary positions, 13B ALiBi; the second generation, known by its vocabulary, has a normalized head."""
    is_large = config["hidden_size"] != BAICHUAN_7B_SIZE
    return {
        "alibi": "plain" if is_large else None,
        "unrotated_layers": frozenset(range(config["num_hidden_layers"])) if is_large else frozenset(),
        "normalized_head": config["vocab_size"] == BAICHUAN_2_VOCABULARY,
    }


def seed_oss(config: Config) -> Config:
    return {"output_bias": bool(config["attention_out_bias"])}


BAICHUAN_7B_SIZE, BAICHUAN_2_VOCABULARY = 4096, 125696
MINISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
OLMO_3_THETA = 5e5
GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

PHI_4_MULTIMODAL_KEYS = frozenset({"audio_processor", "embd_layer", "img_processor", "speech_lora", "vision_lora"})

PHI_3 = Family(
    model_type="phi3",
    qkv_bias=False,
    output_bias=False,
    windowed="all",
    switches_window=False,
    names_layers=False,
    derive=partial_rotation,
    understands=ROTARY_KEYS,
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "bos_token_id": 1,
    },
)

MISTRAL = Family(
    model_type="mistral",
    qkv_bias=False,
    output_bias=False,
    windowed="all",
    switches_window=False,
    defaults={
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        **LLAMA_TOKENS,
    },
)

BAICHUAN = Family(
    model_type="baichuan",
    has_kv_heads=False,
    qkv_bias=False,
    output_bias=False,
    derive=baichuan,
    aliases={"model_max_length": "max_position_embeddings"},
    renames=((r"\.self_attn\.W_pack\.", ".self_attn.qkv_proj."),),
    understands=frozenset({"z_loss_weight"}),
    defaults={"max_position_embeddings": 4096, **LLAMA_TOKENS},
)

MINISTRAL_3 = replace(
    MISTRAL,
    model_type="ministral3",
    names_layers=False,
    derive=growing_queries,
    understands=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),  # both among the rope parameters
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": MINISTRAL_3_ROPE,
        **LLAMA_TOKENS,
    },
)

LLAMA_LIKE = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        supported={"activation": (None, "swiglu")},  # beside hidden_act (Falcon 3)
        defaults=LLAMA_TOKENS,
    ),
    "IQuestCoderForCausalLM": Family(
        model_type="iquestcoder",
        understands=frozenset({"sliding_window", "max_window_layers"}),  # without use_sliding_window
        supported={"use_sliding_window": (None, False)},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            **LLAMA_TOKENS,
        },
    ),
    "MistralForCausalLM": MISTRAL,
    "MinistralForCausalLM": replace(MISTRAL, model_type="ministral"),
    "Ministral3ForCausalLM": MINISTRAL_3,
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        qkv_bias=True,
        output_bias=False,
        windowed="late",
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "MiMoForCausalLM": Family(
        model_type="mimo",
        qkv_bias=True,
        output_bias=False,
        windowed="late",
        understands=frozenset({"num_nextn_predict_layers"}),  # loaded apart from the network (mtp_weights.py)
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qk_norm=True,
        windowed="late",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        understands=frozenset({"no_rope_layer_interval"}),  # unless `no_rope_layers` names the layers
        windowed="unrotated",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "eos_token_id": 128001,
            "bos_token_id": 128000,
        },
    ),
    "Phi3ForCausalLM": PHI_3,
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        qk_norm=True,
        parts={"norm_places": "after", "wide_qk_norm": True},
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        qk_norm=True,
        windowed="pattern",
        switches_window=False,
        parts={"norm_places": "after", "wide_qk_norm": True},
        has_local_rope=True,
        derive=olmo_3,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": OLMO_3_THETA,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 50279,
        },
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        scales_images=True,
        derive=granite,
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
            **LLAMA_TOKENS,
        },
    ),
    "GlmForCausalLM": Family(
        model_type="glm",
        output_bias=False,
        parts={"interleaved_rope": True},
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        defaults=GLM_DEFAULTS,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        output_bias=False,
        parts={"interleaved_rope": True, "norm_places": "both"},
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        renames=(
            (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
        ),
        defaults=GLM_DEFAULTS,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        derive=seed_oss,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    "Ernie4_5ForCausalLM": Family(
        model_type="ernie4_5",
        parts={"interleaved_rope": True},
        derive=uniform_bias,
        supported={"compression_ratio": (None, 1, 1.0)},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "use_bias": False,
            "tie_word_embeddings": True,
            **LLAMA_TOKENS,
        },
    ),
    "ArceeForCausalLM": Family(
        model_type="arcee",
        parts={"has_gate": False},
        defaults={
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 128001,
            "bos_token_id": 128000,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        model_type="hunyuan_v1_dense",
        qk_norm=True,
        parts={"late_qk_norm": True},
        derive=stretched_theta,
        understands=HUNYUAN_KEYS | {"num_experts"},
        supported=HUNYUAN_SUPPORTED,
        renames=HUNYUAN_NAMES,
        defaults={"rms_norm_eps": 1e-5, **LLAMA_TOKENS},
    ),
    "InternLM2ForCausalLM": Family(
        model_type="internlm2",
        parts={"grouped_qkv": True},
        derive=internlm_2,
        renames=(
            (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attention\.wo\.", ".self_attn.o_proj."),
            (r"^model\.tok_embeddings\.", "model.embed_tokens."),
        ),
        defaults={"bias": True, **LLAMA_TOKENS},
    ),
    "InternLM3ForCausalLM": Family(
        model_type="internlm3",
        derive=internlm_3,
        aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},  # as transformers writes them
        defaults={
            "qkv_bias": False,
            "bias": False,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            **LLAMA_TOKENS,
        },
    ),
    "BaichuanForCausalLM": BAICHUAN,
    "BaiChuanForCausalLM": BAICHUAN,
    "CwmForCausalLM": Family(
        model_type="cwm",
        qkv_bias=False,
        output_bias=False,
        windowed="pattern",
        switches_window=False,
        derive=cwm,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_parameters": CWM_ROPE,
            "sliding_window": 8192,
            "sliding_window_pattern": 4,
            "eos_token_id": [128001, 128008, 128009],
            "bos_token_id": 128000,
        },
    ),
    "InternLMForCausalLM": Family(
        model_type="internlm",
        aliases={"bias": "attention_bias"},
        supported={"rotary": (None, {"base": 10000, "type": "dynamic"})},
        defaults={"attention_bias": True, **LLAMA_TOKENS},
    ),
    "MiniCPMForCausalLM": Family(
        model_type="minicpm",
        derive=minicpm_scales,
        understands=frozenset({"mup_denominator"}),
        supported={"sparse_config": (None,)},
        defaults={
            "scale_emb": 1,
            "scale_depth": None,
            "dim_model_base": None,
            "tie_word_embeddings": True,
            **LLAMA_TOKENS,
        },
    ),
    "ExaoneForCausalLM": Family(
        model_type="exaone",
        qkv_bias=False,
        output_bias=False,
        activation_key="activation_function",
        epsilon_key="layer_norm_epsilon",
        aliases={"num_layers": "num_hidden_layers"},
        understands=frozenset({"embed_dropout"}),
        renames=(
            (r"^transformer\.wte\.", "model.embed_tokens."),
            (r"^transformer\.ln_f\.", "model.norm."),
            (r"^transformer\.h\.", "model.layers."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.ln_2\.", ".post_attention_layernorm."),
            (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
            (r"\.attn\.attention\.", ".self_attn."),
            (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
            (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        ),
        defaults={"layer_norm_epsilon": 1e-5, "eos_token_id": 2, "bos_token_id": 0},
    ),
    "Phi4MMForCausalLM": replace(
        PHI_3,
        model_type="phi4mm",
        parts={"unused": r"\.lora_[AB]\.|^model\.embed_tokens_extend\."},  # of images and sounds
        understands=PHI_3.understands | PHI_4_MULTIMODAL_KEYS,
        renames=((r"\.base_layer\.", "."),),
    ),
    "HeliumForCausalLM": Family(
        model_type="helium",
        output_bias=False,
        parts={"interleaved_rope": True},
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
            **LLAMA_TOKENS,
        },
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        windowed="pattern",
        rotates_windows=True,
        switches_window=False,
        parts={"norm_places": "after"},
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
}
