"""Families with gated delta nets between layers with attention."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import ROTARY_KEYS, partial_rotation
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.layer_types import SILU, named_layers
from flambeau.llm.models.families.recurrence import Recurrence


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

DELTA_NETS = {
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
}
