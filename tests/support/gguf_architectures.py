"""The architectures of GGUF files: kinds of networks of `support.checkpoints`, and the values of their headers.

They are those that llama.cpp's converter writes for these networks.
"""

from __future__ import annotations

import math
from typing import Any

from support.checkpoints import HYBRID_KINDS, tiny_config

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
LATENT = {
    "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 10,
    "rope.dimension_count": 8,
}
DEEPSEEK = {
    **LATENT,
    **YARN,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.7,
}
MSCALES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GLM_EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "nextn_predict_layers": 1,
}
SCALES = {"attention.scale": 0.2, "embedding_scale": 6.0, "residual_scale": 1.0, "logit_scale": 1.0}
WINDOWS = {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]}
EIGHT_EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 32,
}
GEMMA_WINDOWS = {
    "attention.sliding_window": 9,
    "attention.sliding_window_pattern": [True, False, True, False],
    "rope.freq_base_swa": 5000.0,
}
GEMMA_4_HEADS = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
}
HALF = {"rope.dimension_count": 4}
LONG_ROPE = {
    "rope.scaling.attn_factor": 1.3228756,
    "rope.scaling.original_context_length": 16,
    "rope.dimension_count": 8,
    "attention.sliding_window": 0,
}
MAMBA = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 6}
MAMBA_2 = {**MAMBA, "ssm.state_size": 12, "ssm.time_step_rank": 8, "ssm.group_count": 1}
DENSE_JAMBA = {"expert_count": 1, "expert_used_count": 2}
GRANITE_4 = {
    "rope.dimension_count": 8,
    "rope.scaling.finetuned": False,
    "expert_shared_feed_forward_length": 24,
    "expert_used_count": 2,
}
NEMOTRON_H = {
    **MAMBA_2,
    "ssm.state_size": 6,
    "ssm.group_count": 2,
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "rope.dimension_count": 8,
    "rope.scaling.finetuned": False,
}
DELTA_NET = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 72,
    "attention.recurrent_layers": [True, False, True, False],
    "full_attention_interval": 4,
    "nextn_predict_layers": 1,
}
DELTA_NET_EXPERTS = {
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
}
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0], "rope.dimension_count": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss", {**YARN, "expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 9}),
    "deepseek-v2": ("deepseek2", {**DEEPSEEK, "rope.scaling.yarn_log_multiplier": 0.09}),
    "deepseek-v3": (
        "deepseek2",
        {**DEEPSEEK, "expert_weights_norm": True, "rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "youtu": ("deepseek2", {**LATENT, "leading_dense_block_count": 2, "expert_shared_count": 0}),
    "minicpm-3": (
        "minicpm3",
        {
            "attention.q_lora_rank": 20,
            "attention.kv_lora_rank": 24,
            "attention.key_length": 20,
            "rope.dimension_count": 8,
        },
    ),
    "glm-4.5": ("glm4moe", {**GLM_EXPERTS, "rope.dimension_count": 8}),
    "glm-4": ("glm4", {"rope.dimension_count": 8}),
    "cohere": ("command-r", {"logit_scale": 0.5, "rope.scaling.type": "none"}),
    "cohere-qk-norm": ("command-r", {"logit_scale": 0.0625, "rope.scaling.type": "none"}),
    "cohere-2": ("cohere2", {"logit_scale": 0.0625, "attention.sliding_window": 9}),
    "starcoder-2": ("starcoder2", {}),
    "stable-lm-2-12b": ("stablelm", {"rope.dimension_count": 2, "use_parallel_residual": True}),
    "stable-lm": ("stablelm", {**HALF, "use_parallel_residual": False}),
    "phi-2": ("phi2", HALF),
    "phi-4-mini": ("phi3", {**HALF, "rope.scaling.original_context_length": 4096, "attention.sliding_window": 0}),
    "nemotron": ("nemotron", {**HALF, "attention.layer_norm_rms_epsilon": 1e-5}),
    "olmo": ("olmo", {"attention.clamp_kqv": 0.8}),
    "olmoe": ("olmoe", {"expert_count": 6, "expert_used_count": 3}),
    "olmo-3": ("olmo2", {**WINDOWS, "rope.freq_base_swa": 5e5}),
    "granite-moe": ("granitemoe", {**SCALES, "expert_count": 4, "expert_used_count": 2}),
    "granite-moe-shared": (
        "granitemoe",
        {
            **dict.fromkeys(SCALES, 1.0),
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 24,
        },
    ),
    "seed-oss": ("seed_oss", {}),
    "ernie-4.5": ("ernie4_5", {}),
    "ernie-4.5-moe": (
        "ernie4_5-moe",
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 24,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 28,
        },
    ),
    "exaone-4": ("exaone4", WINDOWS),
    "hunyuan": ("hunyuan-dense", {}),
    "hunyuan-moe": (
        "hunyuan-moe",
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 56,
            "expert_shared_feed_forward_length": 56,
            "expert_shared_count": 1,
        },
    ),
    "dots-1": (
        "dots1",
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_feed_forward_length": 32,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": False,
        },
    ),
    "arcee": ("arcee", {"rope.dimension_count": 16}),
    "llama-4": (
        "llama4",
        {
            "expert_count": 4,
            "expert_used_count": 1,
            "interleave_moe_layer_step": 2,
            "feed_forward_length": 40,
            "expert_feed_forward_length": 64,
        },
    ),
    "minimax-m2": (
        "minimax-m2",
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 56,
            "rope.dimension_count": 8,
            "expert_gating_func": 2,
        },
    ),
    "llama-2": ("internlm2", {}),
    "gpt-2": ("gpt2", {}),
    "gpt-neox": ("gptneox", {**HALF, "use_parallel_residual": True}),
    "bloom": ("bloom", {}),
    "falcon-7b": ("falcon", {"attention.head_count_kv": 1, "tensor_data_layout": "jploski"}),
    "falcon-40b": ("falcon", {"attention.head_count_kv": 2, "tensor_data_layout": "jploski"}),
    "mpt": ("mpt", {"attention.max_alibi_bias": 8.0}),
    "starcoder": ("starcoder", {"attention.head_count_kv": 1}),
    "glm": ("chatglm", {"rope.dimension_count": 4}),
    "phi-moe": ("phimoe", {"expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 0}),
    "phi-moe-long": ("phimoe", {"expert_count": 4, "expert_used_count": 2, **LONG_ROPE}),
    "phi-3-long": ("phi3", LONG_ROPE),
    "ministral-3": (
        "mistral3",
        {
            **YARN,
            "rope.scaling.original_context_length": 9,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.5,
        },
    ),
    "granite": (
        "minicpm",
        {"embedding_scale": 6.0, "residual_scale": 0.5, "logit_scale": 4.0, "rope.dimension_count": 8},
    ),
    "llama-3": ("exaone", {"rope.dimension_count": 8}),
    "tiny-llama": ("xverse", {"rope.dimension_count": 8}),
    "qwen-2": ("qwen2vl", {"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen-3": ("qwen3vl", {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}),
    "qwen-3-moe-normalized": (
        "qwen3vlmoe",
        {
            "rope.dimension_sections": [2, 1, 1, 0],
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
        },
    ),
    # with experts
    "afmoe": (
        "afmoe",
        {
            **EIGHT_EXPERTS,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.7,
            "attention.sliding_window": 9,
            "rope.dimension_count": 16,
        },
    ),
    "exaone-moe": (
        "exaone-moe",
        {
            **EIGHT_EXPERTS,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_shared_feed_forward_length": 64,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "leading_dense_block_count": 1,
            "nextn_predict_layers": 1,
            "rope.scaling.type": "none",
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "solar-open": (
        "glm4moe",
        {
            **EIGHT_EXPERTS,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.7,
            "rope.dimension_count": 16,
        },
    ),
    "mistral-4": (
        "mistral4",
        {
            **{key: value for key, value in DEEPSEEK.items() if "group" not in key},
            "attention.temperature_scale": 0.2,
            "attention.temperature_length": 9,
            "rope.scaling.original_context_length": 9,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "expert_weights_norm": True,
        },
    ),
    "glm-5": (
        "glm-dsa",
        {
            **{key: value for key, value in DEEPSEEK.items() if key not in YARN},
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_weights_norm": True,
            "nextn_predict_layers": 1,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 12,
            "attention.indexer.top_k": 9,
        },
    ),
    # of Gemma, and others whose layers differ
    "gemma-3n": (
        "gemma3n",
        {
            **GEMMA_WINDOWS,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
            "final_logit_softcapping": 5.0,
            "altup.active_idx": 1,
            "altup.num_inputs": 3,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8,
            "activation_sparsity_scale": [0.5244005, -math.inf, 0.5244005, -math.inf],
        },
    ),
    "gemma-4": (
        "gemma4",
        {
            **GEMMA_WINDOWS,
            **GEMMA_4_HEADS,
            "final_logit_softcapping": 5.0,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8,
            "feed_forward_length": [56, 56, 112, 112],
        },
    ),
    "gemma-4-moe": (
        "gemma4",
        {
            **GEMMA_WINDOWS,
            **GEMMA_4_HEADS,
            "attention.sliding_window_pattern": [True, False, False],
            "attention.shared_kv_layers": 0,
            "attention.head_count_kv": [4, 2, 2],
            "embedding_length_per_layer_input": 0,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
        },
    ),
    "apertus": ("apertus", {"rope.dimension_count": 16}),
    "jais-2": ("jais2", {"rope.dimension_count": 8}),
    "bitnet": ("bitnet", {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}),
    # with recurrent layers
    "kimi-linear": (
        "kimi-linear",
        {
            **{key: value for key, value in LATENT.items() if "q_lora" not in key},
            "attention.head_count_kv": [0, 1, 0],
            "ssm.conv_kernel": 4,
            "kda.head_dim": 12,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_shared_count": 2,
            "expert_feed_forward_length": 32,
            "expert_weights_scale": 0.8,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
    "mamba": ("mamba", {**MAMBA, "ssm.time_step_rank": 2, "ssm.dt_b_c_rms": False}),
    "falcon-mamba": ("mamba", {**MAMBA, "ssm.time_step_rank": 2, "ssm.dt_b_c_rms": True}),
    "mamba-2": ("mamba2", {**MAMBA, **MAMBA_2}),
    "jamba": (
        "jamba",
        {
            **MAMBA,
            "ssm.time_step_rank": 2,
            "attention.head_count_kv": [0, 2, 0, 2],
            "expert_count": 4,
            "expert_used_count": 2,
        },
    ),
    "jamba-dense": (
        "jamba",
        {**MAMBA, "ssm.state_size": 16, "ssm.time_step_rank": 2, "attention.head_count_kv": [0, 2], **DENSE_JAMBA},
    ),
    "lfm-2": ("lfm2", {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "feed_forward_length": 256}),
    "lfm-2-moe": (
        "lfm2moe",
        {
            "attention.head_count_kv": [0, 2, 0],
            "shortconv.l_cache": 3,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
        },
    ),
    "granite-4-hybrid": (
        "granitehybrid",
        {
            **MAMBA_2,
            **GRANITE_4,
            "attention.scale": 0.2,
            "embedding_scale": 6.0,
            "residual_scale": 0.5,
            "logit_scale": 4.0,
            "attention.head_count_kv": [0, 2, 0],
            "expert_count": 4,
        },
    ),
    "granite-4-dense": (
        "granitehybrid",
        {**MAMBA_2, **GRANITE_4, **dict.fromkeys(SCALES, 1.0), "attention.head_count_kv": [2, 0], "expert_count": 0},
    ),
    "granite-4-attention": ("granite", {**GRANITE_4, **dict.fromkeys(SCALES, 1.0), "rope.scaling.finetuned": True}),
    "bamba": (
        "granitehybrid",
        {
            **MAMBA_2,
            "attention.head_count_kv": [0, 2, 0],
            "rope.dimension_count": 4,
            "rope.scaling.finetuned": True,
        },
    ),
    "falcon-h1": ("falcon-h1", {**MAMBA_2, "ssm.group_count": 2}),
    "falcon-h1-norm": ("falcon-h1", {**MAMBA_2, "ssm.group_count": 2}),
    "nemotron-h": ("nemotron_h", {**NEMOTRON_H, "feed_forward_length": [0, 56, 0, 56, 0]}),
    "nemotron-h-latent": (
        "nemotron_h_moe",
        {
            **NEMOTRON_H,
            "moe_latent_size": 64,
            "feed_forward_length": [0, 24, 0],
            "attention.head_count_kv": [0, 0, 2],
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 40,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
        },
    ),
    "nemotron-h-moe": (
        "nemotron_h_moe",
        {
            **NEMOTRON_H,
            "feed_forward_length": [0, 24, 0, 24],
            "attention.head_count_kv": [0, 0, 2, 0],
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 40,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.7,
        },
    ),
    "qwen-3-next": ("qwen3next", {**DELTA_NET, **DELTA_NET_EXPERTS, "rope.dimension_count": 4}),
    "qwen-3.5": ("qwen35", {**DELTA_NET, **SECTIONS}),
    "qwen-3.5-moe": ("qwen35moe", {**DELTA_NET, **DELTA_NET_EXPERTS, **SECTIONS}),
}
ONE_GROUP = {"mamba_n_groups": 1}
SIZES = {  # of networks with recurrent layers, as the headers below have them
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
}
BASES = {"granite-4-attention": "granite-4-dense"}  # kinds that differ from others by their options
OPTIONS: dict[str, dict[str, Any]] = {  # of the network, where GGUF files cannot say otherwise
    "gpt-oss": {"swiglu_limit": 7.0},
    "deepseek-v2": {"rope_parameters": {**MSCALES, "mscale": 0.9, "mscale_all_dim": 0.9}},
    "minicpm-3": {"scale_emb": 12, "dim_model_base": 256},
    "cohere-2": {"layer_types": None, "sliding_window_pattern": 4, "num_hidden_layers": 4},
    "starcoder-2": {"sliding_window": None},
    "phi-2": {"num_key_value_heads": 4},
    "olmoe": {"clip_qkv": None},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hunyuan-moe": {"moe_intermediate_size": 56, "num_shared_expert": 1},
    "dots-1": {"sliding_window": None},
    "falcon-7b": {"num_kv_heads": 1},
    "glm": {"head_dim": 8},
    "granite": {"attention_multiplier": 8**-0.5},
    "phi-moe": {"router_jitter_noise": 0.01, "sliding_window": None},
    "phi-moe-long": {
        "router_jitter_noise": 0.01,
        "num_attention_heads": 4,
        "intermediate_size": 56,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.5, 3.0, 6.0],
            "long_factor": [1.0, 1.5, 3.0, 6.0],
            "short_mscale": 1.3228756,
            "long_mscale": 1.3228756,
            "original_max_position_embeddings": 16,
        },
    },
    "falcon-mamba": {"use_bias": False, "mixer_rms_eps": 1e-6},
    "mamba-2": {"n_groups": 1},  # transformers has one norm for all groups
    "lfm-2-moe": {"routed_scaling_factor": 1.0},
    "granite-4-hybrid": ONE_GROUP,
    "granite-4-dense": {**ONE_GROUP, "position_embedding_type": "nope"},
    "granite-4-attention": {"layer_types": ["full_attention"] * 2},
    "bamba": ONE_GROUP,
    "falcon-h1": {"attention_bias": False},
    "falcon-h1-norm": {"mamba_d_ssm": 64},
    "afmoe": {"global_attn_every_n_layers": 4, "num_hidden_layers": 4},
    "exaone-moe": {"first_k_dense_replace": 1},
    "gemma-3n": {"intermediate_size": 56},
    "gemma-4-moe": {"attention_bias": False},
    "bitnet": {"hidden_act": "silu", "tie_word_embeddings": True},
    "mistral-4": {"rope_interleave": True},
    "glm-5": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "kimi-linear": {"num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 32},
    "nemotron-h-latent": {"time_step_min": 0.001, "use_bias": False, "moe_intermediate_size": 32},
    "nemotron-h": {"time_step_min": 0.001},
    "nemotron-h-moe": {"time_step_min": 0.001, "use_bias": False},
    "qwen-3-next": {"mlp_only_layers": []},
    "llama-4": {
        "attention_chunk_size": 8192,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
}


def options_of(kind: str) -> dict[str, Any]:
    """Those of the network, with the sizes that the header has."""
    config = tiny_config(BASES.get(kind, kind))
    has_sizes = BASES.get(kind, kind) in HYBRID_KINDS and config.model_type not in ("mamba", "falcon_mamba", "mamba2")
    sizes = {name: size for name, size in SIZES.items() if hasattr(config, name)} if has_sizes else {}
    return sizes | OPTIONS.get(kind, {})
