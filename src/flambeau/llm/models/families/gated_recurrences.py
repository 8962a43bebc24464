"""Families with gated linear recurrences between layers with attention: RecurrentGemma."""

from __future__ import annotations

import struct

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import ROTARY_KEYS, partial_rotation
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.recurrence import Recurrence


def recurrent_gemma(config: Config) -> Config:
    num_layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    types = list(config["block_types"])
    if not types or not set(types) <= {"recurrent", "attention"}:
        raise CheckpointError(f"block_types {types} are not supported; each must be one of recurrent, attention")
    size, blocks = int(config.get("lru_width") or hidden), int(config["num_attention_heads"])
    if size % blocks:
        raise CheckpointError(f"lru_width {size} cannot be divided into {blocks} blocks, as many as heads")
    recurrence = Recurrence(
        kind="gated",
        layers=frozenset(i for i in range(num_layers) if types[i % len(types)] == "recurrent"),
        inner_size=size,
        conv_width=int(config["conv1d_width"]),
        projection_bias=True,
        num_heads=blocks,
        head_size=size // blocks,
    )
    return {
        **partial_rotation(config),
        "recurrence": recurrence,
        "intermediate_size": int(config["intermediate_size"]) // 2,
        "embedding_scale": in_bfloat16(hidden**0.5),
        "logit_softcap": config["logits_soft_cap"],
    }


def in_bfloat16(number: float) -> float:
    """The nearest number of bfloat16, whatever the type of the network."""
    [bits] = struct.unpack("<I", struct.pack("<f", number))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


GATED_RECURRENCES = {
    "RecurrentGemmaForCausalLM": Family(
        model_type="recurrent_gemma",
        output_bias=True,
        windowed="all",
        switches_window=False,
        names_layers=False,
        parts={"norm_offset": 1.0, "mlp_bias": True},
        derive=recurrent_gemma,
        understands=ROTARY_KEYS
        | {"w_init_variance_scale", "final_w_init_variance_scale", "_block_types", "max_position_embeddings"},
        activation_key="hidden_activation",
        aliases={"attention_window_size": "sliding_window", "_block_types": "block_types"},
        renames=(
            (r"^model\.final_norm\.", "model.norm."),
            (r"\.temporal_pre_norm\.", ".input_layernorm."),
            (r"\.channel_pre_norm\.", ".post_attention_layernorm."),
            (r"\.mlp_block\.", ".mlp."),
            (r"\.temporal_block\.rg_lru\.", ".mixer."),
            (r"\.temporal_block\.conv_1d\.", ".mixer.conv1d."),
            (r"\.temporal_block\.linear_(x|y)\.", r".mixer.in_proj_\1."),
            (r"\.temporal_block\.linear_out\.", ".mixer.out_proj."),
            (r"\.temporal_block\.(q|k|v|o)_proj\.", r".self_attn.\1_proj."),
        ),
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,  # there is no limit: attention has a window
            "sliding_window": 2048,
            "block_types": ["recurrent", "recurrent", "attention"],
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
    ),
}
