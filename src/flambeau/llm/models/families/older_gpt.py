"""GPT-1, GPT-Neo, CodeGen, BioGPT, XGLM and the Japanese GPT-NeoX."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import GPT_TOKENS, ROTARY_KEYS, partial_rotation
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gpt_like import (
    DENSE_NAMES,
    GPT_2_NAMES,
    GPT_ALIASES,
    GPT_LIKE,
    PLAIN_PARTS,
    neox_theta,
)


def gpt_neo(config: Config) -> Config:
    """Scores are not scaled; some layers have a window."""
    kinds = config.get("attention_layers")
    if kinds is None:
        types = config.get("attention_types") or [[["global", "local"], 12]]
        kinds = [kind for names, count in types for _ in range(count) for kind in names]
    num_layers, window = config["num_hidden_layers"], config["window_size"]
    if len(kinds) != num_layers or not set(kinds) <= {"global", "local"}:
        raise CheckpointError(f"attention_types must name {num_layers} layers, each one of global, local")
    return {
        "attention_scale": 1.0,
        "windows": tuple(window if kind == "local" else None for kind in kinds) if "local" in kinds else (),
    }


def gpt_1(config: Config) -> Config:
    """`gelu` stands for its approximation by tanh."""
    kinds = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
    if config["afn"] not in kinds:
        raise CheckpointError(f"afn {config['afn']!r} is not supported; supported are {', '.join(kinds)}")
    return {"activation": kinds[config["afn"]]}


def biogpt(config: Config) -> Config:
    return {"embedding_scale": config["hidden_size"] ** 0.5 if config["scale_embedding"] else 1.0}


def neox_japanese(config: Config) -> Config:
    """The last layer of attention has a bias, which the files have for no other layer."""
    others = "|".join(map(str, range(config["num_hidden_layers"] - 1)))
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = parameters.get("partial_rotary_factor", config["rotary_pct"])
    return {
        **partial_rotation({**config, "partial_rotary_factor": factor}),
        "intermediate_size": int(config["hidden_size"] * config["intermediate_multiple_size"]),
        "zeros": rf"^model\.layers\.({others})\.self_attn\.o_proj\.bias$" if others else "",
    }


OLDER_GPT = {
    "OpenAIGPTLMHeadModel": replace(
        GPT_LIKE["GPT2LMHeadModel"],
        model_type="openai-gpt",
        parts={**GPT_LIKE["GPT2LMHeadModel"].parts, "norm_places": "sum", "has_last_norm": False},
        derive=gpt_1,
        supported={},
        activation_key="activation_function",  # which no file has: see `gpt_1`
        renames=(
            (r"^(?=h\.|tokens_embed|positions_embed)", "transformer."),
            (r"^transformer\.tokens_embed\.", "model.embed_tokens."),
            (r"^transformer\.positions_embed\.", "model.embed_positions."),
            *GPT_2_NAMES,
        ),
        defaults={
            "max_position_embeddings": 512,
            "afn": "gelu",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "GPTNeoForCausalLM": Family(
        model_type="gpt_neo",
        has_kv_heads=False,
        qkv_bias=False,
        output_bias=True,
        is_rotated=False,
        mlp_ratio=4,
        parts={**PLAIN_PARTS, "mlp_bias": True, "learned_positions": True},
        derive=gpt_neo,
        understands=frozenset({"attention_types", "embed_dropout", "resid_dropout"}),
        epsilon_key="layer_norm_epsilon",
        activation_key="activation_function",
        aliases={"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"},
        renames=(
            (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
            (r"\.attn\.attention\.(q|k|v)_proj\.", r".self_attn.\1_proj."),
            *GPT_2_NAMES,
        ),
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "window_size": 256,
            "tie_word_embeddings": True,
            **GPT_TOKENS,
        },
    ),
    "CodeGenForCausalLM": replace(
        GPT_LIKE["GPTJForCausalLM"],
        model_type="codegen",
        parts={**GPT_LIKE["GPTJForCausalLM"].parts, "qvk_blocks": 4},
        renames=((r"\.attn\.qkv_proj\.", ".self_attn.qkv_proj."), *GPT_LIKE["GPTJForCausalLM"].renames),
        aliases=GPT_ALIASES,
    ),
    "BioGptForCausalLM": Family(
        model_type="biogpt",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        is_rotated=False,
        parts={**PLAIN_PARTS, "mlp_bias": True, "learned_positions": True, "position_offset": 2},
        derive=biogpt,
        epsilon_key="layer_norm_epsilon",  # which no file has; layer_norm_eps of files has no effect
        understands=frozenset({"layer_norm_eps"}),
        renames=(
            (r"^biogpt\.embed_", "model.embed_"),
            (r"^biogpt\.layers\.", "model.layers."),
            (r"^biogpt\.layer_norm\.", "model.norm."),
            (r"^output_projection\.", "lm_head."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.final_layer_norm\.", ".post_attention_layernorm."),
            (r"\.fc1\.", ".mlp.up_proj."),
            (r"\.fc2\.", ".mlp.down_proj."),
        ),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1024,
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    "XGLMForCausalLM": Family(
        model_type="xglm",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        is_rotated=False,
        parts={
            **PLAIN_PARTS,
            "mlp_bias": True,
            "learned_positions": True,
            "position_offset": 2,
            "sinusoids": True,
            "unused": r"\.embed_positions\.weights$",
        },
        derive=biogpt,
        epsilon_key="layer_norm_eps",  # which no file has
        activation_key="activation_function",
        aliases={
            "d_model": "hidden_size",
            "ffn_dim": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "attention_heads": "num_attention_heads",
        },
        # The embedding at that place of the table is zeros; no position reaches the first two.
        supported={"add_cross_attention": (None, False), "pad_token_id": (None, 0, 1)},
        renames=(
            (r"^model\.layer_norm\.", "model.norm."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.final_layer_norm\.", ".post_attention_layernorm."),
            (r"\.fc1\.", ".mlp.up_proj."),
            (r"\.fc2\.", ".mlp.down_proj."),
        ),
        defaults={
            "activation_function": "gelu",
            "layer_norm_eps": 1e-5,
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    "GPTNeoXJapaneseForCausalLM": Family(
        model_type="gpt_neox_japanese",
        arrange=neox_theta,
        has_kv_heads=False,
        qkv_bias=False,
        output_bias=True,
        mlp_ratio=4,
        parts={**PLAIN_PARTS, "grouped_qkv": True},
        derive=neox_japanese,
        understands=ROTARY_KEYS,
        epsilon_key="layer_norm_eps",
        aliases={"rotary_emb_base": "rope_theta"},
        renames=(
            (r"^gpt_neox_japanese\.", "model."),
            (r"^model\.embed_in\.", "model.embed_tokens."),
            (r"^embed_out\.", "lm_head."),
            (r"^model\.final_layer_norm\.", "model.norm."),
            (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.attention\.dense_bias$", ".self_attn.o_proj.bias"),
            (r"\.attention\.dense\.", ".self_attn.o_proj."),
            *DENSE_NAMES,
        ),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rotary_pct": 1.0,
            "intermediate_multiple_size": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 31999,
            "bos_token_id": 31996,
        },
    ),
}
