"""Tiny networks with the parts of many families, which the kernels compute, and their logits."""

from __future__ import annotations

from typing import Any

import torch

from flambeau.llm.backends.cpu.network import CpuNetwork
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.families.gate_limits import GateLimits
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.layer_sizes import LayerSizes
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.models.transformer import Transformer
from support.llm_steps import prompts, random_model, room, step_inputs

LATENT = {
    "num_kv_heads": 1,
    "head_size": 32,
    "latent_size": 24,
    "rotary_size": 8,
    "unrotated_size": 12,
    "value_size": 10,
    "attention_scale": 0.2,
}
UNROTATED = frozenset({0, 1})
LAYER_NORMS = {
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "has_gate": False,
    "activation": "gelu",
}
TWO_SIZES = ({"head_size": 16, "intermediate_size": 40}, {"head_size": 512, "intermediate_size": 72})
EXPERTS = {"num_experts": 6, "num_experts_per_token": 2, "expert_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen 2": {"qkv_bias": True},
    "Qwen 3": {"qk_norm": True},
    "biases everywhere": {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "head_bias": True},
    "SmolLM 3": {"unrotated_layers": frozenset({1})},
    "Gemma": {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 5.6},
    "Gemma 2": {"norm_places": "both", "attention_softcap": 5.0, "logit_softcap": 3.0, "windows": (None, 5)},
    "Gemma 3": {"norm_places": "both", "qk_norm": True, "windows": (None, 5), "local_rope_theta": 100.0},
    "norms after": {"norm_places": "after"},
    "Gemma 4": {
        "norm_places": "both",
        "qk_norm": True,
        "normalizes_values": True,
        "scales_layers": True,
        "shapes": tuple(LayerSizes(num_heads=2, num_kv_heads=1, **sizes) for sizes in TWO_SIZES),
        "windows": (5, None),
        "local_rope_theta": 100.0,
        "layer_input_size": 12,
        "layer_input_vocab": 90,
    },
    "Gemma 3n": {
        "norm_places": "both",
        "qk_norm": True,
        "normalizes_values": True,
        "shared_keys": (0, 0),
        "activation": "gelu_tanh",
        "layer_input_size": 12,
        "layer_input_vocab": 90,
        "num_streams": 3,
        "active_stream": 1,
        "scales_stream": True,
        "laurel_size": 5,
        "sparsity": (0.7, 0.0),
    },
    "keys of another layer": {"shared_keys": (0, 0), "qkv_bias": True, "norm_places": "both"},
    "Llama-Nemotron": {
        "shapes": tuple(LayerSizes(num_heads=4, num_kv_heads=2, **sizes) for sizes in TWO_SIZES[::-1]),
        "attention_only_layers": frozenset({0}),
        "feed_forward_layers": frozenset({1}),
    },
    "BitNet": {"inner_norms": True, "activation": "relu_squared"},
    "Trinity": {"attention_gate": "sigmoid"},
    "Laguna": {"attention_gate": "softplus_per_head"},
    "Apertus": {"activation": "xielu", "has_gate": False},
    "NanoChat": {"has_norm_weight": False, "rotated_qk_norm": True, "reversed_rope": True},
    "Granite": {"residual_scale": 0.3, "logit_scale": 0.2, "attention_scale": 0.1, "embedding_scale": 2.0},
    "a part of each head is rotated": {"rotary_size": 8},
    "no gate": {"has_gate": False, "activation": "relu_squared"},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu", "has_gate": False},
    "layer norms": {"norm": "layer", "norm_bias": True},
    "layer norms without biases": {"norm": "layer", "norm_offset": 1.0},
    "OLMo 1": {"norm": "layer", "has_norm_weight": False, "clip_qkv": 0.7},
    "GPT-NeoX": {**LAYER_NORMS, "is_parallel": True, "parallel_norms": True, "rotary_size": 8},
    "Phi 2": {**LAYER_NORMS, "is_parallel": True, "qk_norm": True, "rotary_size": 8, "head_bias": True},
    "Command R": {"norm": "layer", "is_parallel": True, "separate_qk_norm": True, "logit_scale": 0.3},
    "parallel layers with multipliers": {"is_parallel": True, "residual_scale": 0.3},
    "GPT-2": {**LAYER_NORMS, "learned_positions": True, "unrotated_layers": UNROTATED, "activation": "gelu_tanh"},
    "OPT": {**LAYER_NORMS, "learned_positions": True, "position_offset": 2, "has_last_norm": False},
    "BLOOM": {**LAYER_NORMS, "embedding_norm": True, "alibi": "plain", "unrotated_layers": UNROTATED},
    "Falcon with ALiBi": {"norm": "layer", "alibi": "scaled", "num_heads": 5, "num_kv_heads": 1},
    "OLMo 2": {"norm_places": "after", "qk_norm": True, "wide_qk_norm": True},
    "Hunyuan": {"qk_norm": True, "late_qk_norm": True},
    "ModernBERT": {
        "norm": "layer",
        "embedding_norm": True,
        "has_first_norm": False,
        "head_layer": "gelu",
        "head_layer_bias": True,
        "tied_embeddings": True,
        "tied_bias": True,
        "windows": (None, 5),
        "local_rope_theta": 100.0,
        "activation": "gelu",
    },
    "OPT-350M": {
        **LAYER_NORMS,
        "learned_positions": True,
        "unrotated_layers": UNROTATED,
        "has_last_norm": False,
        "norm_places": "sum",
        "embedding_size": 20,
        "embedding_scale": 2.0,
    },
    "embeddings that are wider than the network": {"embedding_size": 72, "tied_embeddings": True},
    "Ministral 3": {"tempers_rotated": True, "temperature_length": 5, "temperature_scale": 0.4},
    "Llama 4": {
        **EXPERTS,
        "router": "sigmoid",
        "scales_expert_inputs": True,
        "normalizes_experts": False,
        "unrotated_layers": frozenset({1}),
        "chunks": (6, None),
        "rotated_qk_norm": True,
        "temperature_length": 5,
        "temperature_scale": 0.4,
        "shared_expert_size": 48,
    },
    "chunks in windows": {"chunks": (7, 7), "windows": (None, 4)},
    "Phi-3.5-MoE": {
        **EXPERTS,
        "router": "sparse_mixer",
        "router_jitter": 0.2,
        "normalizes_experts": False,
        "norm": "layer",
        "norm_bias": True,
    },
    "heads of 20 in windows": {"head_size": 20, "rotary_size": 12, "windows": (None, 5), "qk_norm": True},
    "6 heads of 40 for 2": {"head_size": 40, "num_heads": 6, "attention_softcap": 5.0, "has_sinks": True},
    "sinks": {"has_sinks": True, "windows": (None, 5)},
    "Mixtral": EXPERTS,
    "OLMoE": {**EXPERTS, "normalizes_experts": False, "qk_norm": True, "wide_qk_norm": True},
    "Qwen 2 MoE": {**EXPERTS, "normalizes_experts": False, "shared_expert_size": 48, "gates_shared_expert": True},
    "Granite MoE": {**EXPERTS, "residual_scale": 0.3, "shared_expert_size": 32},
    "GLM-4.5": {
        **EXPERTS,
        "router": "biased_sigmoid",
        "routed_scale": 2.5,
        "shared_expert_size": 16,
        "dense_layers": frozenset({0}),
    },
    "groups of experts": {
        **EXPERTS,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "router": "grouped_softmax",
        "normalizes_experts": False,
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
    },
    "groups of experts with biases": {
        **EXPERTS,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "router": "biased_sigmoid",
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
    },
    "Step": {
        **EXPERTS,
        "shared_expert_size": 48,
        "dense_layers": frozenset({0}),
        "gate_limits": GateLimits(kind="activated", experts=(None, 0.3), others=(0.2, 0.1)),
    },
    "Ernie 4.5 MoE": {**EXPERTS, "router": "biased_softmax"},
    "gpt-oss": {
        **EXPERTS,
        "expert_bias": True,
        "gate_limits": GateLimits(kind="swiglu", experts=(0.5,)),
        "has_sinks": True,
    },
    "experts without gates": {**EXPERTS, "has_gate": False, "activation": "relu_squared", "norm_places": "both"},
}


def recurrent(kind: str, *layers: int, **changes: Any) -> dict[str, Any]:
    """A recurrence in these layers of two, or of as many as there are."""
    shapes: dict[str, dict[str, Any]] = {
        "short_conv": {"inner_size": 48, "conv_width": 3},
        "mamba": {"inner_size": 64, "state_size": 18, "time_step_rank": 3},
        "mamba2": {"inner_size": 60, "num_heads": 10, "head_size": 6, "state_size": 18, "num_groups": 2},
        "gated": {"inner_size": 60, "num_heads": 4, "head_size": 15, "projection_bias": True},
        "rwkv": {"inner_size": 40, "state_size": 32},
        "delta_net": {"inner_size": 6 * 84, "num_heads": 6, "head_size": 84, "state_size": 10, "num_groups": 2},
    }
    return {"recurrence": Recurrence(kind=kind, layers=frozenset(layers), **{**shapes[kind], **changes})}


RECURRENT_FAMILIES = {
    "LFM2": {**recurrent("short_conv", 0), "qk_norm": True},
    "LFM2 with biases": recurrent("short_conv", 1, conv_width=5, conv_bias=True, projection_bias=True),
    "LFM2 MoE": {**EXPERTS, **recurrent("short_conv", 0), "router": "biased_sigmoid", "dense_layers": frozenset({0})},
    "Mamba": {**recurrent("mamba", 0, 1), "has_mlp": False, "wide_residual": True},
    "Falcon Mamba": {**recurrent("mamba", 0, 1, inner_norms="plain", inner_epsilon=1e-3), "has_mlp": False},
    "Jamba": {**EXPERTS, **recurrent("mamba", 0, inner_norms="learned"), "unrotated_layers": UNROTATED},
    "Mamba 2": {
        **recurrent("mamba2", 0, 1, time_step_limits=(0.2, 0.9), projection_bias=True),
        "has_mlp": False,
        "head_size": 7,  # of nothing
    },
    "Granite 4": {**recurrent("mamba2", 1), "residual_scale": 0.3, "logit_scale": 0.2, "unrotated_layers": UNROTATED},
    "Bamba": {**recurrent("mamba2", 0, conv_bias=False), "rotary_size": 8},
    "Nemotron-H": {
        **recurrent("mamba2", 0, norm_groups=2),
        "num_layers": 3,
        "has_mlp": False,
        "feed_forward_layers": frozenset({1}),
        "has_gate": False,
        "activation": "relu_squared",
    },
    "Falcon H1": {
        **recurrent(
            "mamba2",
            *(0, 1),
            is_beside_attention=True,
            norm="none",
            input_scale=1.2,
            part_scales=(0.9, 0.8, 0.7, 1.1, 1.2),
            output_scale=0.6,
        ),
        "attention_input_scale": 0.8,
        "attention_output_scale": 0.9,
        "mlp_scales": (0.8, 0.7),
    },
    "Falcon H1 with norms": recurrent("mamba2", 0, 1, is_beside_attention=True, norm="before_gate", norm_groups=2),
    "Qwen3-Next": {
        **EXPERTS,
        **recurrent("delta_net", 0),
        "gates_attention": True,
        "norm_offset": 1.0,
        "rotary_size": 8,
        "qk_norm": True,
        "shared_expert_size": 48,
        "gates_shared_expert": True,
    },
    "Qwen 3.5": {**recurrent("delta_net", 1, is_grouped=False, conv_bias=False), "gates_attention": True},
    "RecurrentGemma": {
        **recurrent("gated", 0),
        "norm_offset": 1.0,
        "mlp_bias": True,
        "output_bias": True,
        "activation": "gelu_tanh",
        "windows": (None, 5),
        "logit_softcap": 3.0,
        "rotary_size": 8,
    },
    "RWKV 4": {
        **recurrent("rwkv", *range(4)),
        "norm": "layer",
        "norm_bias": True,
        "embedding_norm": True,
        "has_gate": False,
    },
    "Zamba 2": {
        **recurrent("mamba2", 0, 1, 2, inner_size=64, num_heads=8, head_size=8),
        "num_layers": 3,
        "has_mlp": False,
        "num_kv_heads": 4,
        "attention_scale": 0.25,
        "activation": "gelu",
        "block_layers": (0, 2),
        "num_blocks": 1,
        "adapter_rank": 32,
        "adapts_attention": True,
    },
    "OLMo hybrid": {
        **recurrent("delta_net", 0, is_grouped=False, max_beta=2.0, inner_epsilon=1e-3),
        "norm_places": "after",
        "qk_norm": True,
        "wide_qk_norm": True,
    },
}
LATENT_FAMILIES = {
    "MiniCPM 3": {**LATENT, "query_latent_size": 20, "num_heads": 7, "residual_scale": 0.3},
    "DeepSeek V2 Lite": {
        **EXPERTS,
        **LATENT,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "paired_rope": True,
        "router": "grouped_softmax",
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
        "normalizes_experts": False,
        "shared_expert_size": 48,
        "dense_layers": frozenset({0}),
    },
    "DeepSeek V3": {
        **EXPERTS,
        **LATENT,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "query_latent_size": 20,
        "paired_rope": True,
        "qkv_bias": True,
        "router": "biased_sigmoid",
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
        "routed_scale": 2.5,
    },
    "DeepSeek V3.2": {
        **LATENT,
        "query_latent_size": 20,
        "paired_rope": True,
        "indexer": IndexerShape(num_heads=11, head_size=12, num_chosen=5),
    },
    "GLM-5": {
        **LATENT,
        "query_latent_size": 20,
        "num_layers": 3,
        "indexer": IndexerShape(
            num_heads=8, head_size=16, num_chosen=7, paired_rope=True, reusing_layers=frozenset({1})
        ),
    },
    "Mistral 4": {
        **LATENT,
        "query_latent_size": 20,
        "paired_rope": True,
        "tempers_rotated": True,
        "temperature_length": 5,
        "temperature_scale": 0.4,
    },
}
FAMILIES |= RECURRENT_FAMILIES | LATENT_FAMILIES


def model_of(family: str, **changes: Any) -> Transformer:
    """A random network of a family; its norms and biases have an effect, too."""
    model = random_model(**{"head_size": 16, **FAMILIES[family], **changes})
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or "norm" in name or not weight.any():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def copy_of(model: Transformer, cache: KVCache, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache with the same contents."""
    num_slots = max([0, *(len(states[0]) - 1 for states in cache.states.layers.values())])
    copy = KVCache(model.arch, cache.num_blocks, cache.block_size, dtype=dtype, num_slots=num_slots)
    for ours, theirs in zip(copy.tensors, cache.tensors, strict=True):
        ours.copy_(theirs)
    return copy


def logits_of_both(model: Transformer, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the kernels and of the plain network: prompts of several lengths, then drafted tokens."""
    asked, has_states = [*prompts(4), [5 + i % 60 for i in range(24)]], bool(model.arch.recurrence)
    first = step_inputs({i: (0, ids) for i, ids in enumerate(asked)}, has_states=has_states)
    cache = room(model, 5, dtype=dtype)
    native, eager = CpuNetwork(model, cache), EagerBackend(model, copy_of(model, cache, dtype))
    later = {i: (len(ids), [7 + i, 11, 13]) for i, ids in enumerate(asked)}
    drafted = step_inputs(later, query_len=3, has_states=has_states)
    rows = first.query_starts[1:] - 1
    found = torch.cat((native.run(first, rows), native.run(drafted)))
    return found, torch.cat((eager.prefill(first, rows), eager.decode(drafted))).float()
