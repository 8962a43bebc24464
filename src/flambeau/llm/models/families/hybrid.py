"""Families with recurrent layers, alone or between layers with attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    LLAMA_TOKENS,
    ROTARY_KEYS,
    expert_groups,
    granite,
    partial_rotation,
)
from flambeau.llm.models.families.experts import GRANITE_MOE_DEFAULTS, GRANITE_MOE_NAMES
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.recurrence import MixerNorm, Recurrence

ATTENTION_TYPES = ("full_attention", "attention")
RECURRENT_TYPES = ("linear_attention", "mamba", "conv")


def named_layers(types: object, num_layers: int) -> frozenset[int]:
    """The recurrent layers in a list of the types of all layers."""
    known = ATTENTION_TYPES + RECURRENT_TYPES
    if not isinstance(types, list | tuple) or len(types) != num_layers or not set(types) <= set(known):
        raise CheckpointError(f"layer_types must name {num_layers} layers, each one of {', '.join(known)}")
    return frozenset(i for i, kind in enumerate(types) if kind in RECURRENT_TYPES)


def mamba_2_layers(config: Config, layers: frozenset[int]) -> Recurrence:
    """Mamba 2 by the keys that hybrid models have for it."""
    inner = int(config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"])
    heads, groups = int(config["mamba_n_heads"]), int(config["mamba_n_groups"])
    named = config["mamba_d_head"]
    size = inner // heads if named == "auto" else int(named)
    if heads * size != inner or heads % groups:
        raise CheckpointError(
            f"{heads} heads of size {size} in {groups} groups do not fit {inner} channels, which is mamba_expand times "
            "hidden_size, or mamba_d_ssm"
        )
    return Recurrence(
        kind="mamba2",
        layers=layers,
        inner_size=inner,
        conv_width=int(config["mamba_d_conv"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        projection_bias=bool(config["mamba_proj_bias"]),
        num_heads=heads,
        head_size=size,
        state_size=int(config["mamba_d_state"]),
        num_groups=groups,
        time_step_limits=time_step_limits(config),
    )


def time_step_limits(config: Config) -> tuple[float, float]:
    """`time_step_limit`; JSON has no infinity, and transformers writes it as an object."""
    given = config["time_step_limit"] or (0.0, math.inf)
    low, high = (float(end["__float__"] if isinstance(end, dict) else end) for end in given)
    return low, high


def mamba_2(config: Config) -> Config:
    """Each group has a norm of its own, as in the original code; transformers has one norm for all of them."""
    recurrence = mamba_2_layers(config, frozenset(range(config["num_hidden_layers"])))
    grouped = replace(recurrence, norm_groups=recurrence.num_groups)
    return {"recurrence": grouped, "wide_residual": bool(config["residual_in_fp32"])}


def mamba_1_layers(config: Config, layers: frozenset[int]) -> Recurrence:
    """Mamba 1 by the keys that hybrid models have for it, and without norms inside."""
    hidden, rank = config["hidden_size"], config["mamba_dt_rank"]
    return Recurrence(
        kind="mamba",
        layers=layers,
        inner_size=int(config["mamba_expand"] * hidden),
        conv_width=int(config["mamba_d_conv"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        projection_bias=bool(config["mamba_proj_bias"]),
        state_size=int(config["mamba_d_state"]),
        time_step_rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
    )


def mamba_1(config: Config) -> Config:
    layers = frozenset(range(config["num_hidden_layers"]))
    return {"recurrence": mamba_1_layers(config, layers), "wide_residual": bool(config["residual_in_fp32"])}


def falcon_mamba(config: Config) -> Config:
    parts = mamba_1(config)
    norms = {"inner_norms": "plain", "inner_epsilon": float(config["mixer_rms_eps"])}
    return {**parts, "recurrence": replace(parts["recurrence"], **norms)}


def lfm2(config: Config) -> Config:
    num_layers, size = config["num_hidden_layers"], int(config["intermediate_size"])
    types = config.get("layer_types")
    if types is None:
        named = config.get("full_attn_idxs")
        attending = range(num_layers) if named is None else named
        types = ["full_attention" if i in attending else "conv" for i in range(num_layers)]
    if config.get("block_auto_adjust_ff_dim"):
        size = int(2 * size / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiple = int(config["block_multiple_of"])
            size = -(-int(config["block_ffn_dim_multiplier"] * size) // multiple) * multiple
    has_bias = bool(config["conv_bias"])
    recurrence = Recurrence(
        kind="short_conv",
        layers=named_layers(types, num_layers),
        inner_size=config["hidden_size"],
        conv_width=int(config["conv_L_cache"]),
        conv_bias=has_bias,
        projection_bias=has_bias,
    )
    return {"recurrence": recurrence, "intermediate_size": size}


def lfm2_moe(config: Config) -> Config:
    return {
        **lfm2(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": frozenset(range(int(config["num_dense_layers"]))),
    }


def delta_nets(config: Config) -> Recurrence:
    """Gated delta nets between layers with attention."""
    num_layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        every = int(config["full_attention_interval"])
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    heads, key_heads = int(config["linear_num_value_heads"]), int(config["linear_num_key_heads"])
    if heads % key_heads:
        raise CheckpointError(f"linear_num_value_heads {heads} must be a multiple of linear_num_key_heads, {key_heads}")
    return Recurrence(
        kind="delta_net",
        layers=named_layers(types, num_layers),
        inner_size=heads * int(config["linear_value_head_dim"]),
        conv_width=int(config["linear_conv_kernel_dim"]),
        conv_bias=False,
        num_heads=heads,
        head_size=int(config["linear_value_head_dim"]),
        state_size=int(config["linear_key_head_dim"]),
        num_groups=key_heads,
    )


def qwen_3_next(config: Config) -> Config:
    return {
        **partial_rotation(config),
        "recurrence": delta_nets(config),
        "shared_expert_size": int(config["shared_expert_intermediate_size"]),
    }


def qwen_3_5(config: Config) -> Config:
    return {**partial_rotation(config), "recurrence": replace(delta_nets(config), is_grouped=False)}


def qwen_3_5_moe(config: Config) -> Config:
    return {**qwen_3_5(config), "shared_expert_size": int(config["shared_expert_intermediate_size"])}


def olmo_hybrid(config: Config) -> Config:
    """Layers with attention have no rotary positions if the theta of these is null."""
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    key_heads = config.get("linear_num_key_heads") or heads
    key_size = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / key_heads)
    named = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_size,
    }
    if config.get("layer_types") is None and num_layers < config["full_attention_interval"]:
        named["layer_types"] = ["linear_attention"] * (num_layers - 1) + ["full_attention"]
    recurrence = replace(
        delta_nets({**config, **named}),
        is_grouped=False,
        max_beta=2.0 if config["linear_allow_neg_eigval"] else 1.0,
        inner_epsilon=1e-5,
    )
    is_rotated = (config.get("rope_parameters") or {}).get("rope_theta", 1) is not None
    return {
        "recurrence": recurrence,
        "unrotated_layers": frozenset() if is_rotated else frozenset(range(num_layers)),
    }


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
    heads, groups = int(config["mamba_n_heads"]), int(config["mamba_n_groups"])
    recurrence = mamba_2_layers(
        {
            **config,
            "mamba_d_ssm": heads * int(config["mamba_d_head"]),
            "time_step_limit": (float(config["time_step_min"]), math.inf),
        },
        frozenset(i for i in layers if types[i] in RECURRENT_TYPES),
    )
    parts: dict[str, Any] = {
        "num_layers": len(types),
        "unrotated_layers": layers,
        "recurrence": replace(recurrence, norm_groups=groups),
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
        norm_groups=int(config["mamba_n_groups"]),
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
MAMBA_2_DEFAULTS = {
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}
# How a prompt is cut into chunks, and how weights were initialized, has no effect on what is computed.
MAMBA_KEYS = frozenset({"mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"})
KERNEL_KEYS = frozenset(
    {"mamba_dt_rank", "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep"}
)
SILU = ("swish", "silu")  # the activation of the convolutions

MAMBA_1 = Family(
    model_type="mamba",
    parts={"has_mlp": False},
    derive=mamba_1,
    understands=MAMBA_KEYS
    | KERNEL_KEYS
    | {"chunk_size", "rescale_prenorm_residual", "time_step_init_scheme", "time_step_scale", "rms_norm"}
    | {"d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "norm_before_gate"},
    supported={"hidden_act": SILU},
    epsilon_key="layer_norm_epsilon",
    aliases={
        "expand": "mamba_expand",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "time_step_rank": "mamba_dt_rank",
    },
    renames=(
        (r"^backbone\.embeddings?\.", "model.embed_tokens."),
        (r"^backbone\.norm_f\.", "model.norm."),
        (r"^backbone\.layers\.(\d+)\.norm\.", r"model.layers.\1.input_layernorm."),
        (r"^backbone\.", "model."),
    ),
    defaults={
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_dt_rank": "auto",
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
        "num_attention_heads": 1,  # there is no attention, and no feed-forward layer
        "head_dim": 2,
        "intermediate_size": 1,
        "max_position_embeddings": 131072,  # there is no limit
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
)
LFM_2 = Family(
    model_type="lfm2",
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    derive=lfm2,
    understands=frozenset(
        {
            "block_dim",
            "block_mlp_init_scale",
            "block_out_init_scale",
            "block_use_xavier_init",
            "block_norm_eps",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "block_ffn_dim_multiplier",  # of sizes that are adjusted, as the next
            "block_multiple_of",
            "num_heads",
            "theta",
            "full_attn_idxs",
        }
    ),
    supported={"use_pos_enc": (None, True), "block_use_swiglu": (None, True)},
    epsilon_key="norm_eps",
    aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    renames=(
        (r"^model\.embedding_norm\.", "model.norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),
        (r"\.conv\.conv\.", ".mixer.conv1d."),
        (r"\.conv\.(in|out)_proj\.", r".mixer.\1_proj."),
    ),
    defaults={
        "norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        **LLAMA_TOKENS,
    },
)

NEMOTRON_LAYERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DELTA_NET_NAMES = ((r"\.linear_attn\.", ".mixer."),)
QWEN_3_5 = Family(
    model_type="qwen3_5_text",
    qk_norm=True,
    parts={"norm_offset": 1.0, "gates_attention": True},
    derive=qwen_3_5,
    # A text has the same position in all sections of mrope; layers for further tokens are not used.
    understands=ROTARY_KEYS
    | {"full_attention_interval", "mrope_section", "mrope_interleaved", "mtp_num_hidden_layers"}
    | {"mtp_use_dedicated_embeddings", "unsloth_fixed_mtp"},
    supported={
        "hidden_act": SILU,
        "attn_output_gate": (None, True),
        "output_gate_type": (None, *SILU),
        "mamba_ssm_dtype": (None, "float32"),
    },
    renames=DELTA_NET_NAMES,
    defaults={**DELTA_NET_DEFAULTS, "num_key_value_heads": 4},
)
QWEN_3_5_MOE = replace(
    QWEN_3_5,
    model_type="qwen3_5_moe_text",
    experts=True,
    parts={**QWEN_3_5.parts, "gates_shared_expert": True},
    derive=qwen_3_5_moe,
    supported={**QWEN_3_5.supported, "norm_topk_prob": (None, True), "mlp_only_layers": (None, [])},
    defaults={
        **DELTA_NET_DEFAULTS,
        "num_key_value_heads": 2,
        "intermediate_size": 512,  # of layers without experts, which it does not have
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)

HYBRID = {
    "MambaForCausalLM": MAMBA_1,
    "FalconMambaForCausalLM": replace(
        MAMBA_1,
        model_type="falcon_mamba",
        derive=falcon_mamba,
        understands=MAMBA_1.understands | {"use_falcon_mambapy"},
        defaults={**MAMBA_1.defaults, "mixer_rms_eps": 1e-6},
    ),
    "Mamba2ForCausalLM": replace(
        MAMBA_1,
        model_type="mamba2",
        derive=mamba_2,
        aliases={
            **MAMBA_1.aliases,
            "num_heads": "mamba_n_heads",
            "head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups",
        },
        defaults={
            **MAMBA_1.defaults,
            **MAMBA_2_DEFAULTS,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
    ),
    "Lfm2ForCausalLM": LFM_2,
    "Lfm2MoeForCausalLM": replace(
        LFM_2,
        model_type="lfm2_moe",
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=lfm2_moe,
        supported={"use_expert_bias": (True,)},
        renames=(*LFM_2.renames, (r"\.feed_forward\.expert_bias$", ".mlp.score_bias")),
        defaults={
            **LFM_2.defaults,
            "block_auto_adjust_ff_dim": False,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
    ),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next",
        qk_norm=True,
        experts=True,
        parts={"norm_offset": 1.0, "gates_attention": True, "gates_shared_expert": True},
        derive=qwen_3_next,
        understands=ROTARY_KEYS | {"full_attention_interval"},
        renames=DELTA_NET_NAMES,
        defaults={
            **DELTA_NET_DEFAULTS,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
    ),
    "Qwen3_5ForCausalLM": QWEN_3_5,
    "Qwen3_5MoeForCausalLM": QWEN_3_5_MOE,
    "OlmoHybridForCausalLM": Family(
        model_type="olmo_hybrid",
        qk_norm=True,
        parts={"norm_places": "after", "wide_qk_norm": True},
        derive=olmo_hybrid,
        understands=frozenset(
            {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
        ),
        supported={"hidden_act": SILU, "rope_scaling": (None,)},
        renames=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
            (r"\.linear_attn\.([qkvab])_proj\.", r".mixer.in_proj_\1."),
            (r"\.linear_attn\.g_proj\.", ".mixer.in_proj_z."),
            (r"\.linear_attn\.o_(proj|norm)\.", r".mixer.out_\1."),
            (r"\.mixer\.out_norm\.", ".mixer.norm."),
            *DELTA_NET_NAMES,
        ),
        defaults={
            "max_position_embeddings": 65536,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "eos_token_id": 100257,
        },
    ),
    "NemotronHForCausalLM": Family(
        model_type="nemotron_h",
        is_rotated=False,
        parts={"has_mlp": False, "has_gate": False},
        derive=nemotron_h,
        understands=MAMBA_KEYS
        | KERNEL_KEYS
        | {"chunk_size", "expand", "mamba_expand", "mamba_proj_bias", "mamba_dt_limit", "time_step_limit"}
        | {"residual_in_fp32", "rescale_prenorm_residual", "n_shared_experts", "moe_shared_expert_overlap"}
        | {"num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_hidden_layers"}
        | {"hybrid_override_pattern", "rope_theta", "partial_rotary_factor", "attention_head_dim", "norm_eps"},
        supported={
            "mamba_hidden_act": (None, *SILU),
            "mamba_ssm_cache_dtype": (None, "float32"),
            "moe_latent_size": (None,),
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
            (r"\.mixer\.(up_proj|down_proj|experts|gate)\b", r".mlp.\1"),
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
