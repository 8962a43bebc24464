"""The supported model families, and the settings that their config.json leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flambeau.llm.errors import CheckpointError

Config = Mapping[str, Any]
WindowedLayers = Literal["none", "all", "late", "unrotated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Settings of a class of models that its config.json does not contain."""

    model_type: str
    qkv_bias: bool | None = None  # None: set by `attention_bias`
    output_bias: bool | None = None
    qk_norm: bool = False
    windowed: WindowedLayers = "none"  # the layers limited to `sliding_window`
    switches_window: bool = True  # `use_sliding_window` turns the window on
    experts: bool = False
    defaults: Config = field(default_factory=dict)  # of keys that config.json may leave out


FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama", defaults={"eos_token_id": 2, "bos_token_id": 1}),
    "MistralForCausalLM": Family(
        model_type="mistral",
        qkv_bias=False,
        output_bias=False,
        windowed="all",
        switches_window=False,
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        qkv_bias=False,
        output_bias=False,
        windowed="all",
        switches_window=False,
        experts=True,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        qkv_bias=True,
        output_bias=False,
        windowed="late",
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qk_norm=True,
        windowed="late",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        qk_norm=True,
        windowed="all",
        experts=True,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        windowed="unrotated",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "eos_token_id": 128001,
            "bos_token_id": 128000,
        },
    ),
}


def family_of(config: Config) -> Family:
    """The family named by `architectures`, else by `model_type`."""
    names = config.get("architectures")
    if names:
        names = [str(name) for name in names] if isinstance(names, list) else [str(names)]
        found = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    else:
        found = next((f for f in FAMILIES.values() if f.model_type == config.get("model_type")), None)
    if found is None:
        what = " and ".join(names) if names else f"model_type {config.get('model_type')!r}"
        raise CheckpointError(f"{what} is not supported; supported are {', '.join(FAMILIES)}")
    return found
