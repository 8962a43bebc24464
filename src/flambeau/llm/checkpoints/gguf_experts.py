"""SPARSE: architectures of GGUF files whose models have experts, as config.json describes them."""

from __future__ import annotations

from typing import Any

from flambeau.llm.checkpoints.gguf_parts import (
    SIGMOID,
    SOFTMAX,
    ToConfig,
    check_gates,
    experts,
    has_tensor,
    ignore,
    latent_sizes,
    num_dense_layers,
    reject,
    window,
)
from flambeau.llm.checkpoints.gguf_rope import SCALING, rope_parameters
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader


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
    positions = latent_positions(header)
    if "llama_4_scaling_beta" in positions and not is_third:
        return mistral_4(header)
    reject(header, "attention.temperature_scale")
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


def latent_positions(header: GgufHeader) -> dict[str, Any]:
    """Positions beside latents; those of Mistral let queries grow."""
    positions = rope_parameters(header)
    if multiplier := header.get(SCALING + "yarn_log_multiplier"):
        positions |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    beta, length = header.get("attention.temperature_scale"), header.get("attention.temperature_length")
    original = positions.get("original_max_position_embeddings")
    if length not in (None, 0, original):
        raise CheckpointError(
            f"{header.path} has attention.temperature_length {length} and positions of {original} tokens: not supported"
        )
    return positions | ({"llama_4_scaling_beta": beta} if beta else {})


def mistral_4(header: GgufHeader) -> dict[str, Any]:
    check_gates(header, SOFTMAX)
    positions = {"llama_4_scaling_beta": 0.0, **latent_positions(header)}
    found = {key: value for key, value in experts(header).items() if key != "num_nextn_predict_layers"}
    sizes = latent_sizes(header)
    return {"architectures": ["Mistral4ForCausalLM"], **found, **sizes, "rope_parameters": positions}


def glm_dsa(header: GgufHeader) -> dict[str, Any]:
    """GLM-5; layers without an indexer use the choice of an earlier one."""
    check_gates(header, SIGMOID)
    found = experts(header)
    types = header.get("attention.indexer.types")
    layers = range(found["num_hidden_layers"])
    has_indexer = [f"blk.{i}.indexer.attn_k.weight" in header.tensors for i in layers]
    has_indexer = has_indexer if types is None else [bool(one) for one in types[: len(layers)]]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        **found,
        **latent_sizes(header),
        "rope_parameters": latent_positions(header),
        "index_n_heads": header.get("attention.indexer.head_count"),
        "index_head_dim": header.get("attention.indexer.key_length"),
        "index_topk": header.get("attention.indexer.top_k"),
        "indexer_types": ["full" if one else "shared" for one in has_indexer],
    }


def deepseek_1(header: GgufHeader) -> dict[str, Any]:
    check_gates(header, SOFTMAX)
    found = {key: value for key, value in experts(header).items() if key != "num_nextn_predict_layers"}
    if found.pop("routed_scaling_factor", 1.0) != 1.0:
        raise CheckpointError(f"{header.path} has expert_weights_scale, which is not supported for 'deepseek'")
    return {"architectures": ["DeepseekForCausalLM"], **found}


def afmoe(header: GgufHeader) -> dict[str, Any]:
    """Arcee's Trinity; its files may leave out that every fourth layer has no window."""
    check_gates(header, SIGMOID)
    found, windows = experts(header), window(header)
    reject_groups(header)
    if not found["norm_topk_prob"]:
        raise CheckpointError(f"{header.path} has no expert_weights_norm, which is not supported for 'afmoe'")
    return {
        "architectures": ["AfmoeForCausalLM"],
        "num_experts": found["num_experts"],
        "num_shared_experts": found.get("n_shared_experts", 0),
        "num_dense_layers": found["first_k_dense_replace"],
        "route_scale": found.get("routed_scaling_factor", 1.0),
        "mup_enabled": True,
        **windows,
    }


def exaone_moe(header: GgufHeader) -> dict[str, Any]:
    check_gates(header, SIGMOID)
    found = experts(header)
    count, windows = found["num_hidden_layers"], window(header)
    if "layer_types" in windows:
        windows["layer_types"] = windows["layer_types"][:count]
    return {
        "architectures": ["ExaoneMoeForCausalLM"],
        **{key: found[key] for key in ("num_experts", "first_k_dense_replace", "norm_topk_prob")},
        "routed_scaling_factor": found.get("routed_scaling_factor", 1.0),
        "n_group": found.get("n_group", 1),
        "topk_group": found.get("topk_group", 1),
        "shared_expert_intermediate_size": None,  # it follows from the number of experts
        "num_shared_experts": shared_size(header) // header.get("expert_feed_forward_length"),
        **windows,
    }


def bailing(header: GgufHeader) -> dict[str, Any]:
    """Ling and Ring 1; a head that is normalized is so in the file."""
    check_gates(header, SOFTMAX)
    found = experts(header)
    reject_groups(header)
    if found.get("routed_scaling_factor", 1.0) != 1.0:
        raise CheckpointError(f"{header.path} has expert_weights_scale, which is not supported for 'bailingmoe'")
    return {"architectures": ["BailingMoeForCausalLM"], **bailing_experts(header)}


def bailing_2(header: GgufHeader) -> dict[str, Any]:
    check_gates(header, SIGMOID)
    found = experts(header)
    return {
        "architectures": ["BailingMoeV2ForCausalLM"],
        **bailing_experts(header),
        "routed_scaling_factor": found.get("routed_scaling_factor", 1.0),
        "n_group": found.get("n_group", 1),
        "topk_group": found.get("topk_group", 1),
    }


def bailing_experts(header: GgufHeader) -> dict[str, Any]:
    found = experts(header)
    ignore(header, "expert_shared_count")
    return {
        **{key: found[key] for key in ("num_experts", "first_k_dense_replace", "norm_topk_prob")},
        "num_shared_experts": 1,  # of the size of all
        "moe_shared_expert_intermediate_size": shared_size(header),
        "shared_expert_intermediate_size": None,
        "use_qkv_bias": has_tensor(header, ".attn_q.bias", ".attn_qkv.bias"),
        "use_bias": has_tensor(header, ".attn_output.bias"),
    }


def shared_size(header: GgufHeader) -> int:
    """The size of all shared experts together, by their tensors: files count it in two ways."""
    found = (tensor.shape[0] for name, tensor in header.tensors.items() if name.endswith(".ffn_up_shexp.weight"))
    return next(found, 0)


def reject_groups(header: GgufHeader) -> None:
    ignore(header, "expert_group_used_count")
    if (header.get("expert_group_count") or 1) > 1:
        raise CheckpointError(
            f"{header.path} has groups of experts, which are not supported for {header.architecture!r}"
        )


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


def phi_moe(header: GgufHeader) -> dict[str, Any]:
    positions = rope_parameters(header)
    if factor := positions.pop("attention_factor", None):
        positions |= {"short_mscale": factor, "long_mscale": factor}
    return {
        "architectures": ["PhimoeForCausalLM"],
        **window(header),
        "num_local_experts": header.get("expert_count"),
        "lm_head_bias": "output.bias" in header.tensors,
        "rope_parameters": positions,
        "original_max_position_embeddings": header.get(SCALING + "original_context_length"),
    }


SPARSE: dict[str, ToConfig] = {
    "gpt-oss": gpt_oss,
    "deepseek": deepseek_1,
    "deepseek2": deepseek_2,
    "mistral4": mistral_4,
    "glm-dsa": glm_dsa,
    "glm4moe": glm_4_moe,
    "ernie4_5-moe": ernie_moe,
    "hunyuan-moe": hunyuan_moe,
    "dots1": dots_1,
    "minimax-m2": minimax_m2,
    "phimoe": phi_moe,
    "afmoe": afmoe,
    "exaone-moe": exaone_moe,
    "bailingmoe": bailing,
    "bailingmoe2": bailing_2,
}
