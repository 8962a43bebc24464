"""Gemma: norms whose weights are stored as their difference from 1, scaled embeddings, soft caps."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.models.families.family import Config, Family


def gemma(config: Config) -> Config:
    return {"embedding_scale": config["hidden_size"] ** 0.5}


def gemma_1(config: Config) -> Config:
    """The first files say gelu, and mean its approximation by tanh."""
    return {**gemma(config), "activation": "gelu_tanh"}


def gemma_2(config: Config) -> Config:
    return {
        **gemma(config),
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def gemma_3(config: Config) -> Config:
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    local = nested.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0
    return {**gemma_2(config), "local_rope_theta": float(local)}


GEMMA_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GEMMA_2_DEFAULTS = {
    **GEMMA_DEFAULTS,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
SOFTCAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})

GEMMA_3 = Family(
    model_type="gemma3_text",
    qk_norm=True,
    windowed="pattern",
    switches_window=False,
    parts={"norm_offset": 1.0, "norm_places": "both"},
    has_local_rope=True,
    derive=gemma_3,
    understands=frozenset({"final_logit_softcapping", "hidden_act"}),  # scores have none; hidden_activation counts
    activation_key="hidden_activation",
    defaults={
        **GEMMA_2_DEFAULTS,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window_pattern": 6,
    },
)

GEMMA = {
    "GemmaForCausalLM": Family(
        model_type="gemma",
        parts={"norm_offset": 1.0},
        derive=gemma_1,
        supported={  # some have both keys
            "hidden_act": (None, "gelu", "gelu_new", "gelu_pytorch_tanh"),
            "hidden_activation": (None, "gelu", "gelu_new", "gelu_pytorch_tanh"),
        },
        defaults={**GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        windowed="even",
        switches_window=False,
        parts={"norm_offset": 1.0, "norm_places": "both"},
        derive=gemma_2,
        understands=SOFTCAPS | {"hidden_act", "sliding_window_size"},  # hidden_activation and sliding_window count
        activation_key="hidden_activation",
        defaults={**GEMMA_2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        GEMMA_3,
        model_type="gemma3",
        vision="siglip",
        renames=(
            (r"^(model\.)?language_model\.(model\.)?(?=layers|norm|embed_tokens)", "model."),
            (r"^(model\.)?language_model\.lm_head\.", "lm_head."),
        ),
        defaults={
            **GEMMA_3.defaults,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
}
