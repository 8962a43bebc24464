"""Gemma 3n: several streams of hidden states, embeddings of each layer's own, keys of other layers."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gemma import GEMMA_DEFAULTS
from flambeau.llm.models.families.gemma_4 import LAYER_INPUT_NAMES, shared_keys
from flambeau.llm.models.families.layer_sizes import LayerSizes

SPARSE_LAYERS, SPARSITY = 10, 0.95  # of the first layers, unless config.json says it


def gemma_3n(config: Config) -> Config:
    num_layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(num_layers)
    ]
    given = config["intermediate_sizes"]
    sizes = given if isinstance(given, list) else [given] * num_layers
    if len(sizes) != num_layers or len(kinds) != num_layers:
        raise CheckpointError(f"intermediate_size and layer_types must name {num_layers} layers")
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": 1.0,
        "logit_softcap": config.get("final_logit_softcapping"),
        "local_rope_theta": float(nested.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0),
        "intermediate_size": max(sizes),
        "shapes": tuple(
            LayerSizes(
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_size=config["head_dim"],
                intermediate_size=size,
            )
            for size in sizes
        )
        if len(set(sizes)) > 1
        else (),
        "shared_keys": shared_keys(config, [*kinds]),
        "layer_input_size": int(config["hidden_size_per_layer_input"]),
        "layer_input_vocab": int(config["vocab_size_per_layer_input"]),
        "num_streams": int(config["altup_num_inputs"]),
        "active_stream": int(config["altup_active_idx"]),
        "scales_stream": bool(config["altup_correct_scale"]),
        "laurel_size": int(config["laurel_rank"]),
        "sparsity": sparsity(config),
    }


def sparsity(config: Config) -> tuple[float, ...]:
    """Of the activation of each layer; empty if there is none."""
    num_layers, given = config["num_hidden_layers"], config.get("activation_sparsity_pattern")
    if given is None:
        num_sparse = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        given = [SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    given = given if isinstance(given, list) else [given] * num_layers
    if len(given) != num_layers or not all(0 <= one < 1 for one in given):
        raise CheckpointError(
            f"activation_sparsity_pattern {given!r} is not supported; it must be a number from 0 up to 1 for each of "
            f"{num_layers} layers"
        )
    return tuple(map(float, given)) if any(given) else ()


GEMMA_3N = Family(
    model_type="gemma3n_text",
    qk_norm=True,
    windowed="pattern",
    switches_window=False,
    has_local_rope=True,
    parts={"norm_places": "both", "normalizes_values": True},
    derive=gemma_3n,
    understands=frozenset(
        {"altup_coef_clip", "altup_lr_multiplier", "final_logit_softcapping", "query_pre_attn_scalar"}
    ),
    activation_key="hidden_activation",
    aliases={"intermediate_size": "intermediate_sizes"},
    renames=(
        *LAYER_INPUT_NAMES,
        (r"\.altup_(unembed_)?projections\.", r".streams.\1projections."),
        (r"\.laurel\.post_laurel_norm\.", ".laurel.norm."),
    ),
    defaults={
        **GEMMA_DEFAULTS,
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "intermediate_sizes": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
    },
)
GEMMA_3N_ROWS = {
    "Gemma3nForCausalLM": GEMMA_3N,
}
