"""Tiny random checkpoints of every family, written by transformers, and what transformers finds for them.

Importing transformers takes seconds: it is imported by the first test that compares with it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_ALL_FAMILIES = (5, 23)  # version of transformers: one without a class of these has renamed it
VOCAB_SIZE = 101
LENGTH = 48  # of the sequences that are compared: longer than the windows, and than what positions are stretched from

TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}


GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
PLAIN = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
POSITIONLESS = {key: value for key, value in PLAIN.items() if key not in ("rope_theta", "intermediate_size")}
MAMBA = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 6}
OTHER_SIZES: dict[str, dict[str, Any]] = {  # of families that have other keys
    "GPT2": GPT,
    "GPTJ": GPT,
    "GPTBigCode": GPT,
    "CodeGen": GPT,
    "OpenAIGPT": GPT,
    "GPTNeo": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 128,
    },
    "BioGpt": {key: value for key, value in PLAIN.items() if key != "rope_theta"},
    "GPTNeoX": PLAIN,
    "ModernBertDecoder": PLAIN,
    "Persimmon": PLAIN,
    "Glm5Next": {},
    "Falcon": {**POSITIONLESS, "rope_theta": 10000.0},
    "OPT": {**POSITIONLESS, "ffn_dim": 56},
    "Bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mamba": MAMBA,
    "FalconMamba": MAMBA,
    "Mamba2": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "state_size": 12,
    },
    "LongcatFlash": {
        key: value for key, value in TINY.items() if key not in ("num_hidden_layers", "intermediate_size")
    },
    "Jamba": {key: value for key, value in TINY.items() if key != "rope_theta"},
    "NemotronH": {key: value for key, value in TINY.items() if key not in ("rope_theta", "num_hidden_layers")},
    "Rwkv": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 128},
    "RecurrentGemma": {key: value for key, value in TINY.items() if key != "max_position_embeddings"},
    "Dbrx": {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 128},
    "XGLM": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "ffn_dim": 56,
        "num_layers": 2,
        "attention_heads": 2,
        "max_position_embeddings": 128,
    },
    "GPTNeoXJapanese": {**POSITIONLESS, "rope_theta": 10000.0},
    "Kolibri1": {key: value for key, value in TINY.items() if key != "intermediate_size"},
    "Mpt": {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
}
TEXT_CONFIGS = (
    "CohereCompass",
    "Dots3Note",
    "MiniMaxM3VL",
    "Gemma3",
    "Gemma3n",
    "Gemma4",
    "Gemma4Unified",
    "Llama4",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Qwen4Exp",
)
SAVE_OPTIONS = ("max_shard_size", "safe_serialization", "save_original_format")  # of transformers
MODEL_CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "InternLM3": "LlamaForCausalLM",
    "IQuestCoder": "LlamaForCausalLM",
    "OpenAIGPT": "OpenAIGPTLMHeadModel",
    "Glm5Next": "Glm5NextForConditionalGeneration",
    "Step3p7": "Step3p7ForConditionalGeneration",
    "MistralLarge4": "MistralLarge4ForConditionalGeneration",
}
PICTURES: dict[str, dict[str, Any]] = {  # the vision model of families that transformers has no other class of
    "MistralLarge4": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "head_dim": 8,
    },
    "Step3p7": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "mlp_ratio": 1.0,
    },
}
ONE_NORM = ("Mamba2", "Bamba", "GraniteMoeHybrid")  # before HAS_ALL_FAMILIES
ZERO_CENTERED = (
    "Qwen4Exp",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Qwen3Next",
    "Step3p7",
    "MiniMaxM3VL",
)  # norms add 1 to their weights


@dataclass(frozen=True)
class Kind:
    """A class of models in transformers, and how its tiny one differs from the others."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)


def stretched(rope_type: str, **options: Any) -> dict[str, Any]:
    """Rotary positions of a model that was trained on 16 tokens, or told so."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **options}}


LATENT = {  # attention whose keys and values come from latents
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
DEEPSEEK = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
DOTS = {
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_experts_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 4,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
    "sliding_window": 7,
    "swa_rope_theta": 5000.0,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 28,
    "swa_kv_lora_rank": 40,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 14,
    "pad_token_id": None,
}
GEMMA_4_HEADS = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 40000.0},
    },
}
GEMMA_4 = {**GEMMA_4_HEADS, "hidden_size_per_layer_input": 0}
MODERN_BERT = {
    "local_attention": 18,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 40000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
ENCODER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPARSE_SIZES = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # whose size the CPU kernels know
SPARSE = {
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
}
LLAMA_3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"original_max_position_embeddings": 32}
KINDS = {
    "llama-2": Kind("Llama", {"num_key_value_heads": 4}),
    "llama-3": Kind("Llama", {"rope_theta": 500000.0}),
    "dots-3-plain": Kind(
        "Dots3Note",
        {**DOTS, "use_dsa": False, "layer_types": None, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2},
    ),
    "diff-llama": Kind("DiffLlama"),
    "diff-llama-biased": Kind("DiffLlama", {"num_key_value_heads": 4, "attention_bias": True, "head_dim": 12}),
    "internlm-3": Kind("InternLM3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "iquest-coder": Kind("IQuestCoder", {"head_dim": 16}),
    "llama-3.1": Kind(
        "Llama",
        stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-3.2": Kind(
        "Llama",
        {
            **stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
            "tie_word_embeddings": True,
            "head_dim": 12,
        },
    ),
    "llama-linear": Kind("Llama", stretched("linear")),
    "llama-biased": Kind("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tiny-llama": Kind("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "smol-lm": Kind("Llama", {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "mistral": Kind("Mistral", {"sliding_window": 9}),
    "mistral-v0.3": Kind("Mistral", {"sliding_window": None, "head_dim": 16}),
    "ministral": Kind(
        "Ministral",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    ),
    "gemma": Kind("Gemma", {"head_dim": 16}),
    "gemma-2": Kind("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20}),
    "gemma-3": Kind(
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma-3-scaled": Kind(
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 40000.0},
            },
        },
    ),
    "phi-3": Kind("Phi3", {"sliding_window": 9, "pad_token_id": None}),
    "phi-4-mini": Kind("Phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True, "pad_token_id": None}),
    "cwm": Kind(
        "Cwm",
        {
            **stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 9,
            "head_dim": 8,
        },
    ),
    "phi-2": Kind("Phi", {"partial_rotary_factor": 0.5}),
    "olmo-2": Kind("Olmo2"),
    "olmo-3": Kind(
        "Olmo3",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo-3-wide-windows": Kind(
        "Olmo3",
        {"sliding_window": 500, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": Kind(
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 4.0},
    ),
    "cohere": Kind("Cohere", {"logit_scale": 0.5, "pad_token_id": None}),
    "cohere-2": Kind(
        "Cohere2",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": None},
    ),
    "starcoder-2": Kind("Starcoder2", {"sliding_window": 9}),
    "stable-lm": Kind("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "glm": Kind("Glm", {"head_dim": 16, "pad_token_id": None}),
    "glm-4": Kind("Glm4", {"head_dim": 16, "pad_token_id": None}),
    "seed-oss": Kind("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "ernie-4.5": Kind("Ernie4_5", {"head_dim": 16}),
    "helium": Kind("Helium", {"head_dim": 8, "pad_token_id": None}),
    "exaone-4": Kind("Exaone4", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen-2": Kind("Qwen2"),
    "qwen-2-windows": Kind("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen-2.5-yarn": Kind("Qwen2", stretched("yarn", **YARN)),
    "qwen-3": Kind("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen-3-windows": Kind(
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "yarn-attention-factor": Kind("Llama", stretched("yarn", attention_factor=0.7, beta_fast=8.0, **YARN)),
    "yarn-mscale": Kind("Llama", stretched("yarn", mscale=1.3, mscale_all_dim=0.6, truncate=False, **YARN)),
    "mixtral": Kind("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen-3-moe": Kind(
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "head_dim": 16,
        },
    ),
    "qwen-3-moe-normalized": Kind(
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "phi-3-long": Kind(
        "Phi3",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 1.5, 3.0, 6.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama-dynamic": Kind("Llama", stretched("dynamic")),
    "cohere-qk-norm": Kind("Cohere", {"use_qk_norm": True, "pad_token_id": None}),
    "stable-lm-2-12b": Kind(
        "StableLm", {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25}
    ),
    "nemotron": Kind("Nemotron", {"partial_rotary_factor": 0.5}),
    "olmo": Kind("Olmo", {"clip_qkv": 0.8, "pad_token_id": None}),
    "olmoe": Kind("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.8, "pad_token_id": None}),
    "qwen-2-moe": Kind(
        "Qwen2Moe",
        {
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "granite-moe": Kind(
        "GraniteMoe", {"num_local_experts": 4, "embedding_multiplier": 6.0, "attention_multiplier": 0.2}
    ),
    "granite-moe-shared": Kind("GraniteMoeShared", {"num_local_experts": 4, "shared_intermediate_size": 24}),
    "glm-4.5": Kind(
        "Glm4Moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": Kind(
        "GptOss",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "swiglu_limit": 1.0,
            **stretched("yarn", truncate=False, **YARN),
        },
    ),
    "deepseek-v2": Kind(
        "DeepseekV2",
        {
            **LATENT,
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            **stretched("yarn", mscale=0.7, mscale_all_dim=0.9, **YARN),
        },
    ),
    "deepseek-v2-lite": Kind("DeepseekV2", {**LATENT, **DEEPSEEK, "q_lora_rank": None, "attention_bias": True}),
    "deepseek-v3": Kind(
        "DeepseekV3",
        {
            **LATENT,
            **DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            **stretched("yarn", mscale=1.0, mscale_all_dim=1.0, **YARN),
        },
    ),
    "deepseek-v3-halves": Kind(
        "DeepseekV3",
        {
            **LATENT,
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
    "minicpm-3": Kind("MiniCPM3", {**LATENT, "num_key_value_heads": 4, "scale_emb": 3, "dim_model_base": 24}),
    "glm-4.7-flash": Kind(
        "Glm4MoeLite",
        {
            **LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "mistral-4": Kind(
        "Mistral4",
        {
            **LATENT,
            **DEEPSEEK,
            "first_k_dense_replace": 1,
            **stretched(
                "yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.2, original_max_position_embeddings=9
            ),
        },
    ),
    "youtu": Kind("Youtu", LATENT),
    "dots-1": Kind("Dots1", {**DEEPSEEK, "first_k_dense_replace": 1, "sliding_window": 9, "max_window_layers": 1}),
    "hunyuan": Kind("HunYuanDenseV1", {"head_dim": 16, "pad_token_id": None, **stretched("dynamic", alpha=50.0)}),
    "hunyuan-moe": Kind("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16, "pad_token_id": None}),
    "ernie-4.5-moe": Kind(
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "minimax-m2": Kind(
        "MiniMaxM2", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "partial_rotary_factor": 0.5}
    ),
    "ministral-3": Kind(
        "Ministral3",
        {
            "head_dim": 16,
            "pad_token_id": None,
            **stretched(
                "yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5, original_max_position_embeddings=9
            ),
        },
    ),
    "arcee": Kind("Arcee", {"head_dim": 16}),
    "starcoder": Kind("GPTBigCode", {}),
    "starcoder-all-heads": Kind("GPTBigCode", {"multi_query": False}),
    "llama-4": Kind(
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 64,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
    "llama-4-two-experts": Kind(
        "Llama4",
        {
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "layer_types": ["full_attention", "chunked_attention"],
            "attention_chunk_size": 7,
        },
    ),
    "phi-moe": Kind(
        "Phimoe",
        {
            "num_local_experts": 4,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.2,
            "sliding_window": 9,
        },
    ),
    "phi-moe-long": Kind(
        "Phimoe",
        {
            "num_local_experts": 4,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
                "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
                "short_mscale": 1.1,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gpt-2": Kind("GPT2", {"n_inner": None}),
    "gpt-1": Kind("OpenAIGPT", {"n_embd": 64}),
    "gpt-neo": Kind("GPTNeo", {"attention_types": [[["global", "local"], 1]], "window_size": 9}),
    "codegen": Kind("CodeGen", {"rotary_dim": 4, "n_embd": 64}),
    "biogpt": Kind("BioGpt", {"num_attention_heads": 2}),
    "gpt-j": Kind("GPTJ", {"rotary_dim": 4}),
    "gpt-neox": Kind("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-serial": Kind("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "falcon-7b": Kind("Falcon", {"multi_query": True}),
    "falcon-40b": Kind("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-serial": Kind("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-alibi": Kind(
        "Falcon", {"multi_query": False, "alibi": True, "bias": True, "num_attention_heads": 6, "hidden_size": 48}
    ),
    "opt-350m": Kind(
        "OPT",
        {"word_embed_proj_dim": 20, "num_attention_heads": 2, "do_layer_norm_before": False, "pad_token_id": None},
    ),
    "opt-without-norms": Kind(
        "OPT",
        {
            "word_embed_proj_dim": 32,
            "_remove_final_layer_norm": True,
            "layer_norm_elementwise_affine": False,
            "pad_token_id": None,
        },
    ),
    "opt": Kind("OPT", {"word_embed_proj_dim": 32, "pad_token_id": None}),
    "bloom": Kind("Bloom"),
    "bloom-6-heads": Kind("Bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt": Kind("Mpt"),
    "dbrx": Kind(
        "Dbrx",
        {
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 0.3, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "ax-k1": Kind(
        "AXK1",
        {**LATENT, **DEEPSEEK, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "aria": Kind("AriaText", {**TWO_HEADS, "moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 32}),
    "flint": Kind(
        "Flint",
        {
            **SPARSE_SIZES,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 9,
            "mlp_only_layers": [0],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "kolibri": Kind(
        "Kolibri1",
        {
            **SPARSE_SIZES,
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "xglm": Kind("XGLM"),
    "modern-bert": Kind("ModernBertDecoder", {**MODERN_BERT, "num_hidden_layers": 3, "classifier_bias": True}),
    "modern-bert-biased": Kind(
        "ModernBertDecoder", {**MODERN_BERT, "norm_bias": True, "mlp_bias": True, "decoder_bias": False}
    ),
    "neox-japanese": Kind("GPTNeoXJapanese"),
    "phi-4-multimodal": Kind(
        "Phi4Multimodal",
        {
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "vision_config": ENCODER,
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_blocks": 1,
                "nemo_conv_channels": 16,
                "ext_pw_out_channel": 16,
            },
        },
    ),
    "cohere-compass": Kind(
        "CohereCompass",
        {
            "pad_token_id": None,
            "logit_scale": 0.5,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]},
                "full_attention": None,
            },
        },
    ),
    "gemma-3n": Kind(
        "Gemma3n",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": [56, 40, 56, 56],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE - 5,
            "activation_sparsity_pattern": [0.7, 0.0, 0.7, 0.0],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 4,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 40000.0},
            },
        },
    ),
    "gemma-4": Kind(  # as E2B: keys of other layers, wider feed-forward layers, embeddings of each layer's own
        "Gemma4",
        {
            **GEMMA_4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma-4-moe": Kind(  # as 26B-A4B
        "Gemma4",
        {
            **GEMMA_4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_hidden_layers": 3,
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "attention_bias": True,
        },
    ),
    "gemma-4-unified": Kind("Gemma4Unified", {**GEMMA_4_HEADS, "num_hidden_layers": 3}),
    "apertus": Kind("Apertus", {"head_dim": 16, **stretched("llama3", **LLAMA_3_FACTORS), "pad_token_id": None}),
    "hyperclova-x": Kind(
        "HyperCLOVAX",
        {
            "head_dim": 16,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.3,
        },
    ),
    "hyperclova-x-before": Kind("HyperCLOVAX", {"use_post_norm": False}),
    "vault-gemma": Kind("VaultGemma", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20}),
    "nanochat": Kind("NanoChat", {**TWO_HEADS, "final_logit_softcapping": 3.0, "pad_token_id": None}),
    "jais-2": Kind("Jais2"),
    "bitnet": Kind("BitNet"),
    "persimmon": Kind("Persimmon", {"num_attention_heads": 2}),
    "granite-swa": Kind(
        "GraniteSWA",
        {
            **TWO_HEADS,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "layer_rope_theta": [0, 5000.0, 5000.0],
            "sliding_window": 9,
            "attention_multiplier": 0.2,
            "pad_token_id": None,
        },
    ),
    "granite-moe-swa": Kind(
        "GraniteMoeSWA",
        {
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "layer_rope_theta": [5000.0, 9000.0],
            "sliding_window": 9,
            "attention_multiplier": 0.2,
        },
    ),
    "solar-open": Kind(
        "SolarOpen",
        {**DEEPSEEK, "head_dim": 16, "n_group": 4, "topk_group": 2, "attention_bias": True, "intermediate_size": 56},
    ),
    "exaone-moe": Kind(
        "ExaoneMoe",
        {
            **SPARSE,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "n_group": 4,
            "topk_group": 2,
            "pad_token_id": None,
        },
    ),
    "afmoe": Kind(
        "Afmoe",
        {
            **SPARSE,
            "head_dim": 16,
            "sliding_window": 9,
            "global_attn_every_n_layers": 2,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "hy-3": Kind("HYV3", {**SPARSE, "head_dim": 16, "router_scaling_factor": 1.7}),
    "flex-olmo": Kind("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}),
    "mellum": Kind(
        "Mellum",
        {
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "sliding_window": 9,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {"rope_type": "yarn", "rope_theta": 40000.0, "factor": 4.0, **YARN},
            },
        },
    ),
    "laguna": Kind(
        "Laguna",
        {
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 1.7,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_attention_heads_per_layer": [2, 4, 4],
            "sliding_window": 9,
        },
    ),
    "mimo-v2": Kind(
        "MiMoV2Flash",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.3,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.334},
            },
        },
    ),
    "longcat": Kind(
        "LongcatFlash",
        {
            **LATENT,
            "num_layers": 2,
            "ffn_hidden_size": 56,
            "head_dim": 8,
            "moe_topk": 4,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "expert_ffn_hidden_size": 32,
            "routed_scaling_factor": 1.6,
        },
    ),
    "step-3.7": Kind(
        "Step3p7",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_sliding_attention_heads": 6,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "share_expert_dim": 40,
            "moe_router_scaling_factor": 1.7,
            "swiglu_limits": [0.0, 0.0, 0.4, 0.0],
            "swiglu_limits_shared": [0.0, 0.3, 0.0, 0.5],
            "query_pre_attn_scalar": 20,
            "rope_theta": [50000.0, 1000.0, 1000.0, 50000.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "rope_scaling": {"rope_type": "llama3", "factor": 2.0, **LLAMA_3_FACTORS},
        },
    ),
    "cohere-2-moe": Kind(
        "Cohere2Moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "intermediate_size": 32,
            "prefix_dense_intermediate_size": 40,
            "num_experts": 6,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "pad_token_id": None,
        },
    ),
    "cohere-2-moe-rms": Kind(
        "Cohere2Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "rms_norm_eps": 1e-4,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 9,
            "pad_token_id": None,
        },
    ),
    "smol-lm-3": Kind("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": None}),
}


MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12}
NEMOTRON_H = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 6,
    "chunk_size": 16,
    "head_dim": 16,
    "time_step_min": 0.2,
    "pad_token_id": None,
}
QWEN_3_5 = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
INDEXED = {**LATENT, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 9}  # ties of so many heads are rare
QWEN_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "linear_attention"],
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1, 4],
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 53,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 3,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "pad_token_id": None,
}
AX_K2 = {**INDEXED, **DEEPSEEK, "gated_norm_rank": 6, "mlp_layer_types": ["dense", "sparse", "sparse"]}
SPARSE_KINDS = {  # with attention to the tokens that an indexer chooses
    "deepseek-v3.2": Kind(
        "DeepseekV32",
        {
            **INDEXED,
            **DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            **stretched("yarn", mscale=0.8, mscale_all_dim=1.0, **YARN),
        },
    ),
    "glm-5": Kind(
        "GlmMoeDsa",
        {
            **INDEXED,
            **DEEPSEEK,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    ),
    "dots-3": Kind("Dots3Note", {**INDEXED, **DOTS}),
    "qwen-4": Kind("Qwen4Exp", QWEN_4),
    "qwen-4-plain": Kind(
        "Qwen4Exp",
        {
            **QWEN_4,
            "ple_layer_ids": None,
            "output_gate_type": "sigmoid",
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_hidden_layers": 3,
            "hc_count": 2,
        },
    ),
    "ax-k2": Kind("AXK2", AX_K2),
    "ax-k2-groups": Kind(
        "AXK2",
        {
            **AX_K2,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            **stretched("yarn", mscale_all_dim=1.0, **YARN),
        },
    ),
    "hy-4": Kind(
        "HYV4",
        {
            **INDEXED,
            **DEEPSEEK,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "hc_mult": 3,
            "swiglu_limit": 1.0,
            "pad_token_id": None,
        },
    ),
    "glm-5.3": Kind(
        "Glm5Next",
        {
            "text_config": {
                **PLAIN,
                **INDEXED,
                **DEEPSEEK,
                "num_hidden_layers": 4,
                "qk_rope_head_dim": 0,
                "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
                "indexer_types": ["full", "full", "shared", "full"],
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
                "index_kpool": 4,
                "index_topk": 8,
                "linear_num_heads": 4,
                "linear_head_dim": 8,
                "linear_lower_bound": -1.0,
                "hc_mult": 2,
                "swiglu_limit": 1.0,
                "pad_token_id": None,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 32,
                "projection_intermediate_size": 16,
                "patch_size": 2,
                "image_size": 8,
            },
        },
    ),
    "mistral-large-4": Kind(
        "MistralLarge4",
        {
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.4,
            "first_k_dense_replace": 2,
            "no_rope_layers": [1, 1, 0, 1, 0],
            "kv_source_layers": [0, 1, 2, 1, 2],
            "indexer_types": ["full", "full", "shared", "full", "full"],
            "index_topk": 7,
            "index_head_dim": 12,
            "index_n_heads": 8,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.0,
            },
        },
    ),
    "minimax-m3": Kind(
        "MiniMaxM3VL",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "intermediate_size": 32,
            "dense_intermediate_size": 56,
            "shared_intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "swiglu_limit": 0.8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 12,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
        },
    ),
}
COMPRESSED_KINDS = {  # with attention to entries that stand for several tokens
    "deepseek-v4": Kind(
        "DeepseekV4",
        {
            **DEEPSEEK,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "n_shared_experts": 1,
            "swiglu_limit": 1.0,
            "head_dim": 16,
            "q_lora_rank": 20,
            "partial_rotary_factor": 0.5,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
            "sliding_window": 7,
            "o_groups": 2,
            "o_lora_rank": 12,
            "index_n_heads": 16,
            "index_head_dim": 12,
            "index_topk": 3,
            "hc_mult": 3,
            **stretched("yarn", **YARN),
            "pad_token_id": None,
        },
    ),
}
KIMI = {
    **{key: value for key, value in LATENT.items() if key != "q_lora_rank"},
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
    "pad_token_id": None,
}
HYBRID_SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}  # as the CPU kernels know
ZAMBA_2 = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "adapter_rank": 4,
    "chunk_size": 8,
    "rms_norm_eps": 1e-5,
}
LFM_3 = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "sliding_window": 9,
    "pad_token_id": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 40000.0},
    },
}
HYBRID_KINDS = {  # with recurrent layers
    "mamba-2": Kind("Mamba2"),
    "mamba-2-groups": Kind("Mamba2", {"n_groups": 4}),
    "mamba-2-biased": Kind("Mamba2", {"use_bias": True, "tie_word_embeddings": True, "time_step_limit": (0.2, 0.9)}),
    "mamba": Kind("Mamba", {"num_hidden_layers": 2}),
    "falcon-mamba": Kind("FalconMamba", {"mixer_rms_eps": 1e-3, "use_bias": True}),
    "lfm-2-moe": Kind(
        "Lfm2Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            "pad_token_id": None,
        },
    ),
    "lfm-2": Kind(
        "Lfm2",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "pad_token_id": None},
    ),
    "lfm-2-biased": Kind(
        "Lfm2",
        {"full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 5, "block_multiple_of": 8, "pad_token_id": None},
    ),
    "lfm-3": Kind("Lfm3", LFM_3),
    "lfm-3-biased": Kind(
        "Lfm3",
        {
            **LFM_3,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "conv_L_cache": 3,
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "tie_word_embeddings": False,
        },
    ),
    "qwen-3-next": Kind(
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen-3.5": Kind("Qwen3_5", QWEN_3_5),
    "qwen-3.5-moe": Kind(
        "Qwen3_5Moe",
        {
            **QWEN_3_5,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "olmo-hybrid": Kind(
        "OlmoHybrid",
        {
            "num_hidden_layers": 3,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "olmo-hybrid-rotated": Kind(
        "OlmoHybrid",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_allow_neg_eigval": False,
            "pad_token_id": None,
        },
    ),
    "nemotron-h": Kind(
        "NemotronH",
        {**NEMOTRON_H, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "mlp_bias": True},
    ),
    "nemotron-h-moe": Kind(
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_bias": True,
            "attention_bias": False,
        },
    ),
    "granite-4-hybrid": Kind(
        "GraniteMoeHybrid",
        {
            **MAMBA_2,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "granite-4-dense": Kind(
        "GraniteMoeHybrid",
        {
            **MAMBA_2,
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1": Kind(
        "FalconH1",
        {
            **MAMBA_2,
            "mamba_d_ssm": 64,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 1.2],
            "mlp_multipliers": [0.8, 0.7],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
            "attention_bias": True,
            "pad_token_id": None,
        },
    ),
    "falcon-h1-norm": Kind(
        "FalconH1",
        {
            **MAMBA_2,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mlp_bias": True,
            "pad_token_id": None,
        },
    ),
    "falcon-h1-early-norm": Kind(
        "FalconH1", {**MAMBA_2, "mamba_d_ssm": 64, "mamba_rms_norm": True, "pad_token_id": None}
    ),
    "bamba": Kind("Bamba", {**MAMBA_2, "num_hidden_layers": 3, "attn_layer_indices": [1], "pad_token_id": None}),
    "jamba": Kind(
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "num_experts": 4,
            "mamba_d_state": 6,
            "mamba_proj_bias": True,
            "pad_token_id": None,
        },
    ),
    "kimi-linear": Kind(
        "KimiLinear",
        {
            **KIMI,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 12,
            "routed_scaling_factor": 0.8,
            "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "ling-3": Kind(
        "BailingHybrid",
        {
            **KIMI,
            "head_dim": 12,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "kda_lower_bound": -2.0,
        },
    ),
    "ling-3-softplus": Kind(
        "BailingHybrid",
        {
            **KIMI,
            "head_dim": 8,
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
            "n_group": 1,
            "topk_group": 1,
            "kda_safe_gate": False,
        },
    ),
    "minimax-01": Kind(
        "MiniMax",
        {
            "num_hidden_layers": 3,
            # The last one attends: transformers has a slightly other decay there than the original code.
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "block_size": 16,
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.6,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.8,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.5,
            "pad_token_id": None,
        },
    ),
    "recurrent-gemma": Kind(
        "RecurrentGemma",
        {
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 9,
            "num_key_value_heads": 1,
            "lru_width": 48,
            "pad_token_id": None,
        },
    ),
    "rwkv": Kind("Rwkv", {"intermediate_size": 56}),
    "zamba-2": Kind(
        "Zamba2",
        {
            **ZAMBA_2,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "mamba_ngroups": 2,
        },
    ),
    "zamba-2-unrotated": Kind("Zamba2", {**ZAMBA_2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}),
    "nemotron-h-latent": Kind(
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 64,  # as experts of the CPU kernels are multiples of 32
        },
    ),
    "jamba-dense": Kind(
        "Jamba", {"num_experts": 1, "attn_layer_period": 4, "attn_layer_offset": 1, "pad_token_id": None}
    ),
}
KINDS_OF_ALL = {**KINDS, **HYBRID_KINDS, **SPARSE_KINDS, **COMPRESSED_KINDS}


def tiny_config(kind: str, **changes: Any) -> Any:
    """The configuration of a tiny network."""
    sizes = OTHER_SIZES.get(KINDS_OF_ALL[kind].family, TINY)
    if kind in HYBRID_KINDS and "num_attention_heads" in sizes:
        sizes = {**sizes, **HYBRID_SIZES}
    options = {**sizes, **KINDS_OF_ALL[kind].options, **changes}
    if "text_config" in options:
        options["text_config"] = {**options["text_config"], **changes}
    if "rope_parameters" in options:
        del options["rope_theta"]
    family = KINDS_OF_ALL[kind].family
    options |= {"bos_token_id": 1, "eos_token_id": 2}
    if family in PICTURES:
        return config_class(family)(text_config=options, vision_config=PICTURES[family])
    return config_class(family)(**options)


def config_of(kind: str) -> dict[str, Any]:
    """The contents of its config.json."""
    family = KINDS_OF_ALL[kind].family
    return {**tiny_config(kind).to_dict(), "architectures": [MODEL_CLASSES.get(family, f"{family}ForCausalLM")]}


def reference(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random network of transformers; its weights lie far enough apart that choices are no matter of rounding."""
    torch.manual_seed(seed)
    family = KINDS_OF_ALL[kind].family
    skip_older_norms(kind, {**KINDS_OF_ALL[kind].options, **changes})
    model = model_class(family)(tiny_config(kind, **changes)).eval().requires_grad_(False)
    random_weights(model, middle=0.0 if family in ZERO_CENTERED else 1.0)
    if family == "HYV4":
        rotate_pairs()
    return as_configured(model)


def skip_older_norms(kind: str, options: dict[str, Any]) -> None:
    """Skip the test where groups of Mamba 2 have one norm for all of them: transformers before 5.23."""
    import transformers

    family, groups = KINDS_OF_ALL[kind].family, options.get("n_groups", options.get("mamba_n_groups", 1))
    if family in ONE_NORM and groups > 1 and is_older(transformers.__version__, HAS_ALL_FAMILIES):
        pytest.skip(f"transformers {transformers.__version__} has one norm for all groups of {family}")


def rotate_pairs() -> None:
    """Let transformers rotate coordinates of Hy 4 that lie side by side, as the original code does; it has halves."""
    from transformers.models.hy_v4 import modeling_hy_v4

    original = modeling_hy_v4.apply_rotary_pos_emb

    def rotated(q: Any, k: Any, *angles: Any, **options: Any) -> Any:
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        return original(q, k, *angles, **options)

    if original.__name__ != rotated.__name__:
        modeling_hy_v4.apply_rotary_pos_emb = rotated


def random_weights(model: Any, middle: float = 1.0) -> None:
    """Weights that lie far enough apart; `middle` is that of the weights of norms."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, middle - 0.5, middle + 0.5)
        else:
            # Blocks that read two hidden states would attend to one token only.
            std = 0.1 if parameter.dim() == 1 or "shared_transformer" in name else 0.3
            torch.nn.init.normal_(parameter, std=std)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), DEEPSEEK["n_routed_experts"]).argsort()[:, : buffer.shape[1]])
        if name.endswith(("correction_bias", "expert_bias", "rotary_emb.alpha")):
            torch.nn.init.normal_(buffer, std=0.3)


def model_class(family: str) -> Any:
    transformers = import_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of its files use what torch no longer recommends
        return class_of(transformers, MODEL_CLASSES.get(family, f"{family}ForCausalLM"))


def import_transformers() -> Any:
    """The package; without a torchvision of another build than torch's, which its modules could not import."""
    import transformers
    from transformers import utils
    from transformers.utils import import_utils

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for module in (utils, import_utils):
            module.is_torchvision_available = lambda: False
    return transformers


def config_class(family: str) -> Any:
    transformers = import_transformers()
    if family.endswith("Text"):
        return class_of(transformers, f"{family}Config")
    return class_of(transformers, f"{family}TextConfig" if family in TEXT_CONFIGS else f"{family}Config")


def class_of(transformers: Any, name: str) -> Any:
    """A class of the package; skips the test where the package is too old to have it."""
    if not hasattr(transformers, name) and is_older(transformers.__version__, HAS_ALL_FAMILIES):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def is_older(version: str, than: tuple[int, int]) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) < than


def write_checkpoint(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A folder as transformers writes it, and the network it was written from; `changes` are of its configuration."""
    options = {key: changes.pop(key) for key in [*changes] if key in SAVE_OPTIONS}
    model = reference(kind, **changes).to(dtype)
    model.save_pretrained(folder, **options)
    return model


def read_checkpoint(folder: Path) -> Any:
    """A folder as transformers reads it, in float32."""
    import transformers

    return as_configured(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def as_configured(model: Any) -> Any:
    """A network with what transformers 5.17 leaves out: softcaps in its fused attention, and limits of gpt-oss."""
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = model.config.swiglu_limit
    return model
