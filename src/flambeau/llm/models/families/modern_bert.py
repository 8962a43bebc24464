"""The decoder of ModernBERT: layers with and without a window, and a layer before the head."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError, InvalidConfig
from flambeau.llm.models.families.family import Config, Family

ACTIVATIONS = {"gelu": "gelu", "silu": "silu", "relu": "relu", "gelu_pytorch_tanh": "gelu_tanh"}
THETAS = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}


def modern_bert_keys(config: Config) -> Config:
    """Older files have two thetas and how many layers apart those without a window are; windows reach back half."""
    found = dict(config)
    given = found.get("rope_parameters") or {}
    nested = {
        kind: {"rope_type": "default", "rope_theta": found.pop(key, None) or default, **(given.get(kind) or {})}
        for kind, (key, default) in THETAS.items()
    }
    if any(each["rope_type"] != "default" for each in nested.values()):
        raise CheckpointError("rope_parameters with another rope_type than 'default' are not supported here")
    found["rope_parameters"] = nested
    every = found.pop("global_attn_every_n_layers", None) or 3
    if found.get("layer_types") is None:
        number = found["num_hidden_layers"]
        found["layer_types"] = ["sliding_attention" if i % every else "full_attention" for i in range(number)]
    reach = found.pop("local_attention", 128)
    window = reach // 2 if reach else None
    if found.get("sliding_window") not in (None, -1, window):
        raise InvalidConfig(
            f"sliding_window is {found['sliding_window']}, and local_attention, {reach}, makes it {window}; "
            "remove the wrong one of the two keys"
        )
    found["sliding_window"] = window
    return found


def modern_bert(config: Config) -> Config:
    if config["sliding_window"] is None:
        raise CheckpointError("local_attention is needed here: layers with a window have positions of their own")
    name = config["classifier_activation"]
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"classifier_activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    return {
        "norm_bias": bool(config["norm_bias"]),
        "local_rope_theta": float(local) if "sliding_attention" in config["layer_types"] else None,
        "head_layer": ACTIVATIONS[name],
        "head_layer_bias": bool(config["classifier_bias"]),
        "tied_bias": bool(config["decoder_bias"]),
    }


_MODERN_KEYS = """
cls_token_id mlp_dropout classifier_dropout initializer_cutoff_factor classifier_pooling compile
deterministic_flash_attn reference_compile sparse_prediction sparse_pred_ignore_index repad_logits_with_grad
causal_mask norm_eps
"""

MODERN_BERT = {
    "ModernBertDecoderForCausalLM": Family(
        model_type="modernbert-decoder",
        has_kv_heads=False,
        windowed="named",
        switches_window=False,
        has_local_rope=True,
        arrange=modern_bert_keys,
        parts={"norm": "layer", "embedding_norm": True, "has_first_norm": False},
        derive=modern_bert,
        understands=frozenset(_MODERN_KEYS.split()),
        epsilon_key="norm_eps",
        activation_key="hidden_activation",
        renames=(
            (r"^lm_head\.(dense|norm)\.", r"model.head_layer.\1."),
            (r"^decoder\.weight$", "lm_head.weight"),
            (r"^decoder\.bias$", "model.head_bias"),
            (r"^model\.embeddings\.tok_embeddings\.", "model.embed_tokens."),
            (r"^model\.embeddings\.norm\.", "model.embed_norm."),
            (r"^model\.final_norm\.", "model.norm."),
            (r"\.attn_norm\.", ".input_layernorm."),
            (r"\.mlp_norm\.", ".post_attention_layernorm."),
            (r"\.attn\.Wo\.", ".self_attn.o_proj."),
            (r"\.attn\.(q|k|v)_proj\.", r".self_attn.\1_proj."),
            (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
            (r"\.mlp\.Wo\.", ".mlp.down_proj."),
        ),
        supported={"tie_word_embeddings": (None, True)},
        defaults={
            "hidden_activation": "gelu",
            "norm_eps": 1e-5,
            "norm_bias": False,
            "decoder_bias": True,
            "classifier_bias": False,
            "classifier_activation": "gelu",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "eos_token_id": 50282,
            "bos_token_id": 50281,
        },
    ),
}
