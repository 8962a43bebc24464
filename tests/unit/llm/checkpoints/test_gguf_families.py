"""GGUF files of many architectures give the networks that transformers has for the same weights.

The values of the headers are those that llama.cpp's converter writes for these networks.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.gguf_families import ARCHITECTURES
from flambeau.llm.checkpoints.head_weights import load_mtp, read_mtp
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families import llama_like
from flambeau.llm.quantize.groups import GroupedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from support.checkpoints import HYBRID_KINDS, reference, tiny_config
from support.gguf_files import by_pairs, write_gguf
from support.ranks import logits_in_threads, run_as_threads
from support.sharded import load_part

IDS = torch.tensor([[3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93, 12, 77, 31, 8, 64]])
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
KINDS = {
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
OPTIONS = {  # of the network, where GGUF files cannot say otherwise
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
BY_PAIRS = (
    "arcee",
    "granite",
    "granitemoe",
    "granitehybrid",
    "olmo",
    "internlm2",
    "mistral3",
    "minicpm",
    "xverse",
    "baichuan",
)
MAMBA_1 = ("mamba", "jamba")
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")


def values_of(config, **more):
    """The header's values of a model of transformers."""
    if config.model_type == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    rms = getattr(config, "rms_norm_eps", None)
    layer = next((v for k in EPSILONS if (v := getattr(config, k, None)) is not None), 1e-5)
    is_rms = rms is not None or config.model_type in ("mamba", "mamba2", "falcon_mamba", "lfm2", "lfm2_moe")
    given = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + more.get("nextn_predict_layers", 0),
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": getattr(config, "num_attention_heads", 0),
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None)
        or getattr(config, "num_attention_heads", 0),
        f"attention.layer_norm_{'rms_' if is_rms else ''}epsilon": rms or layer,
        "context_length": getattr(config, "max_position_embeddings", 128),
        "vocab_size": config.vocab_size,
    }
    if "rope_theta" in rope:
        given["rope.freq_base"] = float(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        given["attention.key_length"] = given["attention.value_length"] = config.head_dim
    if more.get("attention.kv_lora_rank") and "attention.value_length" not in more:
        del given["attention.value_length"]  # older converters do not write it
    if "attention.layer_norm_rms_epsilon" in more:
        given["attention.layer_norm_epsilon"] = layer
    has_size = "expert_feed_forward_length" in more or "moe" in config.model_type or config.model_type == "jamba"
    if "expert_used_count" in more and not has_size:
        given["expert_feed_forward_length"] = config.intermediate_size
    return {**given, **more}


EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
HEAD_NORM = re.compile(r"^(.*_layernorm)\.norms\.(\d+)\.weight$")
STREAM = re.compile(r"^(model\.altup_(?:unembed_)?projections)\.(\d+)\.weight$")
EXPERT = re.compile(r"^(.*experts)\.(\d+)\.(\w+)\.weight$")


def tensors_of(model, folder, architecture):
    """The weights as the converter writes them, by the names that the package knows."""
    model.save_pretrained(folder)
    config, stored, stacks = model.config, load_file(folder / "model.safetensors"), {}
    found = {}
    for name, tensor in stored.items():
        if (one := HEAD_NORM.match(name)) or (one := STREAM.match(name)):
            stacks.setdefault(f"{one[1]}.weight", {})[int(one[2])] = tensor
        elif one := EXPERT.match(name):
            stacks.setdefault(stack_name(one), {})[int(one[2])] = tensor
        else:
            found |= arranged(name, tensor, config, architecture)
    return found | {name: torch.stack([one for _, one in sorted(parts.items())]) for name, parts in stacks.items()}


def stack_name(one):
    """The name of all experts of a layer; the package does not know all."""
    kinds = {"w1": "gate", "w2": "down", "w3": "up", "up_proj": "up", "down_proj": "down"}
    if ".feed_forward." in one[1] or ".mixer." in one[1]:
        return f"blk.{one[1].split('.')[2]}.ffn_{kinds.get(one[3], 'gate')}_exps.weight"
    return f"{one[1]}.{one[3]}.weight"


def arranged(name, tensor, config, architecture):
    """One tensor as the files of an architecture have it."""
    heads, start = getattr(config, "num_attention_heads", 0), name.rpartition(".")[0]
    if architecture == "kimi-linear" and (found := kimi_layer(name, tensor)) is not None:
        return found
    if architecture == "gemma3n":
        name = f"{name}.weight" if name.endswith("_scale") else name
    if architecture == "mistral4" and re.search(r"\.experts\.(gate_up|down)_proj$", name):
        return {f"{name}.weight": tensor}
    if name.endswith("_sub_norm.weight"):  # which the package does not know by this name
        return {f"blk.{name.split('.')[2]}.{name.split('.')[4]}.weight": tensor}
    if architecture == "gemma4" and (found := gemma_4_layer(name, tensor)) is not None:
        return found
    if (found := recurrent(name, tensor, config, architecture)) is not None:
        return found
    if ".q_proj." in name and architecture in BY_PAIRS:
        return {name: by_pairs(tensor, heads)}
    if ".k_proj." in name and architecture in BY_PAIRS:
        return {name: by_pairs(tensor, config.num_key_value_heads)}
    if architecture == "nemotron" and "norm" in name and name.endswith("weight"):
        return {name: tensor + 1}
    if ".kv_b_proj." in name and architecture in ("deepseek2", "mistral4", "glm-dsa", "kimi-linear"):
        keys, values = tensor.view(heads, -1, tensor.shape[1]).split([12, 10], dim=1)
        start = start.removesuffix("kv_b_proj")
        return {f"{start}k_b_proj.weight": keys.transpose(1, 2), f"{start}v_b_proj.weight": values}
    if name.endswith(("e_score_correction_bias", "moe_statics.e_score_correction_bias")):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}
    if name.endswith(".sinks"):
        return {f"{name}.weight": tensor}
    if re.search(r"\.experts\.(gate_up|down)_proj|\.(in|out)put_linear\.", name):
        return stacked(name, tensor, architecture, has_experts=getattr(config, "num_local_experts", 1) > 0)
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return {name: tensor.t()}
    if architecture == "bloom":
        name = name.removeprefix("transformer.")  # the package knows both, but not for all tensors
    if ".query_key_value." in name and architecture == "falcon":  # queries of a key-value head, its key and its value
        groups = tensor.unflatten(0, (config.num_kv_heads, -1, config.hidden_size // heads))
        return {name: torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])}
    if ".query_key_value." in name:  # queries, keys and values of a head lie side by side
        rows = tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1)
        return {name: rows.reshape(tensor.shape)}
    return {name: tensor}


def recurrent(name, tensor, config, architecture):
    """A tensor of a recurrent layer, or one that is arranged otherwise in files of networks that have such layers."""
    if architecture == "falcon-h1":
        name, tensor = name, tensor * falcon_h1_factor(name, config)
    if architecture in DELTA_NETS and name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: tensor + 1}
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        tensor = tensor.squeeze(1)
    elif name.endswith(".A_log"):
        tensor = -tensor.exp()
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith(".expert_bias"):
        return {name.replace(".expert_bias", ".expert_bias.bias"): tensor}
    elif not re.search(r"\.(mamba|mixer|linear_attn|conv)\.", name):
        return {name: tensor} if architecture == "falcon-h1" else None
    if architecture == "qwen3next" and ".in_proj_qkvz." in name:
        return ungrouped(name, tensor, config)
    if architecture in ("qwen35", "qwen35moe"):
        return {name: tiled(name, tensor, config)}
    if name.endswith((".A_log", ".D")) and architecture not in (*MAMBA_1, *DELTA_NETS):
        tensor = tensor.unsqueeze(-1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        groups = next(value for key in ("n_groups", "mamba_n_groups") if (value := getattr(config, key, None)))
        tensor = tensor.view(groups, -1)
    if architecture.startswith("nemotron_h") and re.search(r"\.mixer\.(experts|gate|shared_experts)\b", name):
        return None
    return {
        name.replace("model.layers.", "backbone.layers.") if architecture.startswith("nemotron_h") else name: tensor
    }


def kimi_layer(name, tensor):
    """A tensor of a layer with delta attention."""
    if name.endswith("_conv1d.weight"):
        return {name: tensor.reshape(1, -1, 1, tensor.shape[-1])}
    if name.endswith(".A_log"):
        return {name: -tensor.exp()}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}
    return None


def gemma_4_layer(name, tensor):
    """Factors of experts, of what chooses them and of a whole layer."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if name.endswith("router.scale"):
        return {f"blk.{layer[1]}.ffn_gate_inp.scale": tensor}
    if name.endswith("per_expert_scale"):
        return {f"blk.{layer[1]}.ffn_down_exps.scale": tensor}
    ends = (".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")
    return {f"{name}.weight": tensor} if name.endswith(ends) else None


def falcon_h1_factor(name, config):
    """What the converter multiplies weights of Falcon H1 with."""
    gate, down = config.mlp_multipliers or (1.0, 1.0)
    inputs = config.attention_in_multiplier
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * inputs,
        "q_proj": inputs,
        "v_proj": inputs,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if ".in_proj." in name:
        groups = config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads])
        parts = torch.tensor(config.ssm_multipliers or [1.0] * 5).repeat_interleave(sizes)
        return config.ssm_in_multiplier * parts.unsqueeze(1)
    return factors.get(name.split(".")[-2], 1.0)


def ungrouped(name, tensor, config):
    """Queries, keys, values and gates one after the other, instead of by key head."""
    shared = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, shared, shared]
    parts = tensor.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1)
    q, k, v, gate = (part.flatten(0, 1) for part in parts)
    start = f"blk.{name.split('.')[2]}"
    return {f"{start}.attn_qkv.weight": torch.cat((q, k, v)), f"{start}.attn_gate.weight": gate}


def tiled(name, tensor, config):
    """Value heads of Qwen 3.5: the first of each key head, then the second of each, and so on."""
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    if name.endswith("norm.weight"):
        return tensor
    if name.endswith(".out_proj.weight"):
        return tiled("", tensor.t(), config).t()
    if ".in_proj_qkv." in name or ".conv1d." in name:
        values = tensor[-heads * size :]
        return torch.cat((tensor[: -heads * size], tiled("", values, config)))
    return tensor.unflatten(0, (keys, heads // keys, -1)).transpose(0, 1).reshape(tensor.shape)


def stacked(name, tensor, architecture, *, has_experts):
    """Experts whose gates are in one tensor with the rest, in one of three arrangements."""
    start, _, leaf = name.rpartition(".")
    if architecture.startswith("granite"):
        mlp = ".mlp.shared_experts" if has_experts else ".mlp"
        if ".output_linear" in name:
            return {name.replace(".shared_mlp.output_linear", f"{mlp}.down_proj"): tensor}
        prefix, (gate, up) = name.split(".input_linear")[0], tensor.chunk(2, dim=-2)
        if "shared_mlp" in name:
            prefix = prefix.replace(".shared_mlp", mlp)
            return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        return {f"{prefix}.experts.gate.weight": gate, f"{prefix}.experts.up.weight": up}
    kind = "bias" if leaf.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.transpose(-1, -2)
    if leaf.startswith("down_proj"):
        return {f"{start}.down_proj.{kind}": tensor}
    alternates = architecture == "gpt-oss"
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if alternates else tensor.chunk(2, dim=1)
    return {f"{start}.gate_proj.{kind}": gate, f"{start}.up_proj.{kind}": up}


def options_of(kind):
    """Those of the network, with the sizes that the header has."""
    config = tiny_config(BASES.get(kind, kind))
    has_sizes = BASES.get(kind, kind) in HYBRID_KINDS and config.model_type not in ("mamba", "falcon_mamba", "mamba2")
    sizes = {name: size for name, size in SIZES.items() if hasattr(config, name)} if has_sizes else {}
    return sizes | OPTIONS.get(kind, {})


def write(tmp_path, kind, quantized="F32", **changes):
    architecture, values = KINDS[kind]
    model = reference(BASES.get(kind, kind), **options_of(kind) | changes)
    if "n_groups" in changes:
        values = values | {"ssm.group_count": changes["n_groups"]}
    tensors = tensors_of(model, tmp_path / "folder", architecture)
    tensors |= positions_of(model, architecture)
    if "rope.scaling.attn_factor" in values:
        tensors |= {f"rope_factors_{name}.weight": factors(model, name) for name in ("long", "short")}
    path, extra = tmp_path / "gguf" / "model.gguf", {}
    if architecture == "apertus":
        tensors, extra = without_activations(tensors)
    header = values_of(model.config, **values)
    return model, path, write_gguf(path, architecture, tensors, header, quantized, plain=extra)


def positions_of(model, architecture):
    """Divisors of frequencies: of Llama 3, or of the parts of Gemma 4's heads that are not rotated."""
    if architecture == "gemma4":
        return {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)}
    if architecture == "apertus":
        plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        return {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq}
    return {}


def without_activations(tensors):
    """The tensors of Apertus without those of its activation, which are in the header."""
    values = {}
    for name, value in tensors.items():
        if ".act_fn." in name:
            values.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(value.float().item())
    return {name: value for name, value in tensors.items() if ".act_fn." not in name}, values


@pytest.mark.parametrize(("kind", "layer"), [("glm-4.5", 2), ("qwen-3.5-moe", 1)])
def test_layers_that_predict_further_tokens_are_read(tmp_path, kind, layer):
    """Here they are a copy of another layer."""
    architecture, values = KINDS[kind]
    model = reference(BASES.get(kind, kind), **options_of(kind))
    tensors, generator = tensors_of(model, tmp_path / "folder", architecture), torch.Generator().manual_seed(4)
    number = model.config.get_text_config().num_hidden_layers
    old, start = f"model.layers.{layer}.", f"blk.{number}."
    own = {name.replace(old, f"model.layers.{number}."): x.clone() for name, x in tensors.items() if old in name}
    own |= {f"{start}nextn.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head_norm")}
    own[f"{start}nextn.eh_proj.weight"] = torch.randn(32, 64, generator=generator)
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors | own, values_of(model.config, **values), "F32")
    target = load_model(path, dtype=torch.float32)
    settings, naming = read_mtp(path, read_architecture(path))
    head = load_mtp(path, settings, naming, target, device=torch.device("cpu"), dtype=torch.float32)
    ids, hidden, places = torch.arange(3, 14), torch.randn(11, 32, generator=generator), torch.arange(11)
    with torch.inference_mode():
        both = [F.rms_norm(x, (32,), eps=target.arch.norm_epsilon) for x in (target.model.embed_tokens(ids), hidden)]
        x = torch.cat(both, dim=-1) @ own[f"{start}nextn.eh_proj.weight"].T
        x = target.model.layers[layer](x, target.rotation(places), WholeAttention())
        found = head(ids, hidden, places, WholeAttention())
    expected = F.rms_norm(x, (32,), eps=target.arch.norm_epsilon)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def factors(model, name):
    return torch.tensor(model.config.rope_parameters[f"{name}_factor"])


def logits_of(model):
    with torch.inference_mode():
        return model.logits(model(IDS[0], torch.arange(IDS.shape[1]), WholeAttention()))


@pytest.mark.parametrize("kind", KINDS)
def test_network_is_that_of_transformers(tmp_path, kind):
    model, path, _ = write(tmp_path, kind)
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)
    assert read_architecture(path).unknown_keys == ()


SHARED = (  # among ranks: what depends on all of them
    *("bloom", "olmo-3", "olmoe", "minimax-m2", "mamba", "falcon-mamba", "mamba-2", "lfm-2", "qwen-3-next", "qwen-3.5"),
    *("qwen-3.5-moe", "nemotron-h", "granite-4-hybrid", "falcon-h1", "jamba", "apertus", "gemma-4-moe", "kimi-linear"),
)


@pytest.mark.parametrize("kind", SHARED)
def test_two_ranks_find_what_one_finds(tmp_path, kind, monkeypatch):
    _, path, _ = write(tmp_path, kind)
    expected = logits_of(load_model(path, dtype=torch.float32))
    for found in logits_in_threads(path, 2, IDS[0].tolist(), monkeypatch):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba-2", "lfm-2", "qwen-3-next", "falcon-h1", "jamba"])
def test_integers_of_recurrent_layers_stay_on_two_ranks(tmp_path, kind, monkeypatch):
    """Each projection in its own type; others have rows that no block divides."""
    model, _, tensors = write(tmp_path, kind)
    architecture, values = KINDS[kind]
    others = ("conv1d", "conv.conv", "_norm.", "A_log", "mlp.gate.weight")

    def kind_of(name):
        if tensors[name].dim() < 2 or tensors[name].shape[-1] % 32 or any(other in name for other in others):
            return "F32"
        return "Q5_1" if "v_proj" in name or "up" in name else "Q4_1"

    packed, plain = tmp_path / "packed" / "model.gguf", tmp_path / "plain" / "model.gguf"
    header = values_of(model.config, **values)
    stored = write_gguf(packed, architecture, tensors, header, kind_of)
    write_gguf(plain, architecture, stored, header)
    expected = logits_of(load_model(plain, dtype=torch.float32))
    parts = [load_part(packed, rank, keeps_groups=True) for rank in range(2)]
    for found in run_as_threads(monkeypatch, lambda rank: logits_of(parts[rank])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    mixer = parts[1].model.layers[0].mixer
    assert any(isinstance(module, (Int4Linear, GroupedLinear)) for module in mixer.modules())


def test_the_small_baichuan_is_a_llama(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_like, "BAICHUAN_7B_SIZE", 32)
    monkeypatch.setitem(KINDS, "llama-2", ("baichuan", {"rope.dimension_count": 8, "tensor_data_layout": "Meta"}))
    model, path, _ = write(tmp_path, "llama-2")
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)


def test_every_architecture_is_known_to_the_package():
    assert not ARCHITECTURES.keys() - set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("kind", ["qwen-3-next", "qwen-3.5"])
def test_rows_and_columns_of_quantized_recurrent_layers_are_arranged(tmp_path, kind, caplog):
    sizes = {"linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    (architecture, values), options = KINDS[kind], {**OPTIONS.get(kind, {}), **sizes, "intermediate_size": 64}
    model = reference(kind, **options, shared_expert_intermediate_size=32)
    values = values | {"ssm.inner_size": 96}
    if kind == "qwen-3-next":
        values |= {"expert_count": 4, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32}
    tensors = tensors_of(model, tmp_path / "folder", architecture)
    header = values_of(model.config, **values)
    packed, plain = tmp_path / "packed" / "model.gguf", tmp_path / "plain" / "model.gguf"
    kinds = {name: "Q4_0" if tensor.shape[-1] % 32 == 0 else "F32" for name, tensor in tensors.items()}
    stored = write_gguf(packed, architecture, tensors, header, kinds.__getitem__)
    write_gguf(plain, architecture, stored, header)
    found = load_model(packed, dtype=torch.float32)
    torch.testing.assert_close(
        logits_of(found), logits_of(load_model(plain, dtype=torch.float32)), rtol=1e-4, atol=1e-4
    )
    mixer = found.model.layers[0].mixer
    assert "in_proj_a.scales" in dict(mixer.named_buffers()) | dict(mixer.named_parameters())


def test_groups_of_mamba_2_have_a_norm_each(tmp_path):
    """As llama.cpp and its authors compute it; transformers has one norm for all."""
    _, path, _ = write(tmp_path, "mamba-2", n_groups=2)
    assert read_architecture(path).recurrence.norm_groups == 2


def test_the_documentation_names_every_architecture():
    page = (Path(__file__).parents[4] / "docs/quantization.md").read_text()
    table = page.split("| `general.architecture` |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([\w-]+)`", table)) == ARCHITECTURES.keys()


def test_experts_in_mxfp4_are_dequantized(tmp_path, caplog):
    """As gpt-oss is published."""
    _, path, stored = write(tmp_path, "gpt-oss", lambda name: "MXFP4" if "experts" in name else "F32")
    experts = load_model(path, dtype=torch.float32).model.layers[1].mlp.experts
    start = "model.layers.1.mlp.experts"
    torch.testing.assert_close(experts.down_proj, stored[f"{start}.down_proj.weight"])
    gates = torch.cat([stored[f"{start}.{part}_proj.weight"] for part in ("gate", "up")], dim=1)
    torch.testing.assert_close(experts.gate_up_proj, gates)
    assert "stacks of experts are dequantized" in caplog.text


def test_keys_and_values_of_latents_belong_together(tmp_path):
    model = reference("deepseek-v3")
    architecture, values = KINDS["deepseek-v3"]
    tensors = tensors_of(model, tmp_path / "folder", architecture)
    del tensors["model.layers.1.self_attn.v_b_proj.weight"]
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, values_of(model.config, **values))
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_k_b\.weight without a fitting blk\.1\.attn_v_b\.weight"):
        load_model(path)


@pytest.mark.parametrize("kind", ["arcee", "granite-moe", "qwen-3.5", "nemotron-h"])
def test_queries_keys_and_values_may_be_in_one_tensor(tmp_path, kind):
    """As the converter writes them with --fuse-qkv; in some architectures, rows of queries and keys are rearranged."""
    architecture, values = KINDS[kind]
    model = reference(kind, **options_of(kind))
    tensors = tensors_of(model, tmp_path / "folder", architecture)
    for name in [name for name in tensors if name.endswith(".q_proj.weight")]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[f"blk.{name.split('.')[2]}.attn_qkv.weight"] = torch.cat(parts)
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, values_of(model.config, **values))
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)


def test_joint_projections_of_older_files_are_read(tmp_path):
    model = reference("qwen-3-next", **options_of("qwen-3-next"))
    architecture, values = KINDS["qwen-3-next"]
    tensors = tensors_of(model, tmp_path / "folder", architecture)
    tensors = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(("attn_qkv.weight", "attn_gate.weight"))
    }
    for name, tensor in load_file(tmp_path / "folder" / "model.safetensors").items():
        if ".in_proj_qkvz." in name:
            tensors[f"blk.{name.split('.')[2]}.ssm_in.weight"] = tensor
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, values_of(model.config, **values))
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)


def test_whole_latents_of_older_files_are_read(tmp_path):
    """Their sizes are those of single heads, and one tensor makes keys and values."""
    model = reference("deepseek-v3")
    architecture, values = KINDS["deepseek-v3"]
    tensors = tensors_of(model, tmp_path / "folder", "an older one")
    older = {key: value for key, value in values.items() if not key.endswith("_mla")}
    older |= {"attention.key_length": 20, "attention.value_length": 10}
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, values_of(model.config, **older))
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)
