"""Families without experts that differ from Llama in a few parts: Apertus, HyperCLOVA X, NanoChat and others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import LLAMA_TOKENS, ROTARY_KEYS, granite, partial_rotation
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gemma import GEMMA, gemma_2


def hyperclova_x(config: Config) -> Config:
    """Granite's factors, of which that of logits is no divisor; norms after attention and the feed-forward layer."""
    multiplier = config.get("attention_multiplier")
    has_both = bool(config["use_post_norm"])
    return {
        **granite({**config, "attention_multiplier": multiplier or 1.0}),
        "attention_scale": None if multiplier is None else float(multiplier),
        "logit_scale": float(config["logits_scaling"]),
        "norm_places": "both" if has_both else "before",
        "renames": HYPERCLOVA_NAMES if has_both else (),
    }


def diff_llama(config: Config) -> Config:
    """Attention whose heads are subtracted from each other, in pairs."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if kv_heads % 2:
        raise CheckpointError(f"num_key_value_heads {kv_heads} is not supported; it must be even")
    size = config.get("head_dim") or config["hidden_size"] // heads
    return {"is_differential": True, "value_size": 2 * int(size)}


def nanochat(config: Config) -> Config:
    return {"logit_softcap": config.get("final_logit_softcapping")}


def granite_swa(config: Config) -> Config:
    return {**granite(config), **layer_thetas(config), **granite_windows(config)}


def persimmon(config: Config) -> Config:
    return {**partial_rotation(config), "qk_norm": bool(config["qk_layernorm"])}


def layer_thetas(config: Config) -> dict[str, Any]:
    """Each layer may have a theta of its own, of which 0 stands for no rotation."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return {}
    num_layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or granite_kinds(num_layers)
    if len(thetas) != num_layers or len(kinds) != num_layers:
        raise CheckpointError(f"layer_rope_theta and layer_types must name {num_layers} layers")
    wide, local = (
        {theta for theta, own in zip(thetas, kinds, strict=True) if own == kind and theta}
        for kind in ("full_attention", "sliding_attention")
    )
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    is_scaled = (parameters.get("rope_type") or parameters.get("type") or "default") != "default"
    if len(wide) > 1 or len(local) > 1 or (is_scaled and wide and local and wide != local):
        raise CheckpointError(
            f"layer_rope_theta {thetas} is not supported; supported are one theta of layers with a window and one of "
            "the others, where positions are not scaled"
        )
    found: dict[str, Any] = {"unrotated_layers": frozenset(i for i, theta in enumerate(thetas) if not theta)}
    if wide or local:
        found["rope_theta"] = float(next(iter(wide or local)))
    if wide and local and wide != local:
        found["local_rope_theta"] = float(next(iter(local)))
    return found


def granite_kinds(num_layers: int) -> list[str]:
    return ["sliding_attention" if number % 4 else "full_attention" for number in range(num_layers)]


def granite_windows(config: Config) -> Config:
    """Every fourth layer, from the first on, has no window."""
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = config.get("layer_types") or granite_kinds(num_layers)
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"layer_types must name {num_layers} layers, each one of full_attention, sliding_attention"
        )
    return {"windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}


HYPERCLOVA_NAMES = (
    (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
    (r"\.post_norm1\.", ".post_attention_layernorm."),
    (r"\.post_norm2\.", ".post_feedforward_layernorm."),
)
APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
GRANITE_SWA_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "sliding_window": 128,
}

DENSE_OTHERS = {
    "DiffLlamaForCausalLM": Family(
        model_type="diffllama",
        derive=diff_llama,
        understands=frozenset({"lambda_std_dev"}),
        defaults={"rms_norm_eps": 1e-5, **LLAMA_TOKENS},
    ),
    "ApertusForCausalLM": Family(
        model_type="apertus",
        qk_norm=True,
        parts={"has_gate": False},
        supported={"post_norm": (None, False), "qk_norm": (None, True)},
        renames=(
            (r"\.attention_layernorm\.", ".input_layernorm."),
            (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
            (r"\.mlp\.act_fn\.", ".mlp."),
        ),
        defaults={
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12e6,
            "rope_parameters": APERTUS_ROPE,
            **LLAMA_TOKENS,
        },
    ),
    "HyperCLOVAXForCausalLM": Family(
        model_type="hyperclovax",
        derive=hyperclova_x,
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "use_post_norm": True,
            **LLAMA_TOKENS,
        },
    ),
    "VaultGemmaForCausalLM": replace(
        GEMMA["Gemma2ForCausalLM"],
        model_type="vaultgemma",
        parts={"norm_offset": 1.0},
        derive=gemma_2,
        renames=((r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),),
    ),
    "NanoChatForCausalLM": Family(
        model_type="nanochat",
        parts={
            "has_norm_weight": False,
            "rotated_qk_norm": True,
            "reversed_rope": True,
            "has_gate": False,
            "embedding_norm": True,
        },
        derive=nanochat,
        understands=frozenset({"final_logit_softcapping"}),
        renames=((r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj.")),
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0, "eos_token_id": 1, "bos_token_id": 0},
    ),
    "Jais2ForCausalLM": Family(
        model_type="jais2",
        parts={"norm": "layer", "norm_bias": True, "has_gate": False},
        epsilon_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
            "eos_token_id": 150024,
            "bos_token_id": 0,
        },
    ),
    "GraniteSWAForCausalLM": Family(
        model_type="granite_swa",
        windowed="all",
        switches_window=False,
        parts={"has_sinks": True},
        derive=granite_swa,
        defaults={
            **GRANITE_SWA_DEFAULTS,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 100257,
            "bos_token_id": 100257,
        },
    ),
    "BitNetForCausalLM": Family(
        model_type="bitnet",
        parts={"inner_norms": True},
        renames=((r"\.attn_sub_norm\.", ".inner_norm."), (r"\.ffn_sub_norm\.", ".inner_norm.")),
        defaults={
            "num_key_value_heads": 5,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "eos_token_id": 128001,
            "bos_token_id": 128000,
        },
    ),
    "PersimmonForCausalLM": Family(
        model_type="persimmon",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        parts={"norm": "layer", "norm_bias": True, "has_gate": False, "mlp_bias": True, "grouped_qkv": True},
        derive=persimmon,
        understands=ROTARY_KEYS | {"qk_layernorm"},
        epsilon_key="layer_norm_eps",
        renames=(
            (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),
            (r"\.dense_h_to_4h\.", ".up_proj."),
            (r"\.dense_4h_to_h\.", ".down_proj."),
            (r"^model\.final_layernorm\.", "model.norm."),
        ),
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "max_position_embeddings": 16384,
            "partial_rotary_factor": 0.5,
            "qk_layernorm": True,
            **LLAMA_TOKENS,
        },
    ),
}
