"""Families with Mamba 1 or 2 and attention, in different layers or side by side."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import LLAMA_TOKENS, ROTARY_KEYS, expert_groups, granite
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.granite_experts import GRANITE_MOE_DEFAULTS, GRANITE_MOE_NAMES
from flambeau.llm.models.families.layer_types import ATTENTION_TYPES, RECURRENT_TYPES, SILU, named_layers
from flambeau.llm.models.families.recurrence import MixerNorm
from flambeau.llm.models.families.state_space import (
    KERNEL_KEYS,
    MAMBA_2_DEFAULTS,
    MAMBA_KEYS,
    mamba_1_layers,
    mamba_2_layers,
)


def granite_hybrid(config: Config) -> Config:
    """Experts beside the shared feed-forward layer, or that layer alone."""
    num_layers, num_experts = config["num_hidden_layers"], int(config.get("num_local_experts") or 0)
    num_chosen = int(config["num_experts_per_tok"])
    types = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * num_layers
    shared = int(config["shared_intermediate_size"])
    is_rotated = config.get("position_embedding_type") == "rope"
    parts = {
        **granite(config),
        "recurrence": mamba_2_layers(config, named_layers(types, num_layers)),
        "unrotated_layers": frozenset() if is_rotated else frozenset(range(num_layers)),
    }
    if not num_experts:
        return {**parts, "intermediate_size": shared, "renames": DENSE_GRANITE_NAMES}
    return {
        **parts,
        "num_experts": num_experts,
        "num_experts_per_token": num_chosen,
        "expert_size": int(config["intermediate_size"]),
        "shared_expert_size": shared,
    }


def nemotron_h(config: Config) -> Config:
    """Each layer is a recurrence, attention, a feed-forward layer or experts, and nothing else."""
    types = config.get("layers_block_type")
    if types is None:
        pattern = config.get("hybrid_override_pattern") or "ME*-"
        types = [NEMOTRON_LAYERS.get(sign, sign) for sign in pattern]
    unknown = sorted(set(types) - {"mlp", "moe", *ATTENTION_TYPES, *RECURRENT_TYPES})
    if unknown:
        raise CheckpointError(f"layers of the types {', '.join(unknown)} are not supported")
    layers = frozenset(range(len(types)))
    recurrence = mamba_2_layers(
        {
            **config,
            "mamba_d_ssm": int(config["mamba_n_heads"]) * int(config["mamba_d_head"]),
            "time_step_limit": (float(config["time_step_min"]), math.inf),
        },
        frozenset(i for i in layers if types[i] in RECURRENT_TYPES),
    )
    parts: dict[str, Any] = {
        "num_layers": len(types),
        "unrotated_layers": layers,
        "recurrence": recurrence,
        "feed_forward_layers": frozenset(i for i in layers if types[i] in ("mlp", "moe")),
    }
    if "moe" not in types:
        return parts
    if config.get("mlp_bias"):
        raise CheckpointError("mlp_bias is not supported for layers with experts")
    return parts | {
        **expert_groups(config),
        "num_experts": int(config["n_routed_experts"]),
        "num_experts_per_token": int(config["num_experts_per_tok"]),
        "expert_size": int(config["moe_intermediate_size"]),
        "shared_expert_size": int(config["moe_shared_expert_intermediate_size"]),
        "expert_latent_size": int(config.get("moe_latent_size") or 0),
        "normalizes_experts": bool(config["norm_topk_prob"]),
        "routed_scale": float(config["routed_scaling_factor"]),
        "router": "biased_sigmoid",
        "dense_layers": frozenset(i for i in layers if types[i] != "moe"),
    }


def bamba(config: Config) -> Config:
    """Half of each head is rotated, whatever the keys of its rotary positions say."""
    num_layers, attending = config["num_hidden_layers"], config.get("attn_layer_indices") or ()
    size = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
    if config.get("attn_rotary_emb") not in (None, size):
        raise CheckpointError(f"attn_rotary_emb {config['attn_rotary_emb']} is not supported; only half a head, {size}")
    layers = frozenset(range(num_layers)) - frozenset(attending)
    return {"recurrence": mamba_2_layers(config, layers), "rotary_size": size}


def falcon_h1(config: Config) -> Config:
    """Attention and Mamba 2 side by side in every layer, with a factor almost everywhere."""
    if bool(config["projectors_bias"]) != bool(config["mamba_proj_bias"]):
        raise CheckpointError("projectors_bias must be the same as mamba_proj_bias; another value is not supported")
    is_early = bool(config["mamba_norm_before_gate"])
    norm: MixerNorm = ("before_gate" if is_early else "after_gate") if config["mamba_rms_norm"] else "none"
    part_scales = tuple(float(scale) for scale in config.get("ssm_multipliers") or ())
    if len(part_scales) not in (0, 5):
        raise CheckpointError(f"ssm_multipliers must be 5 numbers, not {len(part_scales)}")
    recurrence = replace(
        mamba_2_layers(config, frozenset(range(config["num_hidden_layers"]))),
        is_beside_attention=True,
        norm=norm,
        input_scale=float(config["ssm_in_multiplier"]),
        part_scales=part_scales,
        output_scale=float(config["ssm_out_multiplier"]),
    )
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    gate_scale, down_scale = config.get("mlp_multipliers") or (1.0, 1.0)
    return {
        "recurrence": recurrence,
        "attention_scale": head_size**-0.5 * float(config["key_multiplier"]),
        "attention_input_scale": float(config["attention_in_multiplier"]),
        "attention_output_scale": float(config["attention_out_multiplier"]),
        "mlp_scales": (float(gate_scale), float(down_scale)),
        "embedding_scale": float(config["embedding_multiplier"]),
        "logit_scale": float(config["lm_head_multiplier"]),
    }


def jamba(config: Config) -> Config:
    num_layers = config["num_hidden_layers"]
    period, offset = int(config["attn_layer_period"]), int(config["attn_layer_offset"])
    expert_period, expert_offset = int(config["expert_layer_period"]), int(config["expert_layer_offset"])
    layers = frozenset(i for i in range(num_layers) if i % period != offset)
    recurrence = replace(mamba_1_layers(config, layers), inner_norms="learned")
    num_experts, num_chosen = int(config["num_experts"]), int(config["num_experts_per_tok"])
    if num_experts == 1:
        return {"recurrence": recurrence}
    return {
        "recurrence": recurrence,
        "num_experts": num_experts,
        "num_experts_per_token": num_chosen,
        "expert_size": int(config["intermediate_size"]),
        "normalizes_experts": False,
        "dense_layers": frozenset(i for i in range(num_layers) if i % expert_period != expert_offset),
    }


MIXER_NAMES = ((r"\.mamba\.", ".mixer."),)
DENSE_GRANITE_NAMES = (
    *MIXER_NAMES,
    (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
)
LATE_NAMES = (  # of Jamba and Bamba
    *MIXER_NAMES,
    (r"^model\.final_layernorm\.", "model.norm."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.router\.", ".mlp.gate."),
)
NEMOTRON_LAYERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}

MAMBA_HYBRIDS = {
    "NemotronHForCausalLM": Family(
        model_type="nemotron_h",
        is_rotated=False,
        parts={"has_mlp": False, "has_gate": False},
        derive=nemotron_h,
        understands=MAMBA_KEYS
        | KERNEL_KEYS
        | {"chunk_size", "expand", "mamba_expand", "mamba_proj_bias", "mamba_dt_limit", "time_step_limit"}
        | {"residual_in_fp32", "rescale_prenorm_residual", "n_shared_experts", "moe_shared_expert_overlap"}
        | {
            "moe_latent_size",
            "num_nextn_predict_layers",
            "mtp_layers_block_type",
            "mtp_hybrid_override_pattern",
            "num_hidden_layers",
        }
        | {"hybrid_override_pattern", "rope_theta", "partial_rotary_factor", "attention_head_dim", "norm_eps"},
        supported={
            "mamba_hidden_act": (None, *SILU),
            "mamba_ssm_cache_dtype": (None, "float32"),
            "sliding_window": (None,),
        },
        epsilon_key="layer_norm_epsilon",
        activation_key="mlp_hidden_act",
        aliases={
            "ssm_state_size": "mamba_d_state",
            "mamba_num_heads": "mamba_n_heads",
            "mamba_head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "use_bias": "mamba_proj_bias",
            "num_local_experts": "n_routed_experts",
            "layer_types": "layers_block_type",
        },
        renames=(
            (r"^(backbone|model)\.embeddings\.", "model.embed_tokens."),
            (r"^(backbone|model)\.norm_f\.", "model.norm."),
            (r"^(?:backbone|model)\.layers\.(\d+)\.norm\.", r"model.layers.\1.input_layernorm."),
            (r"^backbone\.", "model."),
            (r"\.mixer\.([qkvo])_proj\.", r".self_attn.\1_proj."),
            (r"\.mixer\.gate\.e_score_correction_bias$", ".mlp.score_bias"),
            (r"\.mixer\.shared_experts\.", ".mlp.shared_expert."),
            (r"\.mixer\.(up_proj|down_proj|experts|gate|fc[12]_latent_proj)\b", r".mlp.\1"),
        ),
        defaults={
            **MAMBA_2_DEFAULTS,
            "hidden_size": 4096,
            "num_hidden_layers": 1,  # counted by the types of layers
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_head": 64,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            **LLAMA_TOKENS,
        },
    ),
    "GraniteMoeHybridForCausalLM": Family(
        model_type="granitemoehybrid",
        derive=granite_hybrid,
        understands=MAMBA_KEYS | {"init_method", "layers_block_type"},
        supported={"hidden_act": SILU, "normalization_function": (None, "rmsnorm")},
        renames=(*MIXER_NAMES, *GRANITE_MOE_NAMES),
        defaults={**GRANITE_MOE_DEFAULTS, **MAMBA_2_DEFAULTS, "shared_intermediate_size": 1024},
    ),
    "BambaForCausalLM": Family(
        model_type="bamba",
        derive=bamba,
        understands=MAMBA_KEYS | ROTARY_KEYS | KERNEL_KEYS | {"z_loss_coefficient", "layer_types"},
        supported={"hidden_act": SILU},
        renames=LATE_NAMES,
        defaults={
            **MAMBA_2_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            **LLAMA_TOKENS,
        },
    ),
    "FalconH1ForCausalLM": Family(
        model_type="falcon_h1",
        derive=falcon_h1,
        understands=MAMBA_KEYS | KERNEL_KEYS | {"mlp_expansion_factor", "mamba_expand"},
        supported={"hidden_act": SILU, "mamba_use_mlp": (None, True), "attn_layer_indices": (None,)},
        renames=LATE_NAMES,
        defaults={
            **MAMBA_2_DEFAULTS,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "key_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
            **LLAMA_TOKENS,
        },
    ),
    "JambaForCausalLM": Family(
        model_type="jamba",
        qkv_bias=False,
        output_bias=False,
        is_rotated=False,
        derive=jamba,
        understands=KERNEL_KEYS,
        supported={"hidden_act": SILU},
        renames=LATE_NAMES,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            **LLAMA_TOKENS,
        },
    ),
}
