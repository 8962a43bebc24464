"""ARCHITECTURES: the families that GGUF files name, each with what its config.json would have beside the common part.

What llama.cpp knows of an architecture by its name, and files therefore leave out, is written here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flambeau.llm.checkpoints.gguf_rope import SCALING, rope_parameters
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader

ToConfig = Callable[[GgufHeader], dict[str, Any]]
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale queries by another size
LLAMA_4_MAVERICK = 128  # experts; it does not normalize queries and keys
SIGMOID = 2  # a gating function


def scalar(header: GgufHeader, key: str) -> Any:
    """A value that may be given for each layer, but must be the same for all."""
    value = header.get(key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(f"{header.path} has {key} that differs between layers, which is not supported")
    return value[0]


def reject(header: GgufHeader, key: str) -> None:
    if header.get(key):
        raise CheckpointError(f"{header.path} has {key}, which is not supported for {header.architecture!r}")


def ignore(header: GgufHeader, *keys: str) -> None:
    """Name keys that say nothing new: they have one value in all files of an architecture, or follow from others."""
    for key in keys:
        header.get(key)


def has_tensor(header: GgufHeader, name: str) -> bool:
    return any(name in tensor for tensor in header.tensors)


# ---- parts that several architectures have ----


def family(name: str, **more: Any) -> ToConfig:
    """An architecture without keys of its own."""

    def to_config(header: GgufHeader) -> dict[str, Any]:
        reject(header, "attention.sliding_window")
        return {"architectures": [name], **more}

    return to_config


def moe(name: str, **more: Any) -> ToConfig:
    return lambda header: {**family(name)(header), "num_experts": header.get("expert_count"), **more}


def window(header: GgufHeader) -> dict[str, Any]:
    """The window, and the layers that have it if the file names them."""
    pattern = header.get("attention.sliding_window_pattern")
    found: dict[str, Any] = {"sliding_window": header.get("attention.sliding_window") or None}  # 0: there is none
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in pattern]
    elif pattern:
        found["sliding_window_pattern"] = pattern
    return found


def experts(header: GgufHeader) -> dict[str, Any]:
    """Experts as DeepSeek names their settings."""
    further = header.get("nextn_predict_layers") or 0
    given = {
        "num_experts": header.get("expert_count"),
        "n_shared_experts": header.get("expert_shared_count"),
        "routed_scaling_factor": header.get("expert_weights_scale"),
        "n_group": header.get("expert_group_count"),
        "topk_group": header.get("expert_group_used_count"),
        "first_k_dense_replace": num_dense_layers(header),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "num_hidden_layers": header.get("block_count") - further,
        "num_nextn_predict_layers": further,
    }
    return {key: value for key, value in given.items() if value is not None}


def num_dense_layers(header: GgufHeader) -> int:
    """The first layers that have no experts; the number in the file may be that of another model."""
    ignore(header, "leading_dense_block_count")
    layers = range(header.get("block_count"))
    return next((i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in header.tensors), len(layers))


def query_scale(header: GgufHeader) -> dict[str, Any]:
    """The size by whose root queries are scaled: that of a head, except in the largest models."""
    is_largest = header.get("block_count") == GEMMA_27B[header.architecture]
    by_head = header.get("embedding_length") // scalar(header, "attention.head_count")
    return {"query_pre_attn_scalar": by_head if is_largest else header.get("attention.key_length", by_head)}


def latent_sizes(header: GgufHeader) -> dict[str, Any]:
    """The sizes of latent attention; older files have those of single heads under the usual names."""
    rotated = header.get("rope.dimension_count")
    key = header.get("attention.key_length_mla", header.get("attention.key_length"))
    value = header.get("attention.value_length_mla", header.get("attention.value_length"))
    if value is None:
        whole, heads = header.tensors.get("blk.0.attn_kv_b.weight"), scalar(header, "attention.head_count")
        value = whole.shape[0] // heads - (key - rotated) if whole is not None else None
    return {
        "kv_lora_rank": header.get("attention.kv_lora_rank"),
        "q_lora_rank": header.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "num_key_value_heads": None,
    }


# ---- architectures ----


def llama(header: GgufHeader) -> dict[str, Any]:
    reject(header, "attention.sliding_window")
    if not header.get("expert_count"):
        return {"architectures": ["LlamaForCausalLM"]}
    return {"architectures": ["MixtralForCausalLM"], "num_local_experts": header.get("expert_count")}


def llama_4(header: GgufHeader) -> dict[str, Any]:
    count = header.get("expert_count")
    size = header.get("expert_feed_forward_length")
    return {
        "architectures": ["Llama4ForCausalLM"],
        "num_local_experts": count,
        "intermediate_size": size,
        "moe_intermediate_size": size,
        "intermediate_size_mlp": header.get("feed_forward_length"),
        "interleave_moe_layer_step": header.get("interleave_moe_layer_step", 1),
        "attention_chunk_size": header.get("attention.chunk_size", 8192),
        "use_qk_norm": count != LLAMA_4_MAVERICK,
    }


def gemma(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"]}


def gemma_2(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["Gemma2ForCausalLM"], **window(header), **query_scale(header)}


def gemma_3(header: GgufHeader) -> dict[str, Any]:
    local = header.get("rope.freq_base_swa", 10000.0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **window(header),
        **query_scale(header),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **rope_parameters(header)},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def phi_2(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["PhiForCausalLM"]}


def phi_3(header: GgufHeader) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        **window(header),
        "original_max_position_embeddings": header.get(SCALING + "original_context_length"),
    }


def olmo(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["OlmoForCausalLM"], "clip_qkv": header.get("attention.clamp_kqv") or None}


def olmo_2(header: GgufHeader) -> dict[str, Any]:
    """OLMo 2, or OLMo 3 if it has windows, whose layers have positions of their own."""
    found = window(header)
    if found["sliding_window"] is None:
        return {"architectures": ["Olmo2ForCausalLM"]}
    positions = rope_parameters(header)
    local = header.get("rope.freq_base_swa", positions["rope_theta"])
    return {
        "architectures": ["Olmo3ForCausalLM"],
        **found,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **positions},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def granite_moe(header: GgufHeader) -> dict[str, Any]:
    shared = header.get("expert_shared_feed_forward_length")
    return {
        "architectures": ["GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"],
        "num_local_experts": header.get("expert_count"),
        **({"shared_intermediate_size": shared, "shared_expert_intermediate_size": None} if shared else {}),
    }


def gpt_oss(header: GgufHeader) -> dict[str, Any]:
    positions = rope_parameters(header)
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": header.get("expert_count"),
        "intermediate_size": header.get("expert_feed_forward_length"),
        **window(header),
        "attention_bias": True,
        "rope_parameters": {**positions, "truncate": False} if "rope_type" in positions else positions,
    }


def deepseek_2(header: GgufHeader) -> dict[str, Any]:
    """DeepSeek V2 and V3, known by how they choose experts; others that have their attention are converted to it."""
    found = experts(header)
    is_third = header.get("expert_gating_func") == SIGMOID or has_tensor(header, ".exp_probs_b.")
    positions = rope_parameters(header)
    if multiplier := header.get(SCALING + "yarn_log_multiplier"):
        positions |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    if not found.get("num_experts"):
        sizes = {**latent_sizes(header), "moe_intermediate_size": None}
        return {"architectures": ["YoutuForCausalLM"], **sizes, "rope_parameters": positions}
    if not is_third:
        method = "group_limited_greedy" if found.get("n_group", 1) > 1 else "greedy"
        found = {**found, "topk_method": method}
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_third else "DeepseekV2ForCausalLM"],
        **({"n_group": 1, "topk_group": 1} if is_third else {}),
        **found,
        **latent_sizes(header),
        "rope_parameters": positions,
    }


def minicpm_3(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["MiniCPM3ForCausalLM"], **latent_sizes(header)}


def glm_4_moe(header: GgufHeader) -> dict[str, Any]:
    ignore(header, "expert_gating_func")
    has_norms = has_tensor(header, ".attn_q_norm.")
    return {"architectures": ["Glm4MoeForCausalLM"], **experts(header), "use_qk_norm": has_norms}


def dots_1(header: GgufHeader) -> dict[str, Any]:
    ignore(header, "expert_gating_func")
    found = {key: value for key, value in experts(header).items() if key != "num_nextn_predict_layers"}
    return {"architectures": ["Dots1ForCausalLM"], **found, "sliding_window": None}


def ernie_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "shared_expert_intermediate_size": None,  # it follows from the number of experts
        "num_experts": header.get("expert_count"),
        "moe_num_shared_experts": header.get("expert_shared_count", 0),
        "moe_layer_start_index": num_dense_layers(header),
        "moe_layer_interval": header.get("interleave_moe_layer_step", 1),
    }


def hunyuan_moe(header: GgufHeader) -> dict[str, Any]:
    size = header.get("expert_feed_forward_length") or header.get("feed_forward_length")
    shared, number = header.get("expert_shared_feed_forward_length"), header.get("expert_shared_count", 0)
    return {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": header.get("expert_count"),
        "moe_topk": header.get("expert_used_count"),
        "intermediate_size": size,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": None,
        "num_experts_per_tok": None,
        "num_shared_expert": shared // size if shared else number,
    }


def minimax_m2(header: GgufHeader) -> dict[str, Any]:
    ignore(header, "expert_gating_func")
    return {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": header.get("expert_count")}


def cohere(header: GgufHeader) -> dict[str, Any]:
    return {
        "architectures": ["CohereForCausalLM"],
        "logit_scale": header.get("logit_scale"),
        "logits_scaling": None,
        "use_qk_norm": has_tensor(header, ".attn_q_norm."),
    }


def cohere_2(header: GgufHeader) -> dict[str, Any]:
    scale = {"logit_scale": header.get("logit_scale"), "logits_scaling": None}
    return {"architectures": ["Cohere2ForCausalLM"], **scale, **window(header)}


def exaone_4(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["Exaone4ForCausalLM"], **window(header)}


def stablelm(header: GgufHeader) -> dict[str, Any]:
    return {
        "architectures": ["StableLmForCausalLM"],
        "use_parallel_residual": bool(header.get("use_parallel_residual")),
        "qk_layernorm": has_tensor(header, ".attn_q_norm."),
        "use_qkv_bias": has_tensor(header, ".attn_q.bias"),
    }


def gpt_neox(header: GgufHeader) -> dict[str, Any]:
    head_size = header.get("embedding_length") // scalar(header, "attention.head_count")
    return {
        "rotary_pct": (header.get("rope.dimension_count", head_size) + 0.01) / head_size,
        "architectures": ["GPTNeoXForCausalLM"],
        "use_parallel_residual": bool(header.get("use_parallel_residual", True)),
    }


ARCHITECTURES: dict[str, ToConfig] = {
    "llama": llama,
    "llama4": llama_4,
    "arcee": family("ArceeForCausalLM"),
    "qwen2": family("Qwen2ForCausalLM"),
    "qwen2moe": moe("Qwen2MoeForCausalLM", norm_topk_prob=False),
    "qwen3": family("Qwen3ForCausalLM"),
    "qwen3moe": moe("Qwen3MoeForCausalLM", norm_topk_prob=True),
    "gemma": gemma,
    "gemma2": gemma_2,
    "gemma3": gemma_3,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek_2,
    "minicpm3": minicpm_3,
    "glm4": family("Glm4ForCausalLM"),
    "glm4moe": glm_4_moe,
    "phi2": phi_2,
    "phi3": phi_3,
    "granite": family("GraniteForCausalLM"),
    "granitemoe": granite_moe,
    "smollm3": family("SmolLM3ForCausalLM"),
    "olmo": olmo,
    "olmo2": olmo_2,
    "olmoe": moe("OlmoeForCausalLM"),
    "command-r": cohere,
    "cohere2": cohere_2,
    "starcoder2": family("Starcoder2ForCausalLM"),
    "stablelm": stablelm,
    "nemotron": family("NemotronForCausalLM"),
    "exaone4": exaone_4,
    "ernie4_5": family("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": ernie_moe,
    "hunyuan-dense": family("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": hunyuan_moe,
    "seed_oss": family("SeedOssForCausalLM"),
    "dots1": dots_1,
    "minimax-m2": minimax_m2,
    "internlm2": family("LlamaForCausalLM"),
    "gpt2": family("GPT2LMHeadModel"),
    "gptneox": gpt_neox,
    "bloom": family("BloomForCausalLM"),
}
