"""Configurations of networks that were published with code of their own, in the words of transformers' own networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flambeau.errors import HandlerError

NOMIC_NAMES = {  # NomicBERT has those of GPT-2
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
NOMIC_VALUES: Mapping[str, Any] = {  # what transformers' network does
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "activation_function": "swiglu",
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "causal": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
}
NEW_VALUES: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "hidden_act": "gelu",
    "logn_attention_scale": False,
}
GTE_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "pad_token_id",
)


def known_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of transformers' `AutoConfig.for_model`; None where it reads config.json as it is."""
    kind = config.get("model_type")
    if kind == "nomic_bert" and "n_embd" in config:
        return nomic_config(config)
    if kind == "new" or (kind == "gte" and "rope_parameters" not in config):
        return gte_config(config)
    return None


def nomic_config(config: Mapping[str, Any]) -> dict[str, Any]:
    check_values(config, NOMIC_VALUES)
    sizes = {ours: config[name] for name, ours in NOMIC_NAMES.items() if config.get(name) is not None}
    kept = {name: config[name] for name in ("vocab_size", "type_vocab_size", "pad_token_id") if name in config}
    rope = {"rope_type": "default", "rope_theta": config.get("rotary_emb_base", 10000)}
    return {"model_type": "nomic_bert", **sizes, **kept, "rope_parameters": rope}


def gte_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Alibaba's NewModel, which transformers has as GTE."""
    check_values(config, NEW_VALUES)
    kept = {name: config[name] for name in GTE_NAMES if name in config}
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind != "ntk" or scaling.get("mixed_b") is not None:
            raise HandlerError(f"config.json has the rope_scaling {scaling!r}, which is not known for this network")
        # A larger base, and all frequencies divided by the same number, as linear scaling does.
        factor, width = scaling["factor"], config["hidden_size"] // config["num_attention_heads"]
        rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / width)}
    return {"model_type": "gte", **kept, "rope_parameters": rope}


def check_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Reject a network that transformers' own one does not compute."""
    for name, value in values.items():
        if name in config and config[name] != value and (config[name] or value):
            raise HandlerError(
                f"config.json has {name}: {config[name]!r}, and the network of transformers for it has {value!r} only"
            )


def num_trained(config: Mapping[str, Any]) -> int | None:
    """The positions of NomicBERT: with a scaling factor, longer texts would be computed by other frequencies."""
    positions: int | None = config.get("n_positions")
    if config.get("rotary_scaling_factor"):
        return int(config.get("max_trained_positions") or 2048)
    return positions
