"""Fields that files on the hub have and transformers does not write: small networks with them, against transformers.

A row holds the fields of a published config.json that are peculiar to it; sizes are small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.errors import CheckpointError, InvalidConfig
from flambeau.llm.models.hugging_face import from_hugging_face
from support.checkpoints import VOCAB_SIZE, config_of, random_weights
from unit.llm.models.families.test_llama_like import TOLERANCE, expected_logits, found_logits

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128}
OPT = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 56}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Coder": {
        **SIZES,
        **EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "qkv_bias": False,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
    },
    "Qwen2.5-1M": {
        **SIZES,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dual_chunk_attention_config": {
            "chunk_size": 80,
            "local_size": 16,
            "original_max_position_embeddings": 80,
        },
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "DeepSeek-R1-Distill-Qwen": {
        **SIZES,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_window_layers": 1,
        "sliding_window": 9,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Falcon3": {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "activation": "swiglu",
        "head_dim": 16,
        "rope_theta": 1000042,
    },
    "Llama-3.2": {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 8,
        "rope_scaling": {**LLAMA_3, "rope_type": "llama3"},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "unsloth_fixed": True,
    },
    "Yarn-Llama-2": {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_sequence_length": 128,
        "rope_scaling": {"factor": 8.0, "finetuned": True, "original_max_position_embeddings": 16, "type": "yarn"},
    },
    "gemma-2b": {
        **SIZES,
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "head_dim": 16,
        "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma-2-27b": {
        **SIZES,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "cache_implementation": "hybrid",
        "head_dim": 16,
        "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "sliding_window_size": 4096,
    },
    "gemma-3-1b": {
        **SIZES,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "cache_implementation": "hybrid",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 9,
        "sliding_window_pattern": 6,
    },
    "command-r7b": {
        **SIZES,
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "cache_implementation": "hybrid",
        "head_dim": 8,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window": 9,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "granite-3.1-a800m": {
        **SIZES,
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "attention_multiplier": 0.25,
        "embedding_multiplier": 2.0,
        "init_method": "mup",
        "logits_scaling": 4.0,
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 3,
        "num_local_experts": 6,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.4,
    },
    "starcoder2": {
        **SIZES,
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-3,
        "mlp_type": "default",
        "norm_epsilon": 1e-5,
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 9,
        "use_bias": True,
    },
    "Minitron": {
        **SIZES,
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "apply_residual_connection_post_layernorm": False,
        "ffn_hidden_size": 56,
        "head_dim": 8,
        "hidden_act": "relu2",
        "kv_channels": 8,
        "max_sequence_length": 128,
        "norm_eps": 1e-5,
        "num_layers": 3,
        "partial_rotary_factor": 0.5,
        "rope_percent": 0.5,
        "rotary_percent": 0.5,
        "transformer_engine": True,
    },
    "MiniMax-M2": {
        **SIZES,
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "attn_type_list": [1, 1, 1],
        "head_dim": 16,
        "num_experts_per_tok": 3,
        "num_local_experts": 6,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "distilgpt2": {
        **GPT,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "_num_labels": 1,
        "n_special": 0,
        "output_past": True,
        "predict_special_tokens": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "galactica": {
        **OPT,
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "gelu",
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "learned_embeddings": True,
        "max_position_embeddings": 128,
        "scale_embeddings": False,
        "word_embed_proj_dim": 32,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "n_embed": 32,
        "n_head": 4,
        "n_layer": 2,
        "num_attention_heads": 4,
        "offset_alibi": 100,
        "seq_length": 128,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
    },
    "mpt": {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_type": "multihead_attention"},
        "d_model": 32,
        "init_device": "cpu",
        "max_seq_len": 128,
        "n_heads": 4,
        "n_layers": 2,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "vocab_size": VOCAB_SIZE,
    },
    "falcon-11B": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": VOCAB_SIZE,
        "ff_factor": 4,
        "ffn_hidden_size": 56,
        "hidden_size": 32,
        "max_position_embeddings": 128,
        "new_decoder_architecture": True,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": VOCAB_SIZE,
        "conv_kernel": 4,
        "d_inner": 64,
        "d_model": 32,
        "expand": 2,
        "fused_add_norm": True,
        "hidden_size": 32,
        "intermediate_size": 64,
        "n_layer": 2,
        "num_hidden_layers": 2,
        "pad_vocab_size_multiple": 8,
        "ssm_cfg": {},
        "state_size": 6,
        "time_step_rank": 2,
    },
}


def write_network(folder: Path, name: str) -> Any:
    """A checkpoint with the published keys, and the network of transformers for them."""
    import transformers

    file = folder / "config.json"
    file.write_text(json.dumps(PUBLISHED[name]))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    random_weights(reference.eval().requires_grad_(False), middle=0.0 if "gemma" in config.model_type else 1.0)
    reference.save_pretrained(folder)
    file.write_text(json.dumps(PUBLISHED[name]))
    return reference


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_network_with_published_keys_is_that_of_transformers(tmp_path, name):
    reference = write_network(tmp_path, name)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


def test_sequences_end_where_dual_chunk_attention_would_begin(tmp_path, caplog):
    write_network(tmp_path, "Qwen2.5-1M")
    assert load_model(tmp_path).arch.max_length == 64
    assert "sequences end after 64 tokens, because longer ones need dual chunk attention" in caplog.text


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Qwen3-Coder", "use_qk_norm", False),
        ("Qwen3-Coder", "shared_expert_intermediate_size", 8),
        ("Qwen3-Coder", "qkv_bias", True),
        ("Falcon3", "activation", "gelu"),
        ("gemma-2b", "hidden_act", "silu"),
        ("command-r7b", "layer_switch", 3),
        ("command-r7b", "rotary_pct", 0.5),
        ("command-r7b", "use_parallel_block", False),
        ("granite-3.1-a800m", "position_embedding_type", "nope"),
        ("galactica", "scale_embeddings", True),
        ("Minitron", "apply_residual_connection_post_layernorm", True),
    ],
)
def test_other_value_of_a_key_is_refused_by_name(name, key, value):
    with pytest.raises(CheckpointError, match=key):
        from_hugging_face({**PUBLISHED[name], key: value})


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_weights_of_mlx_are_refused_by_name(key):
    with pytest.raises(InvalidConfig, match="4 bits in the format of MLX"):
        from_hugging_face({**config_of("qwen-3"), key: {"group_size": 64, "bits": 4}})


def test_su_is_an_older_name_of_longrope():
    config = {**config_of("phi-3-long"), "rope_parameters": None, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = from_hugging_face({**config, "rope_scaling": {**factors, "type": "su"}}).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.original_length, scaling.switch_length) == ("longrope", 16, 16)


def test_rope_parameters_that_are_null_are_those_of_the_family():
    config = config_of("ministral-3")
    without = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert (
        from_hugging_face(without | {"rope_parameters": None}).rope_scaling == from_hugging_face(without).rope_scaling
    )
    assert from_hugging_face(without).rope_scaling is not None


def test_persimmon_without_a_theta_has_that_of_transformers():
    config = {key: value for key, value in config_of("persimmon").items() if key != "rope_parameters"}
    assert from_hugging_face(config).rope_theta == 10_000


@pytest.mark.parametrize("kind", ["gpt-neox", "neox-japanese"])
def test_a_rope_theta_without_effect_is_refused(kind):
    config = {key: value for key, value in config_of(kind).items() if key != "rope_parameters"}
    with pytest.raises(CheckpointError, match="rope_theta 500"):
        from_hugging_face(config | {"rope_theta": 500.0})
    assert from_hugging_face(config | {"rope_theta": 500.0, "rotary_emb_base": 500.0}).rope_theta == 500


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("cohere-2-moe", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("olmo-3", "rope_scaling", {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}),
        ("modern-bert", "sliding_window", 5),
        ("olmo", "norm_eps", 0.3),
        ("rwkv", "layer_norm_epsilon", 0.3),
        ("ernie-4.5-moe", "moe_norm_min", 0.3),
        ("minimax-01", "norm_topk_prob", False),
        ("mixtral", "norm_topk_prob", False),
        ("gpt-oss", "norm_topk_prob", False),
    ],
)
def test_a_key_that_transformers_reads_otherwise_is_refused(kind, key, value):
    config = config_of(kind)
    from_hugging_face(config)
    with pytest.raises((CheckpointError, InvalidConfig), match=key):
        from_hugging_face(config | {key: value})


def test_an_odd_number_of_rotated_dimensions_is_refused_in_any_layer():
    config = config_of("mimo-v2")
    ropes = config["rope_parameters"]
    odd = {**ropes["full_attention"], "partial_rotary_factor": 5 / config["head_dim"]}
    with pytest.raises(CheckpointError, match="5 of"):
        from_hugging_face(config | {"rope_parameters": {**ropes, "full_attention": odd}})


def test_a_number_that_was_rounded_to_float32_is_the_same():
    """GGUF files have such numbers."""
    config = config_of("olmo") | {"norm_eps": 9.999999747378752e-06}
    assert from_hugging_face(config).norm_epsilon == pytest.approx(1e-5)
