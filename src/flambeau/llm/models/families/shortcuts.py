"""LongCat: two layers of latent attention share experts, some of which give their inputs."""

from __future__ import annotations

import re

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.latent import ALIASES, DEEPSEEK_DEFAULTS, latent_attention

SCALES = ("mla_scale_q_lora", "mla_scale_kv_lora")  # whether latents are scaled


def with_single_layers(config: Config) -> Config:
    """A layer of the files is two layers here, each with attention and a feed-forward layer."""
    found = dict(config)
    if found.get("num_layers") is not None:
        found["num_hidden_layers"] = 2 * found.pop("num_layers")
    if found.get("zero_expert_num") is None:
        found["zero_expert_num"] = 0
    return found


def longcat(config: Config) -> Config:
    if config["num_hidden_layers"] % 2:
        raise CheckpointError("num_hidden_layers must be even: it counts two layers for each of num_layers")
    if not config.get("q_lora_rank"):
        raise CheckpointError("q_lora_rank is needed here: queries come from latents")
    parts, hidden = latent_attention(config), config["hidden_size"]
    query, latent = (config.get(key) in (None, True) for key in SCALES)
    query_scale = (hidden / config["q_lora_rank"]) ** 0.5 if query else 1.0
    return {
        **parts,
        "attention_scale": parts["attention_scale"] * query_scale,
        "latent_scale": (hidden / config["kv_lora_rank"]) ** 0.5 if latent else 1.0,
        "num_zero_experts": int(config["zero_expert_num"]),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": frozenset(range(config["num_hidden_layers"])),  # beside the shared experts
    }


def to_single_layer(found: re.Match[str]) -> str:
    """The name of a part of one of two attentions or feed-forward layers."""
    part = "mlp" if found[2] == "mlps" else found[2]
    return f".layers.{2 * int(found[1]) + int(found[3])}.{part}."


def to_first_layer(found: re.Match[str]) -> str:
    """The name of a part of the experts."""
    return f".layers.{2 * int(found[1])}.shortcut."


LONGCAT = {
    "LongcatFlashForCausalLM": Family(
        model_type="longcat_flash",
        has_kv_heads=False,
        qkv_bias=False,
        experts=True,
        arrange=with_single_layers,
        parts={
            "has_shortcuts": True,
            "paired_rope": True,
            "router": "biased_softmax",
            "unused": r"^model\.mtp\.",
        },
        derive=longcat,
        understands=frozenset({"qk_head_dim", "num_local_experts", "mtp_num_layers"}),
        supported={
            "attention_method": (None, "MLA"),
            "attention_bias": (None, False),
            "router_bias": (None, False),
            "zero_expert_type": (None, "identity"),
            "norm_topk_prob": (None, False),
        },
        aliases={
            **ALIASES,
            "n_routed_experts": "num_experts",
            "moe_topk": "num_experts_per_tok",
            "ffn_hidden_size": "intermediate_size",
            "expert_ffn_hidden_size": "moe_intermediate_size",
        },
        renames=(
            (r"\.layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.", to_single_layer),
            (r"\.layers\.(\d+)\.mlp\.(?=experts\.|router\.)", to_first_layer),
            (r"\.shortcut\.router\.classifier\.", ".shortcut.gate."),
            (r"\.shortcut\.router\.e_score_correction_bias$", ".shortcut.score_bias"),
        ),
        defaults={
            **DEEPSEEK_DEFAULTS,
            "hidden_size": 6144,
            "num_hidden_layers": 56,
            "num_attention_heads": 64,
            "intermediate_size": 12288,
            "vocab_size": 131072,
            "max_position_embeddings": 131072,
            "rope_theta": 1e7,
            "rms_norm_eps": 1e-5,
            "num_experts": 512,
            "num_experts_per_tok": 12,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": False,
            "zero_expert_num": 256,
            "routed_scaling_factor": 6.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
