"""Families with layer norms and rotary positions."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    CLIP_KEYS,
    GPT_TOKENS,
    LLAMA_TOKENS,
    ROTARY_KEYS,
    clipped,
    partial_rotation,
    uniform_bias,
)
from flambeau.llm.models.families.family import Config, Family


def cohere_2(config: Config) -> Config:
    """`layer_switch` is an older name of the pattern, which files have beside it."""
    if config.get("layer_switch") not in (None, config["sliding_window_pattern"]):
        raise CheckpointError(
            f"layer_switch {config['layer_switch']!r} is not supported beside sliding_window_pattern "
            f"{config['sliding_window_pattern']!r}; both must be the same"
        )
    return cohere(config)


def cohere(config: Config) -> Config:
    return {"logit_scale": float(config["logit_scale"]), "separate_qk_norm": bool(config.get("use_qk_norm"))}


def stablelm(config: Config) -> Config:
    return {
        **partial_rotation(config),
        "qkv_bias": bool(config["use_qkv_bias"]),
        "separate_qk_norm": bool(config.get("qk_layernorm")),
        "is_parallel": bool(config.get("use_parallel_residual")),
    }


# Of StarCoder 1, and of NeMo: the same as other keys, or without effect.
STARCODER_KEYS = frozenset(
    {
        "activation_function",
        "layer_norm_epsilon",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
    }
)
_NEMOTRON_KEYS = """
rope_percent rope_percentage rotary_percent norm_epsilon transformer_engine ffn_hidden_size kv_channels num_layers
"""
NEMOTRON_KEYS = frozenset(_NEMOTRON_KEYS.split())

LAYER_NORM = {
    "CohereForCausalLM": Family(
        model_type="cohere",
        understands=frozenset({"use_qk_norm"}),
        supported={"layer_norm_bias": (None, False)},
        parts={"norm": "layer", "is_parallel": True, "interleaved_rope": True},
        derive=cohere,
        epsilon_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "eos_token_id": 255001,
            "bos_token_id": 5,
        },
    ),
    "Cohere2ForCausalLM": Family(
        model_type="cohere2",
        windowed="pattern",
        rotates_windows=True,
        switches_window=False,
        parts={"norm": "layer", "is_parallel": True, "interleaved_rope": True},
        derive=cohere_2,
        understands=frozenset({"use_embedding_sharing", "use_parallel_embedding"}),  # see tie_word_embeddings
        supported={
            "order_of_interleaved_layers": (None, "local_attn_first"),
            "position_embedding_type": (None, "rope_gptj"),
            "rotary_pct": (None, 1, 1.0),
            "use_gated_activation": (None, True),
            "use_parallel_block": (None, True),
        },
        epsilon_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 255001,
            "bos_token_id": 5,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        model_type="starcoder2",
        windowed="all",
        names_layers=False,
        switches_window=False,
        parts={"norm": "layer", "norm_bias": True, "has_gate": False},
        derive=uniform_bias,
        understands=STARCODER_KEYS,
        epsilon_key="norm_epsilon",
        renames=((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj.")),
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            **GPT_TOKENS,
        },
    ),
    "StableLmForCausalLM": Family(
        model_type="stablelm",
        output_bias=False,
        parts={"norm": "layer", "norm_bias": True},
        derive=stablelm,
        understands=ROTARY_KEYS | {"qk_layernorm", "use_parallel_residual"},
        renames=((r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),),
        epsilon_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "eos_token_id": 0,
            "bos_token_id": 0,
        },
    ),
    "PhiForCausalLM": Family(
        model_type="phi",
        qkv_bias=True,
        output_bias=True,
        parts={
            "norm": "layer",
            "norm_bias": True,
            "is_parallel": True,
            "has_gate": False,
            "mlp_bias": True,
            "head_bias": True,
        },
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        epsilon_key="layer_norm_eps",
        renames=(
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"^model\.final_layernorm\.", "model.norm."),
        ),
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
            **LLAMA_TOKENS,
        },
    ),
    "OlmoForCausalLM": Family(
        model_type="olmo",
        parts={"norm": "layer", "has_norm_weight": False},
        derive=clipped,
        understands=CLIP_KEYS,
        epsilon_key="norm_eps",  # which no file has: norms of transformers' OLMo have one epsilon
        supported={"norm_eps": (None, 1e-5)},
        defaults={"norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "NemotronForCausalLM": Family(
        model_type="nemotron",
        parts={"norm": "layer", "norm_bias": True, "norm_offset": 1.0, "has_gate": False},
        derive=partial_rotation,
        understands=ROTARY_KEYS | NEMOTRON_KEYS,
        supported={"apply_residual_connection_post_layernorm": (None, False)},
        epsilon_key="norm_eps",
        defaults={
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "eos_token_id": 3,
            "bos_token_id": 2,
        },
    ),
}
