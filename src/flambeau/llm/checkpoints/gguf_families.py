"""ARCHITECTURES: the families that GGUF files name, each with what its config.json would have beside the common part.

What llama.cpp knows of an architecture by its name, and files therefore leave out, is written here.
"""

from __future__ import annotations

from typing import Any

from flambeau.llm.checkpoints.gguf_experts import SPARSE
from flambeau.llm.checkpoints.gguf_gemma import GEMMAS
from flambeau.llm.checkpoints.gguf_hybrids import HYBRIDS
from flambeau.llm.checkpoints.gguf_parts import (
    ToConfig,
    family,
    has_tensor,
    ignore,
    latent_sizes,
    listed,
    moe,
    reject,
    scalar,
    window,
)
from flambeau.llm.checkpoints.gguf_rope import SCALING, rope_parameters
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader

LLAMA_4_MAVERICK = 128  # experts; it does not normalize queries and keys


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


def granite(header: GgufHeader) -> dict[str, Any]:
    """Dense models of Granite 4 have only the feed-forward layer that others have beside their experts."""
    reject(header, "attention.sliding_window")
    if header.get("rope.scaling.finetuned") is False:  # llama.cpp's switch of rotary positions
        raise CheckpointError(f"{header.path} has no rotary positions, which is not supported for 'granite'")
    shared = header.get("expert_shared_feed_forward_length")
    size = {"intermediate_size": shared, "shared_expert_intermediate_size": None} if shared else {}
    ignore(header, "expert_count", *(f"ssm.{key}" for key in STATE_SPACE))  # of models that have recurrent layers too
    return {"architectures": ["GraniteForCausalLM"], **size, "num_experts_per_tok": None}


def granite_moe(header: GgufHeader) -> dict[str, Any]:
    count, shared = header.get("expert_count"), header.get("expert_shared_feed_forward_length")
    if not count:
        return granite(header)
    return {
        "architectures": ["GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"],
        "num_local_experts": count,
        **({"shared_intermediate_size": shared, "shared_expert_intermediate_size": None} if shared else {}),
    }


def minicpm_3(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["MiniCPM3ForCausalLM"], **latent_sizes(header)}


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


def falcon(header: GgufHeader) -> dict[str, Any]:
    """The smaller models have one norm; in the larger ones attention and the feed-forward layer have one each."""
    return {
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": True,
        "num_kv_heads": header.get("attention.head_count_kv", 1),
        "num_ln_in_parallel_attn": 2 if has_tensor(header, ".attn_norm_2.") else 1,
    }


def mpt(header: GgufHeader) -> dict[str, Any]:
    heads, largest = scalar(header, "attention.head_count"), header.get("attention.max_alibi_bias", 0.0)
    if largest != MPT_ALIBI or scalar(header, "attention.head_count_kv") not in (None, heads):
        raise CheckpointError(
            f"{header.path} has attention.max_alibi_bias {largest} or fewer key-value heads than heads, which is not "
            f"supported; {MPT_ALIBI} and as many are"
        )
    return {"architectures": ["MptForCausalLM"], "attn_config": {"clip_qkv": header.get("attention.clamp_kqv") or None}}


def mistral_3(header: GgufHeader) -> dict[str, Any]:
    """Mistral Small 3, or Ministral 3 if its queries grow with their position."""
    beta, positions = header.get("attention.temperature_scale"), rope_parameters(header)
    multiplier = header.get(SCALING + "yarn_log_multiplier")
    reject(header, "attention.temperature_length")
    if header.get("expert_count"):
        raise CheckpointError(f"{header.path} has experts, which are not supported for {header.architecture!r}")
    if not beta:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    scales = {"mscale": multiplier, "mscale_all_dim": multiplier} if multiplier else {}
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "sliding_window": None,
        "rope_parameters": {**positions, **scales, "llama_4_scaling_beta": beta},
    }


def baichuan(header: GgufHeader) -> dict[str, Any]:
    """7B has rotary positions, 13B others; rows of Baichuan 2's head are normalized when the model is loaded."""
    return {"architectures": ["BaichuanForCausalLM"]}


def minicpm(header: GgufHeader) -> dict[str, Any]:
    """Llama's network with Granite's scales, which older files leave out."""
    hidden, heads = header.get("embedding_length"), scalar(header, "attention.head_count")
    size = header.get("attention.key_length", hidden // heads)
    if not header.get("embedding_scale") or not header.get("logit_scale"):
        raise CheckpointError(f"{header.path} has no embedding_scale or logit_scale; convert the model again")
    reject(header, "expert_count")
    return {"architectures": ["GraniteForCausalLM"], "attention_multiplier": size**-0.5}


def text_of(to_config: ToConfig) -> ToConfig:
    """The language model of one that reads images: a text has the same position in all sections of its rotation."""

    def without_images(header: GgufHeader) -> dict[str, Any]:
        ignore(header, "rope.dimension_sections", "n_deepstack_layers")
        return to_config(header)

    return without_images


def apertus(header: GgufHeader) -> dict[str, Any]:
    """The parameters of its activation are in the header (ActivationValues)."""
    return {"architectures": ["ApertusForCausalLM"], "hidden_act": "xielu"}


def deci(header: GgufHeader) -> dict[str, Any]:
    """Llama-Nemotron and DeciLM: each layer has sizes of its own, 0 for a part that it does not have."""
    heads, kv_heads = listed(header, "attention.head_count"), listed(header, "attention.head_count_kv")
    number, sizes = max(heads), listed(header, "feed_forward_length")
    if {*heads} - {0, number}:
        raise CheckpointError(f"{header.path} has attention.head_count that differs between layers: not supported")
    blocks = []
    for layer, (own, shared, size) in enumerate(zip(heads, kv_heads, sizes, strict=True)):
        if own and not shared:
            raise CheckpointError(f"layer {layer} of {header.path} has a linear layer for attention: not supported")
        attention = {"n_heads_in_group": own // shared} if own else {"no_op": True}
        blocks.append({"attention": attention, "ffn": {"intermediate_size": size} if size else {"no_op": True}})
    return {
        "architectures": ["DeciLMForCausalLM"],
        "num_attention_heads": number,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "block_configs": blocks,
    }


def bitnet(header: GgufHeader) -> dict[str, Any]:
    """BitNets of this architecture have SiLU, unless a file says otherwise; later ones have another activation."""
    return {"architectures": ["BitNetForCausalLM"], "hidden_act": header.get("hidden_activation", "silu")}


MPT_ALIBI = 8.0
STATE_SPACE = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
ARCHITECTURES: dict[str, ToConfig] = {
    "llama": llama,
    "llama4": llama_4,
    "arcee": family("ArceeForCausalLM"),
    "qwen2": family("Qwen2ForCausalLM"),
    "qwen2moe": moe("Qwen2MoeForCausalLM", norm_topk_prob=False),
    "qwen3": family("Qwen3ForCausalLM"),
    "qwen3moe": moe("Qwen3MoeForCausalLM", norm_topk_prob=True),
    "minicpm3": minicpm_3,
    "glm4": family("Glm4ForCausalLM"),
    "phi2": phi_2,
    "phi3": phi_3,
    "granite": granite,
    "granitemoe": granite_moe,
    "apertus": apertus,
    "deci": deci,
    "bitnet": bitnet,
    "jais2": family("Jais2ForCausalLM"),
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
    "hunyuan-dense": family("HunYuanDenseV1ForCausalLM"),
    "seed_oss": family("SeedOssForCausalLM"),
    "internlm2": family("LlamaForCausalLM"),
    "gpt2": family("GPT2LMHeadModel"),
    "gptneox": gpt_neox,
    "bloom": family("BloomForCausalLM"),
    "falcon": falcon,
    "mpt": mpt,
    "starcoder": family("GPTBigCodeForCausalLM"),
    "chatglm": family("GlmForCausalLM"),
    "mistral3": mistral_3,
    "baichuan": baichuan,
    "minicpm": minicpm,
    "exaone": family("LlamaForCausalLM"),
    "xverse": family("LlamaForCausalLM"),
    "qwen2vl": text_of(family("Qwen2ForCausalLM")),
    "qwen3vl": text_of(family("Qwen3ForCausalLM")),
    "qwen3vlmoe": text_of(moe("Qwen3MoeForCausalLM", norm_topk_prob=True)),
    **GEMMAS,
    **SPARSE,
    **HYBRIDS,
}
