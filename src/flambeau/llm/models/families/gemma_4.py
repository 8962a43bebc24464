"""Gemma 4: heads of two sizes, keys of other layers, embeddings of each layer's own, experts beside other layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gemma import GEMMA_DEFAULTS
from flambeau.llm.models.families.layer_sizes import LayerSizes

LAYER_INPUT_NAMES = (
    (r"\.embed_tokens_per_layer\.", ".layer_inputs.embed_tokens."),
    (r"\.per_layer_model_projection\.", ".layer_inputs.projection."),
    (r"\.per_layer_projection_norm\.", ".layer_inputs.norm."),
    (r"\.per_layer_input_gate\.", ".layer_input.gate."),
    (r"\.per_layer_projection\.", ".layer_input.projection."),
    (r"\.post_per_layer_input_norm\.", ".layer_input.norm."),
)
WIDE_HEAD = 512  # the size of heads in layers without a window


def gemma_4(config: Config) -> Config:
    kinds = layer_kinds(config)
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    shared = shared_keys(config, kinds)
    return {
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": 1.0,
        "logit_softcap": config.get("final_logit_softcapping"),
        "local_rope_theta": float(nested.get("rope_theta") or 10000.0),
        "windows": tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
        "shapes": shapes(config, kinds),
        "shared_keys": shared,
        "values_from_keys": frozenset(
            number for number, kind in enumerate(kinds) if config["attention_k_eq_v"] and kind == "full_attention"
        ),
        **layer_inputs(config),
        **experts(config),
    }


def layer_inputs(config: Config) -> dict[str, Any]:
    """Embeddings that each layer has of its own."""
    size, count = config.get("hidden_size_per_layer_input"), config.get("vocab_size_per_layer_input")
    if not size:
        return {}
    return {
        "layer_input_size": size,
        "layer_input_vocab": count,
        "image_layer_id": int(config.get("pad_token_id") or 0),
    }


def layer_kinds(config: Config) -> list[str]:
    """Whether each layer has a window; the last one never has."""
    num_layers, named = config["num_hidden_layers"], config.get("layer_types")
    kinds = named or ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"layer_types must name {num_layers} layers, each one of full_attention, sliding_attention"
        )
    return [*kinds[:-1], "full_attention"]


def shapes(config: Config, kinds: list[str]) -> tuple[LayerSizes, ...]:
    """The sizes of each layer; those without a window may have other heads, and the last layers wider ones."""
    first_shared = config["num_hidden_layers"] - int(config.get("num_kv_shared_layers") or 0)
    own = differing_heads(config, kinds)
    return tuple(
        LayerSizes(
            num_heads=config["num_attention_heads"],
            num_kv_heads=int(own[number].get("num_key_value_heads") or config["num_key_value_heads"]),
            head_size=int(own[number].get("head_dim") or config["head_dim"]),
            intermediate_size=config["intermediate_size"]
            * (2 if config["use_double_wide_mlp"] and number >= first_shared else 1),
        )
        for number in range(len(kinds))
    )


def differing_heads(config: Config, kinds: list[str]) -> list[dict[str, Any]]:
    """What `per_layer_config` says of each layer, or the older keys of those without a window."""
    wide: dict[str, Any] = {"head_dim": config.get("global_head_dim") or WIDE_HEAD}
    kv_heads = config.get("num_global_key_value_heads")
    if kv_heads is not None and config["attention_k_eq_v"]:
        wide["num_key_value_heads"] = kv_heads
    given = config.get("per_layer_config")
    if given is None:
        return [wide if kind == "full_attention" else {} for kind in kinds]
    found: list[dict[str, Any]] = [dict(given.get(str(number)) or {}) for number in range(len(kinds))]
    unknown = {key for one in found for key in one} - {"head_dim", "num_key_value_heads"}
    numbers = {str(number) for number in range(len(kinds))}
    if unknown or not set(map(str, given)) <= numbers:
        names = ", ".join(sorted(unknown)) or "layers that are not there"
        raise CheckpointError(
            f"per_layer_config with {names} is not supported; supported are head_dim and num_key_value_heads of layers"
        )
    return found


def shared_keys(config: Config, kinds: list[str]) -> tuple[int, ...]:
    """The last layers read the keys and values of the last one before them of their kind."""
    count = int(config.get("num_kv_shared_layers") or 0)
    if not count:
        return ()
    first = len(kinds) - count
    before = {kind: number for number, kind in enumerate(kinds[: max(0, first)])}
    if missing := set(kinds[max(0, first) :]) - before.keys():
        raise CheckpointError(
            f"num_kv_shared_layers {count} is not supported: no layer before those has {', '.join(sorted(missing))}"
        )
    return tuple(number if number < first else before[kind] for number, kind in enumerate(kinds))


def experts(config: Config) -> dict[str, Any]:
    if not config["enable_moe_block"]:
        return {}
    return {
        "experts_beside_mlp": True,
        "num_experts": int(config["num_experts"]),
        "num_experts_per_token": int(config["top_k_experts"]),
        "expert_size": int(config["moe_intermediate_size"]),
    }


GEMMA_4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GEMMA_4_TEXT = Family(
    model_type="gemma4_text",
    qk_norm=True,
    windowed="pattern",
    switches_window=False,
    has_local_rope=True,
    parts={"norm_places": "both", "normalizes_values": True, "scales_layers": True},
    derive=gemma_4,
    # Of "vision", tokens of an image attend to each other (see vision_config.py).
    supported={"use_bidirectional_attention": (None, False, "vision")},
    understands=frozenset({"num_experts", "top_k_experts", "moe_intermediate_size", "final_logit_softcapping"}),
    activation_key="hidden_activation",
    renames=(
        *LAYER_INPUT_NAMES,
        (r"\.layer_scalar$", ".layer_scale"),
        (r"\.router\.proj\.", ".mlp.sparse.gate."),
        (r"\.router\.scale$", ".mlp.router_norm.weight"),
        (r"\.router\.per_expert_scale$", ".mlp.sparse.expert_scales"),
        (r"(\.layers\.\d+)\.experts\.", r"\1.mlp.sparse.experts."),
        (r"\.post_feedforward_layernorm_1\.", ".mlp.dense_norm."),
        (r"\.post_feedforward_layernorm_2\.", ".mlp.sparse_norm."),
        (r"\.pre_feedforward_layernorm_2\.", ".mlp.expert_norm."),
    ),
    defaults={
        **GEMMA_DEFAULTS,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_parameters": GEMMA_4_ROPE,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "attention_k_eq_v": False,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
    },
)
GEMMA_4_UNIFIED = replace(
    GEMMA_4_TEXT,
    model_type="gemma4_unified_text",
    defaults={
        **GEMMA_4_TEXT.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)
GEMMA_4 = {
    "Gemma4ForCausalLM": GEMMA_4_TEXT,
    "Gemma4UnifiedForCausalLM": GEMMA_4_UNIFIED,
}
