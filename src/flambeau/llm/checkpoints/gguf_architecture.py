"""The header of a GGUF file → Architecture, by way of the config.json that the model has elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.checkpoints.gguf_encoders import find_encoder, with_encoder
from flambeau.llm.checkpoints.gguf_families import ARCHITECTURES
from flambeau.llm.checkpoints.gguf_parts import has_tensor, num_layers, scalar
from flambeau.llm.checkpoints.gguf_rope import check_rope_keys, frequency_factors, rope_parameters
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, RecordedHeader
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.config_parts import ROTARY_KEYS
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.models.families.table import FAMILIES
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
COUNTS = frozenset(  # 0: there are none
    {"num_attention_heads", "num_key_value_heads", "intermediate_size", "num_experts_per_tok"}
    | {"moe_intermediate_size", "shared_expert_intermediate_size"}
)
ENCODER = " (an encoder, which writes no text)"
OTHER_KINDS = {
    "clip": " (what reads images or sounds for another model: name that model's file)",
    "wavtokenizer-dec": " (what makes sounds)",
    **dict.fromkeys(("bert", "modern-bert", "neo-bert", "eurobert", "nomic-bert", "nomic-bert-moe"), ENCODER),
    **dict.fromkeys(("jina-bert-v2", "jina-bert-v3", "gemma-embedding", "llama-embed", "t5encoder"), ENCODER),
}
LISTED = ("deci", "gemma3n", "gemma4")  # whose layers may have different sizes
WITHOUT_EFFECT = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"})
DTYPES = {0: "float32", 1: "float16"}  # by general.file_type; others are quantized or bfloat16
ARRANGED: dict[str, Any] = {  # GGUF files hold what config.json's own files have in another arrangement
    "renames": (),
    "norm_offset": 0.0,  # the sum is stored
    "interleaved_gates": False,
    "transposed": "",
    "grouped_qkv": False,
}


def gguf_architecture(header: GgufHeader) -> Architecture:
    """The architecture of a model; raises for what is not supported."""
    name = header.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has the GGUF architecture {name!r}{OTHER_KINDS.get(name, '')}, which is not supported; use "
            f"the model's Hugging Face folder. Supported are {', '.join(ARCHITECTURES)}"
        )
    header = RecordedHeader(header.path, header.values, header.tensors)
    if header.get("attention.causal", True) is False:
        raise CheckpointError(
            f"{header.path} attends to later tokens too ({name}.attention.causal), which is not "
            "supported; use the model's Hugging Face folder"
        )
    config = {**common(header), **ARCHITECTURES[name](header)}
    config |= sizes(header, config)
    encoder = find_encoder(header)
    if encoder is not None:
        config = with_encoder(header, encoder, config)
    check_rope_keys(header)
    unread = {f"{name}.{key}": value for key, value in header.unread.items() if key not in WITHOUT_EFFECT}
    arch = from_hugging_face({**config, **{key: value for key, value in unread.items() if ".rope." not in key}})
    return replace(
        arch,
        **ARRANGED,
        qkv_bias=has_tensor(header, ".attn_q.bias", ".attn_qkv.bias", ".attn_kv_a_mqa.bias"),
        output_bias=has_tensor(header, ".attn_output.bias"),
        mlp_bias=has_tensor(header, ".ffn_down.bias"),
        recurrence=arranged_recurrence(arch),
        rope_scaling=frequency_factors(header, arch.max_length) or arch.rope_scaling,
        source={**arch.source, "quantization_config": {"quant_method": "gguf"}},
    )


def arranged_recurrence(arch: Architecture) -> Recurrence | None:
    """The recurrent layers as the files have them.

    Mamba 2 has a norm for each of its groups in GGUF files, as its authors have it; transformers has one for all.
    """
    if arch.recurrence is None or arch.recurrence.kind not in ("delta_net", "mamba2"):
        return arch.recurrence
    groups = arch.recurrence.num_groups if arch.recurrence.kind == "mamba2" else 1
    return replace(arch.recurrence, is_grouped=False, norm_groups=groups)


def common(header: GgufHeader) -> dict[str, Any]:
    """The part of config.json that all architectures have."""
    read = largest if header.architecture in LISTED else scalar
    given = {ours: read(header, key) for key, ours in KEYS.items()}
    config = {key: value for key, value in given.items() if value is not None and (value or key not in COUNTS)}
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.path} has no token_embd.weight; is it a language model, and its first file?")
    return config | {
        "num_hidden_layers": num_layers(header),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(header.end_ids),
        "torch_dtype": DTYPES.get(header.values.get("general.file_type", -1), "bfloat16"),
        "rope_parameters": rope_parameters(header),
    }


def largest(header: GgufHeader, key: str) -> Any:
    """A value that may be given for each layer, where the family reads the differences itself."""
    value = header.get(key)
    return max(value) if isinstance(value, list) else value


def sizes(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """The family's own names of what all files have, and how much of a head is rotated."""
    family = FAMILIES[config["architectures"][0]]
    found: dict[str, Any] = {}
    epsilon = header.get("attention.layer_norm_epsilon", config.get("rms_norm_eps"))
    if epsilon is not None:
        found |= {"rms_norm_eps": None, family.epsilon_key: epsilon}
    if not family.has_kv_heads:
        found["num_key_value_heads"] = None
    rotated, value = header.get("rope.dimension_count"), header.get("attention.value_length")
    if "global_head_dim" in config:
        return found  # checked with the heads of each layer
    if "kv_lora_rank" in config or "rotary_pct" in config or "num_attention_heads" not in config:
        return found  # with other names of the same, or without attention
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "head_dim" in family.defaults:
        found["head_dim"] = head_size
    if value not in (None, head_size):
        raise CheckpointError(
            f"{header.path} has attention.value_length {value} and heads of {head_size}: not supported"
        )
    if family.understands >= ROTARY_KEYS:
        found["partial_rotary_factor"] = 1.0 if rotated in (None, head_size) else (rotated + 0.01) / head_size
    elif rotated not in (None, head_size):
        raise CheckpointError(
            f"{header.path} has rope.dimension_count {rotated} and heads of {head_size}: not supported"
        )
    return found
