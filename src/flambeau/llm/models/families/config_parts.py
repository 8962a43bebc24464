"""Parts of an architecture that several families read from config.json."""

from __future__ import annotations

from flambeau.llm.models.families.family import Config

ROTARY_KEYS = frozenset({"partial_rotary_factor"})
CLIP_KEYS = frozenset({"clip_qkv"})


def partial_rotation(config: Config) -> Config:
    """`partial_rotary_factor`, at the top level or among the rope parameters."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = int(head_size * factor)
    return {} if size == head_size else {"rotary_size": size}


def granite(config: Config) -> Config:
    return {
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "attention_scale": float(config["attention_multiplier"]),
        "logit_scale": 1.0 / config["logits_scaling"],
    }


def uniform_bias(config: Config) -> Config:
    """`use_bias`: all layers have one, or none."""
    has_bias = bool(config["use_bias"])
    return {"qkv_bias": has_bias, "output_bias": has_bias, "mlp_bias": has_bias}


def clipped(config: Config) -> Config:
    return {"clip_qkv": config.get("clip_qkv")}
