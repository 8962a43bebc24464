"""Tiny random checkpoints of every family, written by transformers, and what transformers finds for them.

Importing transformers takes seconds: it is imported by the first test that compares with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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


@dataclass(frozen=True)
class Kind:
    """A class of models in transformers, and how its tiny one differs from the others."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)


def stretched(rope_type: str, **options: Any) -> dict[str, Any]:
    """Rotary positions of a model that was trained on 16 tokens, or told so."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **options}}


YARN = {"original_max_position_embeddings": 32}
KINDS = {
    "llama-2": Kind("Llama", {"num_key_value_heads": 4}),
    "llama-3": Kind("Llama", {"rope_theta": 500000.0}),
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
    "smol-lm-3": Kind("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": None}),
}


def reference(kind: str, seed: int = 0) -> Any:
    """A random network of transformers; its weights lie far enough apart that choices are no matter of rounding."""
    import transformers

    options = {**TINY, **KINDS[kind].options}
    if "rope_parameters" in options:
        del options["rope_theta"]
    config = getattr(transformers, f"{KINDS[kind].family}Config")(**options, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{KINDS[kind].family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    return model


def write_checkpoint(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A folder as transformers writes it, and the network it was written from."""
    model = reference(kind).to(dtype)
    model.save_pretrained(folder, **options)
    return model


def read_checkpoint(folder: Path) -> Any:
    """A folder as transformers reads it, in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
