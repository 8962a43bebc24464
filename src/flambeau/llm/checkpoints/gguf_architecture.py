"""The header of a GGUF file → Architecture, by way of the config.json that the model has elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flambeau.llm.checkpoints.gguf_weights import read_tensor
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader
from flambeau.llm.models.architecture import Architecture, RopeScaling
from flambeau.llm.models.hugging_face import from_hugging_face

KEYS = {  # of every architecture: GGUF's name → that of config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
WITHOUT_EFFECT = frozenset(
    {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.finetuned", "rope.scale_linear"}
)
SCALING = "rope.scaling."
SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NEUTRAL = {SCALING + "yarn_attn_factor": 1.0, SCALING + "yarn_ext_factor": 1.0, SCALING + "yarn_log_multiplier": 0.0}
DTYPES = {0: "float32", 1: "float16"}  # by general.file_type; others are quantized or bfloat16
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale queries by another size


def gguf_architecture(header: GgufHeader) -> Architecture:
    """The architecture of a model; raises for what is not supported."""
    name = header.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has the GGUF architecture {name!r}, which is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}. Use the model in Hugging Face format"
        )
    config = {**common(header), **ARCHITECTURES[name](header)}
    arch = from_hugging_face(config)
    return replace(
        arch,
        renames=(),  # of the family's own files
        norm_offset=0.0,  # GGUF files hold the sum
        qkv_bias="blk.0.attn_q.bias" in header.tensors or "blk.0.attn_qkv.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        rope_scaling=frequency_factors(header, arch.max_length) or arch.rope_scaling,
        source={**arch.source, "quantization_config": {"quant_method": "gguf"}},
    )


def common(header: GgufHeader) -> dict[str, Any]:
    """The part of config.json that all architectures have."""
    config = {ours: scalar(header, key) for key, ours in KEYS.items() if header.get(key) is not None}
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.path} has no token_embd.weight; is it a language model, and its first file?")
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.get(key, head_size) != head_size:
            raise CheckpointError(f"{header.path} has {key} {header.get(key)} and heads of {head_size}: not supported")
    config |= {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(header.end_ids),
        "torch_dtype": DTYPES.get(header.values.get("general.file_type", -1), "bfloat16"),
        "rope_parameters": rope_parameters(header),
    }
    known, start = known_keys(), f"{header.architecture}."
    return config | {
        key: value
        for key, value in header.values.items()
        if key.startswith(start) and key.removeprefix(start) not in known
    }


def known_keys() -> set[str]:
    """The keys of an architecture that are understood."""
    return {*KEYS, *WITHOUT_EFFECT, *OWN_KEYS, *NEUTRAL, SCALING + "type", *(SCALING + key for key in SCALING_KEYS)}


def scalar(header: GgufHeader, key: str) -> Any:
    """A value that may be given for each layer, but must be the same for all."""
    value = header.get(key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(f"{header.path} has {key} that differs between layers, which is not supported")
    return value[0]


def rope_parameters(header: GgufHeader) -> dict[str, Any]:
    """The settings of rotary positions, as config.json has them."""
    check_rope_keys(header)
    kind = header.get("rope.scaling.type") or "none"
    theta = {"rope_theta": header.get("rope.freq_base", 10000.0)}
    if header.get("rope.scale_linear", 1.0) != 1.0:
        raise CheckpointError(f"{header.path} has rope.scale_linear, which is not supported; convert the model again")
    if kind == "none":
        return theta
    if kind != "longrope" and header.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise CheckpointError(f"{header.path} has rope.scaling.attn_factor, which is not supported for {kind!r}")
    given = {ours: header.get(SCALING + key) for key, ours in SCALING_KEYS.items()}
    parameters = {"rope_type": kind, **theta, **{key: value for key, value in given.items() if value is not None}}
    if kind == "longrope":
        for name in ("long", "short"):
            parameters[f"{name}_factor"] = numbers(header, f"rope_factors_{name}.weight")
        parameters["attention_factor"] = header.get("rope.scaling.attn_factor")
    return parameters


def check_rope_keys(header: GgufHeader) -> None:
    """Raise for settings of positions that are not known: they would change the result."""
    start = f"{header.architecture}.rope."
    known = known_keys() - NEUTRAL.keys()
    for name, value in header.values.items():
        key = name.removeprefix(f"{header.architecture}.")
        if name.startswith(start) and key not in known and value != NEUTRAL.get(key):
            raise CheckpointError(f"{header.path} has {key} {value}, which is not supported")


def numbers(header: GgufHeader, name: str) -> list[float]:
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} has no {name}, which its rotary positions need")
    return [float(value) for value in read_tensor(header.path, header.tensors[name]).tolist()]


def frequency_factors(header: GgufHeader, length: int) -> RopeScaling | None:
    """Llama 3's scaling: the file has a divisor for each frequency."""
    if "rope_freqs.weight" not in header.tensors:
        return None
    factors = tuple(numbers(header, "rope_freqs.weight"))
    return RopeScaling(
        kind="longrope",
        factor=1.0,
        original_length=length,
        attention_factor=1.0,
        short_factors=factors,
        long_factors=factors,
    )


# ---- architectures ----


def family(name: str, **more: Any) -> Callable[[GgufHeader], dict[str, Any]]:
    """An architecture without keys of its own."""

    def to_config(header: GgufHeader) -> dict[str, Any]:
        reject(header, "attention.sliding_window")
        return {"architectures": [name], **more}

    return to_config


def reject(header: GgufHeader, key: str) -> None:
    if header.get(key):
        raise CheckpointError(f"{header.path} has {key}, which is not supported for {header.architecture!r}")


def llama(header: GgufHeader) -> dict[str, Any]:
    reject(header, "attention.sliding_window")
    if not header.get("expert_count"):
        return {"architectures": ["LlamaForCausalLM"]}
    return {"architectures": ["MixtralForCausalLM"], "num_local_experts": header.get("expert_count")}


def moe(name: str, **more: Any) -> Callable[[GgufHeader], dict[str, Any]]:
    return lambda header: {**family(name)(header), "num_experts": header.get("expert_count"), **more}


def gemma(header: GgufHeader) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"]}


def gemma_2(header: GgufHeader) -> dict[str, Any]:
    window = header.get("attention.sliding_window")
    return {"architectures": ["Gemma2ForCausalLM"], "sliding_window": window, **query_scale(header)}


def gemma_3(header: GgufHeader) -> dict[str, Any]:
    local = header.get("rope.freq_base_swa", 10000.0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": header.get("attention.sliding_window"),
        **query_scale(header),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **rope_parameters(header)},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def query_scale(header: GgufHeader) -> dict[str, Any]:
    """The size by whose root queries are scaled: that of a head, except in the largest models."""
    is_largest = header.get("block_count") == GEMMA_27B[header.architecture]
    by_head = header.get("embedding_length") // scalar(header, "attention.head_count")
    return {"query_pre_attn_scalar": by_head if is_largest else header.get("attention.key_length", by_head)}


def phi_3(header: GgufHeader) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": header.get("attention.sliding_window") or None,  # 0: there is none
        "original_max_position_embeddings": header.get(SCALING + "original_context_length"),
    }


OWN_KEYS = frozenset({"expert_count", "attention.sliding_window", "rope.freq_base_swa", "rope.scaling.attn_factor"})
ARCHITECTURES: dict[str, Callable[[GgufHeader], dict[str, Any]]] = {
    "llama": llama,
    "qwen2": family("Qwen2ForCausalLM"),
    "qwen2moe": moe("Qwen2MoeForCausalLM", norm_topk_prob=False),
    "qwen3": family("Qwen3ForCausalLM"),
    "qwen3moe": moe("Qwen3MoeForCausalLM", norm_topk_prob=True),
    "gemma": gemma,
    "gemma2": gemma_2,
    "gemma3": gemma_3,
    "phi3": phi_3,
    "granite": family("GraniteForCausalLM"),
    "smollm3": family("SmolLM3ForCausalLM"),
    "olmo2": family("Olmo2ForCausalLM"),
}
