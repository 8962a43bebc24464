"""GPT-2 and its relatives: plain feed-forward layers, biases, learned positions or ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import GPT_TOKENS, LLAMA_TOKENS, ROTARY_KEYS, partial_rotation
from flambeau.llm.models.families.family import Config, Family


def gpt_bigcode(config: Config) -> Config:
    """One key-value head, or as many as heads, which lie side by side in the files."""
    is_multi_query = bool(config["multi_query"])
    return {"num_kv_heads": 1} if is_multi_query else {"grouped_qkv": True}


def gpt_j(config: Config) -> Config:
    return {"rotary_size": int(config["rotary_dim"])}


def neox_theta(config: Config) -> Config:
    """Positions have `rotary_emb_base`; an older file has `rope_theta`, too, which has no effect of its own."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = config.get("rotary_emb_base", 10000)
    if "rope_theta" not in parameters and config.get("rope_theta") not in (None, base):
        raise CheckpointError(f"rope_theta {config['rope_theta']} has no effect here; rotary_emb_base, {base}, has")
    return config


def gpt_neox(config: Config) -> Config:
    is_parallel = bool(config["use_parallel_residual"])
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = parameters.get("partial_rotary_factor", config["rotary_pct"])
    if config.get("partial_rotary_factor") not in (None, factor):
        raise CheckpointError(
            f"partial_rotary_factor {config['partial_rotary_factor']} has no effect here; rotary_pct, {factor}, has"
        )
    return {
        **partial_rotation({**config, "partial_rotary_factor": factor}),
        "is_parallel": is_parallel,
        "parallel_norms": is_parallel,
    }


def falcon(config: Config) -> Config:
    """The keys of three generations: one norm or two, one key-value head, groups of them, or as many as heads."""
    is_new, heads = bool(config.get("new_decoder_architecture")), config["num_attention_heads"]
    if is_new:
        num_kv_heads = config.get("num_kv_heads") or heads
    else:
        num_kv_heads = 1 if config["multi_query"] else heads
    is_parallel = is_new or bool(config["parallel_attn"])
    num_norms = config.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    has_bias = bool(config.get("bias"))
    has_alibi = bool(config.get("alibi"))
    return {
        "alibi": "scaled" if has_alibi else None,
        "unrotated_layers": frozenset(range(config["num_hidden_layers"])) if has_alibi else frozenset(),
        "num_kv_heads": num_kv_heads,
        "is_parallel": is_parallel,
        "parallel_norms": is_parallel and num_norms == 2,
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
    }


def opt(config: Config) -> Config:
    """The smaller variants have embeddings of their own size, and norms after each addition (350M)."""
    hidden, has_bias = config["hidden_size"], bool(config["enable_bias"])
    is_before, is_affine = bool(config["do_layer_norm_before"]), bool(config["layer_norm_elementwise_affine"])
    size, is_bare = config.get("word_embed_proj_dim") or hidden, bool(config.get("_remove_final_layer_norm"))
    return {
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
        "embedding_size": 0 if size == hidden else int(size),
        "norm_places": "before" if is_before else "sum",
        "has_last_norm": is_before and not is_bare,
        "has_norm_weight": is_affine,
        "norm_bias": is_affine,
    }


def mpt(config: Config) -> Config:
    attention = config["attn_config"] or {}
    for key, values in MPT_ATTENTION.items():
        if attention.get(key, values[0]) not in values:
            raise CheckpointError(
                f"attn_config has {key} {attention[key]!r}, which is not supported; only {values[0]!r}"
            )
    return {
        "intermediate_size": int(config["expansion_ratio"]) * config["hidden_size"],
        "attention_scale": attention.get("softmax_scale"),
        "clip_qkv": attention.get("clip_qkv"),
    }


MPT_ATTENTION: Mapping[str, tuple[Any, ...]] = {  # values of attn_config that are supported
    "attn_type": ("multihead_attention",),
    "qk_ln": (False,),
    "prefix_lm": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8,),
}
PLAIN_PARTS = {"norm": "layer", "norm_bias": True, "has_gate": False}
BIGCODE_ROUNDING = (
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
    "inference_runner",
    "pre_allocate_kv_cache",
    "validate_runner_input",
    "max_batch_size",
    "max_sequence_length",
    "pad_key_length",
)
GPT_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
GPT_2_NAMES = (
    (r"^(?=h\.|wte\.|wpe\.|ln_f\.)", "transformer."),  # files of the base model have no prefix
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.wpe\.", "model.embed_positions."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
DENSE_NAMES = ((r"\.dense_h_to_4h\.", ".up_proj."), (r"\.dense_4h_to_h\.", ".down_proj."))

MPT = Family(
    model_type="mpt",
    has_kv_heads=False,
    qkv_bias=False,
    output_bias=False,
    is_rotated=False,
    parts={
        "norm": "layer",
        "has_gate": False,
        "activation": "gelu",
        "alibi": "plain",
    },
    derive=mpt,
    supported={"no_bias": (None, True), "logit_scale": (None,), "norm_type": (None, "low_precision_layernorm")},
    understands=frozenset(
        {"learned_pos_emb", "init_device", "embedding_fraction", "verbose", "init_config"} | {"tokenizer_name"}
    ),
    epsilon_key="layer_norm_epsilon",
    aliases={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    },
    mlp_ratio=4,
    renames=(
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.blocks\.", "model.layers."),
        (r"^transformer\.norm_f\.", "model.norm."),
        (r"\.norm_1\.", ".input_layernorm."),
        (r"\.norm_2\.", ".post_attention_layernorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.", ".mlp."),
    ),
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "expansion_ratio": 4, "attn_config": {}},
)
GPT_LIKE = {
    "GPT2LMHeadModel": Family(
        model_type="gpt2",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        is_rotated=False,
        mlp_ratio=4,
        parts={
            **PLAIN_PARTS,
            "mlp_bias": True,
            "learned_positions": True,
            "transposed": r"\.(qkv|o|up|down)_proj\.weight$",
        },
        understands=frozenset({"n_ctx"}),
        supported={
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "reorder_and_upcast_attn": (None, False, True),  # a matter of rounding
        },
        epsilon_key="layer_norm_epsilon",
        activation_key="activation_function",
        aliases=GPT_ALIASES,
        renames=GPT_2_NAMES,
        defaults={
            "max_position_embeddings": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            **GPT_TOKENS,
        },
    ),
    "GPTBigCodeForCausalLM": Family(
        model_type="gpt_bigcode",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        is_rotated=False,
        mlp_ratio=4,
        parts={**PLAIN_PARTS, "mlp_bias": True, "learned_positions": True},
        derive=gpt_bigcode,
        understands=frozenset({"n_ctx", "num_key_value_heads", *BIGCODE_ROUNDING}),
        supported={"scale_attn_weights": (None, True)},
        epsilon_key="layer_norm_epsilon",
        activation_key="activation_function",
        aliases=GPT_ALIASES,
        renames=GPT_2_NAMES,
        defaults={
            "max_position_embeddings": 1024,
            "activation_function": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "tie_word_embeddings": True,
            **GPT_TOKENS,
        },
    ),
    "GPTJForCausalLM": Family(
        model_type="gptj",
        has_kv_heads=False,
        qkv_bias=False,
        output_bias=False,
        mlp_ratio=4,
        parts={**PLAIN_PARTS, "mlp_bias": True, "head_bias": True, "is_parallel": True, "interleaved_rope": True},
        derive=gpt_j,
        understands=frozenset({"n_ctx", "rotary", "scale_attn_weights"}),
        supported={"rope_theta": (None, 10000.0), "rope_scaling": (None,), "rope_parameters": (None,)},
        epsilon_key="layer_norm_epsilon",
        activation_key="activation_function",
        aliases=GPT_ALIASES,
        renames=(
            *GPT_2_NAMES,
            (r"\.attn\.(q|k|v)_proj\.", r".self_attn.\1_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
            (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
        ),
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "rotary_dim": 64,
            **GPT_TOKENS,
        },
    ),
    "GPTNeoXForCausalLM": Family(
        model_type="gpt_neox",
        arrange=neox_theta,
        has_kv_heads=False,
        parts={**PLAIN_PARTS, "mlp_bias": True, "grouped_qkv": True},
        derive=gpt_neox,
        understands=ROTARY_KEYS | {"use_parallel_residual"},
        epsilon_key="layer_norm_eps",
        aliases={"rotary_emb_base": "rope_theta"},
        renames=(
            (r"^gpt_neox\.", "model."),
            (r"^model\.embed_in\.", "model.embed_tokens."),
            (r"^embed_out\.", "lm_head."),
            (r"^model\.final_layer_norm\.", "model.norm."),
            (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.attention\.dense\.", ".self_attn.o_proj."),
            *DENSE_NAMES,
        ),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    "FalconForCausalLM": Family(
        model_type="falcon",
        has_kv_heads=False,
        qkv_bias=False,
        output_bias=False,
        mlp_ratio=4,
        parts={**PLAIN_PARTS, "grouped_qkv": True},
        derive=falcon,
        supported={"apply_residual_connection_post_layernorm": (None, False)},
        understands=frozenset(
            {"alibi", "multi_query", "parallel_attn", "num_kv_heads", "ff_factor"}
        ),  # without effect in some generations
        epsilon_key="layer_norm_epsilon",
        activation_key="activation",
        aliases={
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_head_kv": "num_kv_heads",
            "ffn_hidden_size": "intermediate_size",
        },
        renames=(
            (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
            (r"^transformer\.h\.", "model.layers."),
            (r"^transformer\.ln_f\.", "model.norm."),
            (r"\.ln_attn\.", ".input_layernorm."),
            (r"\.ln_mlp\.", ".post_attention_layernorm."),
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            *DENSE_NAMES,
        ),
        defaults={
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
            "eos_token_id": 11,
            "bos_token_id": 11,
        },
    ),
    "OPTForCausalLM": Family(
        model_type="opt",
        has_kv_heads=False,
        is_rotated=False,
        parts={**PLAIN_PARTS, "learned_positions": True, "position_offset": 2},
        derive=opt,
        supported={"learned_embeddings": (None, True), "scale_embeddings": (None, False)},  # Galactica
        epsilon_key="layer_norm_epsilon",  # which no file has
        activation_key="activation_function",
        aliases={"ffn_dim": "intermediate_size"},
        renames=(
            (r"^(model\.)?decoder\.", "model."),
            (r"^model\.final_layer_norm\.", "model.norm."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.final_layer_norm\.", ".post_attention_layernorm."),
            (r"\.fc1\.", ".mlp.up_proj."),
            (r"\.fc2\.", ".mlp.down_proj."),
        ),
        defaults={
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-5,
            "enable_bias": True,
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 2,
        },
    ),
    "BloomForCausalLM": Family(
        model_type="bloom",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        is_rotated=False,
        mlp_ratio=4,
        parts={
            **PLAIN_PARTS,
            "mlp_bias": True,
            "activation": "gelu_tanh",
            "alibi": "plain",
            "embedding_norm": True,
            "grouped_qkv": True,
        },
        understands=frozenset({"slow_but_exact", "offset_alibi", "masked_softmax_fusion", "bias_dropout_fusion"})
        | {"skip_bias_add", "skip_bias_add_qkv"},
        supported={
            "apply_residual_connection_post_layernorm": (None, False),
            "attention_softmax_in_fp32": (None, True, False),  # a matter of rounding
        },
        epsilon_key="layer_norm_epsilon",
        aliases={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_embed": "hidden_size",
            "seq_length": "max_position_embeddings",
        },
        renames=(
            (r"^(?=h\.|word_embeddings|ln_f\.)", "transformer."),
            (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
            (r"^transformer\.word_embeddings_layernorm\.", "model.embed_norm."),
            (r"^transformer\.h\.", "model.layers."),
            (r"^transformer\.ln_f\.", "model.norm."),
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            *DENSE_NAMES,
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            **LLAMA_TOKENS,
        },
    ),
    "MptForCausalLM": MPT,
    "MPTForCausalLM": MPT,  # as MosaicML writes it
}
